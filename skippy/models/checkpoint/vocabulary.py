"""A checkpoint's tokenizer as GGUF metadata, as llama.cpp's converter would write it.

Two kinds: SentencePiece (``llama``), from ``tokenizer.model`` or from a ``tokenizer.json`` that was made of
one, and byte-level BPE (``gpt2``), from ``tokenizer.json``. How byte-level BPE cuts text into words is code
in llama.cpp, chosen by name; the name is found by the expression in ``tokenizer.json``, and one that
llama.cpp has no code for is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from gguf import GGUFValueType, SpecialVocab, TokenType

from skippy.models.errors import CheckpointError, show
from skippy.models.texts import read_bytes, read_object

from .folder import TEXTS, Checkpoint
from .sentencepiece import read_pieces

Fail = Callable[[str], NoReturn]
Metadata = dict[str, tuple[GGUFValueType, Any]]
"""Key → type and value; a list is an array of that type."""

_WORDS: Final[Mapping[str, str]] = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
}
"""llama.cpp's name of the expression that cuts text into words."""
_PAD_SCORE: Final = -10000.0
_ADDED_SCORE: Final = -1000.0
_SPACE: Final = "▁"  # SentencePiece's sign for a space


def read_vocabulary(checkpoint: Checkpoint, size: int) -> Metadata:
    """The ``tokenizer.*`` metadata with ``size`` tokens.

    Raises:
        CheckpointError: no tokenizer, a damaged one, or one of a kind that is not converted.
    """
    folder = checkpoint.folder
    if (folder / "tokenizer.model").is_file():
        metadata = _sentencepiece(checkpoint, size)
    elif (folder / "tokenizer.json").is_file():
        metadata = _tokenizer_json(checkpoint, size)
    else:
        raise CheckpointError(folder, "has no tokenizer; expected tokenizer.json or tokenizer.model")
    byte_level = metadata["tokenizer.ggml.model"][1] == "gpt2"
    prefix = _optional(checkpoint, "tokenizer_config.json").get("add_prefix_space")
    if isinstance(prefix, bool) and not byte_level:
        metadata["tokenizer.ggml.add_space_prefix"] = (GGUFValueType.BOOL, prefix)
    return metadata | _special(checkpoint, size, merges=byte_level)


def _optional(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    path = checkpoint.folder / name
    return read_object(path, TEXTS[name], CheckpointError) if path.is_file() else {}


def _texts(model: str, pre: str, tokens: list[Any], kinds: list[int]) -> Metadata:
    return {
        "tokenizer.ggml.model": (GGUFValueType.STRING, model),
        "tokenizer.ggml.pre": (GGUFValueType.STRING, pre),
        "tokenizer.ggml.tokens": (GGUFValueType.STRING, tokens),
        "tokenizer.ggml.token_type": (GGUFValueType.INT32, kinds),
    }


def _pads(size: int) -> list[Any]:
    return [f"[PAD{index}]" for index in range(size)]


def _sentencepiece(checkpoint: Checkpoint, size: int) -> Metadata:
    path = checkpoint.folder / "tokenizer.model"
    tokens, scores, kinds = _pads(size), [_PAD_SCORE] * size, [int(TokenType.UNUSED)] * size
    for index, piece in enumerate(
        read_pieces(path, read_bytes(path, TEXTS[path.name], CheckpointError))[:size]
    ):
        user_defined = piece.kind == TokenType.USER_DEFINED  # normal ones, says the converter
        tokens[index], scores[index] = piece.text, piece.score
        kinds[index] = int(TokenType.NORMAL) if user_defined else piece.kind
    for text, index in _optional(checkpoint, "added_tokens.json").items():
        if _is_id(index, size):
            tokens[index], scores[index] = text, _ADDED_SCORE
            kinds[index] = int(TokenType.USER_DEFINED)
    added = _optional(checkpoint, "tokenizer_config.json").get("added_tokens_decoder", {})
    for index, text, special in _added_decoder(checkpoint, added):
        if index < size:
            text, kind = _added(text, special)
            tokens[index], scores[index], kinds[index] = text, _ADDED_SCORE, kind
    return _texts("llama", "default", tokens, kinds) | {
        "tokenizer.ggml.scores": (GGUFValueType.FLOAT32, scores)
    }


def _is_id(value: Any, size: int) -> bool:
    return type(value) is int and 0 <= value < size


def _added(text: str, special: bool) -> tuple[str, int]:
    """Text and kind of an added token, with the converter's exceptions to what the file says."""
    looks_special = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(start) and text.endswith(end)
        for start, end in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))  # noqa: RUF001
    )
    if special or looks_special:
        return text, int(TokenType.CONTROL)
    return text.replace(_SPACE, " "), int(TokenType.USER_DEFINED)


def _added_decoder(checkpoint: Checkpoint, added: Any) -> Iterator[tuple[int, str, bool]]:
    path = checkpoint.folder / "tokenizer_config.json"
    if not isinstance(added, dict):
        raise CheckpointError(path, "damaged: added_tokens_decoder is not an object")
    for key, entry in added.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or not isinstance(text, str):
            raise CheckpointError(path, f"damaged: added token {show(key)} has no id or no content")
        yield int(key), text, bool(entry.get("special"))


def _tokenizer_json(checkpoint: Checkpoint, size: int) -> Metadata:
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = read_object(path, TEXTS[path.name], CheckpointError)

    def fail(message: str) -> NoReturn:
        raise CheckpointError(path, message)

    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        fail("its model is not BPE, the only kind that is converted")
    texts, added = model.get("vocab"), tokenizer.get("added_tokens") or []
    if not isinstance(texts, dict) or not isinstance(added, list):
        fail("damaged: model.vocab must be an object and added_tokens a list")
    tokens, kinds = _pads(size), [int(TokenType.UNUSED)] * size
    for text, index in texts.items():
        if not _is_id(index, size) or kinds[index] != TokenType.UNUSED:
            fail(f"damaged: token {show(text)} has the id {show(str(index))}, taken or not below {size}")
        tokens[index], kinds[index] = text, int(TokenType.NORMAL)
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            fail("damaged: an added token without content")
        if not _is_id(entry.get("id"), size):
            fail(f"damaged: added token {show(entry['content'])} has an id that is not below {size}")
        tokens[entry["id"]], kinds[entry["id"]] = _added(entry["content"], bool(entry.get("special")))
    if model.get("byte_fallback"):
        prefix = (GGUFValueType.BOOL, _prepends(tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")))
        fallback = _fallback(tokens, kinds, model.get("merges"), fail)
        return fallback | {"tokenizer.ggml.add_space_prefix": prefix}
    return _texts("gpt2", _word_cutter(tokenizer.get("pre_tokenizer"), fail), tokens, kinds)


def _fallback(tokens: list[Any], kinds: list[int], merges: Any, fail: Fail) -> Metadata:
    """A SentencePiece vocabulary written as BPE: the earlier a merge, the higher the score of its result.

    llama.cpp joins the pair whose result scores highest, Hugging Face's library the pair that comes first in
    the list. The list was made by sorting pairs by the score of the result, so both are the same.
    """
    if not isinstance(merges, list):
        fail("damaged: model.merges is not a list")
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or not all(isinstance(part, str) for part in pair):
            fail(f"damaged: merge {rank} is not a pair of texts")
        ranks.setdefault("".join(pair), rank)
    scores = [float(-ranks[text]) if text in ranks else _PAD_SCORE for text in tokens]
    for index, text in enumerate(tokens):
        if kinds[index] == TokenType.NORMAL and len(text) == 6 and text.startswith("<0x") and text[5] == ">":
            kinds[index] = int(TokenType.BYTE)
        elif text == "<unk>":
            kinds[index] = int(TokenType.UNKNOWN)
    return _texts("llama", "default", tokens, kinds) | {
        "tokenizer.ggml.scores": (GGUFValueType.FLOAT32, scores)
    }


def _prepends(*rules: Any) -> bool:
    """Whether one of these puts a space before the text."""
    for rule in rules:
        steps = [rule]
        if isinstance(rule, dict) and rule.get("type") == "Sequence":
            steps = rule.get("normalizers") or rule.get("pretokenizers") or []
        for step in steps if isinstance(steps, list) else []:
            kind = step.get("type") if isinstance(step, dict) else None
            if kind == "Prepend" or (kind == "Metaspace" and step.get("prepend_scheme", "always") != "never"):
                return True
    return False


def _word_cutter(rules: Any, fail: Fail) -> str:
    """llama.cpp's name for a byte-level pre-tokenizer."""
    steps = (
        rules.get("pretokenizers") if isinstance(rules, dict) and rules.get("type") == "Sequence" else [rules]
    )
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        fail("has no pre_tokenizer of a kind that is converted")
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0].get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(expression, str) and expression in _WORDS:
            return _WORDS[expression]
        fail(f"cuts text into words by {show(str(expression))}, for which llama.cpp has no known rule")
    fail(f"has the pre_tokenizer {show(str(kinds))}, for which llama.cpp has no known rule")


def _special(checkpoint: Checkpoint, size: int, *, merges: bool) -> Metadata:
    """Ids of special tokens, whether they are added, merges and chat template."""
    try:
        found = SpecialVocab(checkpoint.folder, load_merges=merges, n_vocab=size)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(checkpoint.folder, f"its tokenizer's files are damaged: {reason}") from error
    metadata: Metadata = {}
    if merges:
        if not all(isinstance(merge, str) for merge in found.merges) or not found.merges:
            raise CheckpointError(checkpoint.folder, "damaged: its byte-level BPE has no merges")
        metadata["tokenizer.ggml.merges"] = (GGUFValueType.STRING, found.merges)
    for kind, index in found.special_token_ids.items():
        key = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(kind, kind)  # spelled like that
        metadata[f"tokenizer.ggml.{key}_token_id"] = (GGUFValueType.UINT32, index)
    for kind, add in found.add_special_token.items():
        metadata[f"tokenizer.ggml.add_{kind}_token"] = (GGUFValueType.BOOL, bool(add))
    for name, template in _templates(found.chat_template):
        metadata[f"tokenizer.chat_template{name}"] = (GGUFValueType.STRING, template)
    return metadata


def _templates(given: Any) -> Iterator[tuple[str, str]]:
    """Suffix of the key, and text, of each chat template."""
    if isinstance(given, str):
        yield "", given
    for entry in given if isinstance(given, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            name = entry.get("name")
            yield ("" if name in (None, "default") else f".{name}"), entry["template"]

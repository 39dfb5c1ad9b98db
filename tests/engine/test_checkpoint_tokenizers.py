"""Tokenizers of checkpoints, in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skippy.engine import EngineOptions
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFHeader, ensure_slice, header_path
from tests.support.checkpoints import GEMMAS, PIECES, sentencepieces, write_checkpoint, write_sentencepiece
from tests.support.tiny_models import CHAT_TEMPLATE

OPTIONS = EngineOptions(context_length=32, max_sequences=1, n_threads=1, n_threads_batch=1)
FIRST = len(sentencepieces()) - len(PIECES)


def tokens(folder: Path, text: str) -> list[int]:
    engine = LlamaEngine.load(ensure_slice(folder, 0, 3, cache_dir=folder / "c"), OPTIONS)
    try:
        assert engine.vocabulary is not None
        return list(engine.vocabulary.tokenize(text, add_special=True, parse_special=False))
    finally:
        engine.close()


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("family", ["llama", *GEMMAS])
def test_sentencepiece(family: str, as_json: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", family, width=64, feed_forward=64)
    write_sentencepiece(folder, as_json=as_json)
    space, a = FIRST, FIRST + PIECES.index("a")
    prefix = [] if family in GEMMAS else [space]  # gemma's tokenizer puts no space in front
    found = tokens(folder, "aé")
    assert found == [1, *prefix, a, 3 + 0xC3, 3 + 0xA9]  # <s>, and bytes for what is no piece
    # "ab" scores better than "bc", so "abc" is ab + c before it is one.
    expected = FIRST + PIECES.index("abc" if family in GEMMAS else "▁abc")
    assert tokens(folder, "abc") == [1, expected]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_gemma_adds(as_json: bool, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "gemma3", width=64, feed_forward=64)
    write_sentencepiece(folder, as_json=as_json)
    added = {FIRST + len(PIECES): "▁▁", FIRST: "<unused0>"}
    if as_json:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["added_tokens"] += [
            {"id": index, "content": text, "special": False} for index, text in added.items()
        ]
    else:
        path = folder / "tokenizer_config.json"
        tokenizer = json.loads(path.read_text())
        tokenizer["added_tokens_decoder"] = {
            str(index): {"content": text, "special": False} for index, text in added.items()
        }
    path.write_text(json.dumps(tokenizer))
    a = FIRST + PIECES.index("a")
    assert tokens(folder, "a  a") == [1, a, FIRST + len(PIECES), a]  # two spaces are one token
    header = GGUFHeader.read(header_path(folder, cache_dir=folder / "c"))
    kinds = header.value("tokenizer.ggml.token_type")
    assert [list(kinds)[index] for index in added] == [4, 3]  # user-defined, and control by its looks


def test_byte_level(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "qwen2", width=64, feed_forward=64)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokens(folder, "in the") == [vocabulary["in"], vocabulary["Ġthe"]]
    header = GGUFHeader.read(header_path(folder, cache_dir=folder / "c"))
    assert header.text("tokenizer.ggml.pre") == "qwen2"
    assert header.text("tokenizer.chat_template") == CHAT_TEMPLATE
    assert header.count("tokenizer.ggml.eos_token_id") == len(vocabulary) + 2
    assert header.value("tokenizer.ggml.add_bos_token") is False
    assert header.text("general.architecture") == "qwen2"


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}],
            },
            "smollm",
        ),
    ],
)
def test_rules_without_an_expression(rules: object, name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", width=64, feed_forward=64)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": rules}))
    assert GGUFHeader.read(header_path(folder, cache_dir=folder / "c")).text("tokenizer.ggml.pre") == name

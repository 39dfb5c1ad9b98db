"""Tokenizers: what goes in comes out, special tokens, hostile input."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFValueType

from skippy.engine import EngineError, EngineOptions, ModelLoadError, Vocabulary
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFHeader, SliceInfo, write_slice
from skippy.models.tiny import write_tiny_model
from tests.support.tiny_models import write_tiny

from .chains import Kind

TEXTS = [
    "",
    "Hello, world!",
    "naïve café 東京 🙂",
    "a\0b",
    "line\n\n  two\t",
    "x" * 5000,
    "the thing in the on ",
]


@pytest.fixture(params=["toy", "llama", pytest.param("bundled", marks=pytest.mark.model)])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    name = {"toy": "toy_kind", "llama": "tiny_kind", "bundled": "bundled_kind"}[request.param]
    kind: Kind = request.getfixturevalue(name)
    stage = kind.load(0, 2)
    assert stage.vocabulary is not None
    yield stage.vocabulary
    stage.close()


def joined(vocabulary: Vocabulary, tokens: list[int], special: bool = False) -> str:
    return b"".join(vocabulary.piece(token, special=special) for token in tokens).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(vocabulary: Vocabulary, text: str) -> None:
    for parse_special in (False, True):
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=parse_special)
        assert joined(vocabulary, tokens) == text
        assert all(0 <= token < vocabulary.size for token in tokens)


def test_special_tokens(vocabulary: Vocabulary) -> None:
    assert "<|im_start|>" in vocabulary.special_tokens
    assert "<|im_end|>" in vocabulary.special_tokens
    text = "a<|im_start|>b"
    parsed = vocabulary.tokenize(text, add_special=False, parse_special=True)
    plain = vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert len(parsed) == 3 < len(plain)
    assert joined(vocabulary, plain) == text
    assert joined(vocabulary, parsed) == "ab"
    assert joined(vocabulary, parsed, special=True) == text
    for word in vocabulary.special_tokens:
        assert len(vocabulary.tokenize(word, add_special=False, parse_special=True)) == 1


def test_ends_of_generation(vocabulary: Vocabulary) -> None:
    (end,) = vocabulary.tokenize("<|im_end|>", add_special=False, parse_special=True)
    (start,) = vocabulary.tokenize("<|im_start|>", add_special=False, parse_special=True)
    assert vocabulary.eos is not None
    assert vocabulary.is_end_of_generation(end)
    assert vocabulary.is_end_of_generation(vocabulary.eos)
    assert not vocabulary.is_end_of_generation(65)
    for token in (-1, vocabulary.size, 2**40):
        assert not vocabulary.is_end_of_generation(token)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            vocabulary.piece(token)
    assert start != end


def test_all_pieces_at_once(vocabulary: Vocabulary) -> None:
    for special in (False, True):
        expected = [vocabulary.piece(token, special=special) for token in range(vocabulary.size)]
        assert vocabulary.pieces(special=special) == expected


def test_long_pieces(tmp_path: Path) -> None:
    """They do not fit where the others do."""
    texts = ["a" * 63, "b" * 64, "c" * 65, "d" * 300, "e", *(chr(300 + i) for i in range(300))]
    engine = LlamaEngine.load(
        SliceInfo.from_file(write_tiny(tmp_path / "m.gguf", layers=2, tokens=texts)),
        EngineOptions(n_threads=1),
    )
    assert engine.vocabulary is not None
    assert engine.vocabulary.pieces()[:5] == [text.encode() for text in texts[:5]]
    engine.close()
    with pytest.raises(EngineError):
        engine.vocabulary.pieces()


def test_added_special_tokens(vocabulary: Vocabulary) -> None:
    bare = vocabulary.tokenize("hello", add_special=False, parse_special=False)
    added = vocabulary.tokenize("hello", add_special=True, parse_special=False)
    assert added == ([vocabulary.bos, *bare] if vocabulary.adds_bos else bare)


def test_chat_template(vocabulary: Vocabulary) -> None:
    assert vocabulary.chat_template is not None
    assert "<|im_start|>" in vocabulary.chat_template


def test_lone_surrogate(vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        vocabulary.tokenize("ab\ud800c", add_special=False, parse_special=True)


def test_threads_may_share_it(vocabulary: Vocabulary) -> None:
    texts = [text * 20 for text in TEXTS]
    expected = [vocabulary.tokenize(text, add_special=True, parse_special=True) for text in texts]

    def run(index: int) -> list[list[int]]:
        return [vocabulary.tokenize(text, add_special=True, parse_special=True) for text in texts]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(run, range(8)))


def test_closed_engine(tiny_kind: Kind) -> None:
    stage = tiny_kind.load(0, 2)
    vocabulary = stage.vocabulary
    assert vocabulary is not None
    assert vocabulary.piece(65)
    stage.close()
    assert vocabulary.piece(65)
    with pytest.raises(EngineError, match="closed"):
        vocabulary.tokenize("a", add_special=False, parse_special=False)
    with pytest.raises(EngineError, match="closed"):
        vocabulary.piece(66)


_RECURSIVE = """
import sys, threading
from pathlib import Path
from skippy.engine import EngineOptions
from skippy.engine.llama import LlamaEngine
from skippy.models import GGUFHeader, SliceInfo, write_slice
from skippy.models.tiny import write_tiny_model

engine = LlamaEngine.load(SliceInfo.from_file(Path(sys.argv[1])), EngineOptions(n_threads=1))
text = " " + "a" * 65536

def run():
    found = engine.vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(map(engine.vocabulary.piece, found)).decode() == text
    try:
        engine.vocabulary.tokenize("a" * 65537, add_special=False, parse_special=False)
    except ValueError as error:
        print(error)

threading.stack_size(1 << 20)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def test_long_words_do_not_overflow_the_stack(tmp_path: Path) -> None:
    # llama.cpp matches this pre-tokenizer's pattern recursively; without care the process would end
    model = write_tiny(
        tmp_path / "m.gguf", layers=2, extra={"tokenizer.ggml.pre": (GGUFValueType.STRING, "deepseek-llm")}
    )
    found = subprocess.run(
        [sys.executable, "-c", _RECURSIVE, model], capture_output=True, text=True, check=True
    )
    assert "65537 characters without a break" in found.stdout


_NUMBER, _TEXT, _REAL, _FLAG = (
    GGUFValueType.UINT32,
    GGUFValueType.STRING,
    GGUFValueType.FLOAT32,
    GGUFValueType.BOOL,
)


def _grouped(experts: int, groups: int, used: int) -> dict[str, tuple[GGUFValueType, int]]:
    numbers = {"count": experts, "used_count": 2, "group_count": groups, "group_used_count": used}
    return {f"llama.expert_{name}": (_NUMBER, number) for name, number in numbers.items()}


HOSTILE = {
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": (_REAL, -1.0)}, "layer_norm_rms_epsilon"),
    "nan": ({"llama.attention.layer_norm_rms_epsilon": (_REAL, float("nan"))}, "layer_norm_rms_epsilon"),
    "experts": ({"llama.expert_count": (_NUMBER, 4), "llama.expert_used_count": (_NUMBER, 9)}, "9 experts"),
    "no experts used": ({"llama.expert_count": (_NUMBER, 4)}, "0 experts used of 4"),
    "experts by layer": (
        {"llama.expert_count": (_NUMBER, 4), "llama.expert_used_count": (_NUMBER, [1, 9])},
        "9 experts used of 4",
    ),
    "many experts": (
        {"llama.expert_count": (_NUMBER, 1025), "llama.expert_used_count": (_NUMBER, 2)},
        "1025 experts, llama.cpp takes 1024",
    ),
    "groups": (_grouped(4, 4, 1), "4 experts in 4 groups"),
    "odd groups": (_grouped(4, 3, 1), "4 experts in 3 groups, of which 1 are used"),
    "groups used": (_grouped(4, 2, 2), "4 experts in 2 groups, of which 2 are used"),
    "scaling": ({"llama.rope.scaling.type": (_TEXT, "zzz")}, "rope.scaling.type"),
    "not causal": ({"llama.attention.causal": (_FLAG, False)}, "token by token"),
    "no vocabulary": ({"tokenizer.ggml.model": (_TEXT, "no_vocab")}, "no vocabulary"),
    "byte tokens": (
        {"tokenizer.ggml.model": (_TEXT, "llama"), "tokenizer.ggml.scores": (_REAL, [0.0] * 269)},
        "no token for byte",
    ),
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_files_that_would_end_the_process(name: str, tmp_path: Path) -> None:
    extra, message = HOSTILE[name]
    model = write_tiny(tmp_path / "m.gguf", layers=2, extra=extra)  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=message):
        LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))


def test_more_layers_than_llama_cpp_takes(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf", layers=513, width=4, heads=1, kv_heads=1, feed_forward=4)
    with pytest.raises(ModelLoadError, match="has 513 layers, llama.cpp takes 512"):
        LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama4"])
def test_windows_that_no_layer_has(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", name, metadata={"attention.sliding_window_pattern": [0]})
    with pytest.raises(ModelLoadError, match=r"sliding_window_pattern no layer has a window"):
        LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))


@pytest.mark.parametrize("name", ["deepseek4", "lfm2"])
def test_windows_that_no_layer_needs(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", name, metadata={"attention.sliding_window_pattern": [0]})
    engine = LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))
    engine.close()


def test_a_vocabulary_with_a_text_twice(tmp_path: Path) -> None:
    model = write_tiny(
        tmp_path / "m.gguf", layers=2, tokens=["a", "b", "a"] + [chr(300 + i) for i in range(300)]
    )
    with pytest.raises(ModelLoadError, match="1 texts twice"):
        LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
def test_special_ids_outside_the_vocabulary(flag: str, tmp_path: Path) -> None:
    nowhere = (_NUMBER, 2**31 - 1)
    extra = {
        f"tokenizer.ggml.{flag}": (_FLAG, True),
        "tokenizer.ggml.bos_token_id": nowhere,
        "tokenizer.ggml.eos_token_id": nowhere,
    }
    model = write_tiny(tmp_path / "m.gguf", layers=2, extra=extra)
    engine = LlamaEngine.load(SliceInfo.from_file(model), EngineOptions(n_threads=1))
    assert engine.vocabulary is not None  # llama.cpp falls back to its own defaults
    tokens = engine.vocabulary.tokenize("hello", add_special=True, parse_special=True)
    assert all(0 <= token < engine.vocabulary.size for token in tokens)
    engine.close()


def test_recommended_sampling_survives_slicing(tmp_path: Path) -> None:
    extra = {
        "general.sampling.temp": (GGUFValueType.FLOAT32, 0.6),
        "general.sampling.top_k": (GGUFValueType.INT32, 20),
        "general.sampling.sequence": (GGUFValueType.STRING, "top_k;temperature"),
    }
    whole = write_tiny(tmp_path / "whole.gguf", extra=extra)
    first = write_slice(GGUFHeader.read(whole), tmp_path / "first.gguf", 0, 2).path
    for path, plain in ((whole, False), (first, False), (write_tiny(tmp_path / "plain.gguf"), True)):
        options = EngineOptions(context_length=64, max_sequences=1)
        engine = LlamaEngine.load(SliceInfo.from_file(path), options)
        assert engine.vocabulary is not None
        found = dict(engine.vocabulary.sampling_metadata)
        engine.close()
        assert found.keys() == (set() if plain else {"temp", "top_k", "sequence"})
        if not plain:
            assert (float(found["temp"]), found["top_k"]) == (pytest.approx(0.6, abs=1e-6), "20")
            assert found["sequence"] == "top_k;temperature"

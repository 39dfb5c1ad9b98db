"""The tokenizer of a loaded slice, over ``llama_vocab``."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from typing import Final

from skippy.engine.base import EngineError, ModelLoadError, Vocabulary

from .deep_stack import DIRECT_RUN, OWN_SPLITTER, RUN_LIMIT, call_with_deep_stack, longest_run
from .native import api, metadata

_NO_VOCABULARY: Final = 0  # LLAMA_VOCAB_TYPE_NONE
_BYTE_PAIRS: Final = 2  # LLAMA_VOCAB_TYPE_BPE
_WORDPIECE: Final = 3  # LLAMA_VOCAB_TYPE_WPM
_UNKNOWN, _CONTROL, _USER_DEFINED = 1 << 0, 1 << 3, 1 << 4  # enum llama_token_attr
_MAX_TEXT_BYTES: Final = 2**30
_PIECE_BYTES: Final = 64
_PIECES_AT_ONCE: Final = 1024


_SAMPLING_KEYS: Final = (
    "sequence",
    "top_k",
    "top_p",
    "min_p",
    "xtc_probability",
    "xtc_threshold",
    "temp",
    "penalty_last_n",
    "penalty_repeat",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)
"""``general.sampling.*`` keys that llama.cpp knows."""


class LlamaVocabulary(Vocabulary):
    """Calls on the native vocabulary, which is read-only and may be used from any thread.

    A lock keeps the model alive while a call runs: :meth:`close` waits for it. Calls after that raise
    EngineError, except for what was cached.
    """

    def __init__(self, model: int) -> None:
        """Raises ModelLoadError if the vocabulary would end the process when used."""
        self._vocab = int(api.llama_model_get_vocab(model))
        self._lock = threading.Lock()
        self._closed = False
        self._size = int(api.llama_vocab_n_tokens(self._vocab))
        self._bos = self._token(api.llama_vocab_bos)
        self._eos = self._token(api.llama_vocab_eos)
        self._adds_bos = bool(api.llama_vocab_get_add_bos(self._vocab))
        self._check_special_ids()
        pre = metadata(model, "tokenizer.ggml.pre") or "default"
        self._recursive = api.llama_vocab_type(self._vocab) == _BYTE_PAIRS and pre not in OWN_SPLITTER
        template = api.llama_model_chat_template(model, None)
        self._template = None if template is None else template.decode(errors="replace")
        found = {name: metadata(model, f"general.sampling.{name}") for name in _SAMPLING_KEYS}
        self._sampling = {name: value for name, value in found.items() if value is not None}
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @staticmethod
    def exists(model: int) -> bool:
        """Whether the model file carries a vocabulary."""
        return bool(api.llama_vocab_type(api.llama_model_get_vocab(model)) != _NO_VOCABULARY)

    def _token(self, function: object) -> int | None:
        token = int(function(self._vocab))  # type: ignore[operator]
        return token if 0 <= token < self._size else None

    def _check_special_ids(self) -> None:
        # llama.cpp asserts these while tokenising, so a file that breaks them must not get that far.
        if self._adds_bos and self._bos is None:
            raise ModelLoadError("the tokenizer adds a BOS token, but the model file names none")
        if api.llama_vocab_get_add_eos(self._vocab) and self._eos is None:
            raise ModelLoadError("the tokenizer adds an EOS token, but the model file names none")
        separator = self._token(api.llama_vocab_sep)
        wordpiece = api.llama_vocab_type(self._vocab) == _WORDPIECE
        if wordpiece and (self._bos is None or separator is None):
            raise ModelLoadError(
                "the tokenizer adds BOS and SEP tokens, but the model file does not name both"
            )

    def close(self) -> None:
        """No more native calls; waits for one that runs."""
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine of this vocabulary is closed")

    @property
    def pointer(self) -> int:
        """llama.cpp's vocabulary pointer, for samplers; valid until the engine is closed."""
        return self._vocab

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int | None:
        return self._bos

    @property
    def eos(self) -> int | None:
        return self._eos

    @property
    def chat_template(self) -> str | None:
        return self._template

    @property
    def sampling_metadata(self) -> Mapping[str, str]:
        return self._sampling

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self._specials[0]

    @property
    def end_of_generation(self) -> frozenset[int]:
        """All tokens that end a generation."""
        return self._specials[1]

    @property
    def adds_bos(self) -> bool:
        return self._adds_bos

    @functools.cached_property
    def _specials(self) -> tuple[tuple[str, ...], frozenset[int]]:
        texts: dict[str, None] = {}
        ends: set[int] = set()
        with self._lock:
            self._check_open()
            for token in range(self._size):
                if api.llama_vocab_get_attr(self._vocab, token) & (_UNKNOWN | _CONTROL | _USER_DEFINED):
                    text = api.llama_vocab_get_text(self._vocab, token).decode(errors="replace")
                    if text:
                        texts[text] = None
                if api.llama_vocab_is_eog(self._vocab, token):
                    ends.add(token)
        return tuple(texts), frozenset(ends)

    def is_end_of_generation(self, token: int) -> bool:
        return token in self.end_of_generation

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """As the base class says. Raises ValueError for text that is not valid Unicode or too long."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text has a lone surrogate at character {error.start}") from None
        if len(data) > _MAX_TEXT_BYTES:
            raise ValueError(f"text of {len(data)} bytes, at most {_MAX_TEXT_BYTES} can be tokenised")
        run = longest_run(text) if self._recursive else 0
        if run > RUN_LIMIT:
            raise ValueError(
                f"text has {run} characters without a break; this model's tokenizer takes {RUN_LIMIT}"
            )
        if run > DIRECT_RUN:
            return call_with_deep_stack(lambda: self._tokenize(data, add_special, parse_special))
        return self._tokenize(data, add_special, parse_special)

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(data) // 2 + 16
        while True:
            buffer = (ctypes.c_int32 * capacity)()
            with self._lock:
                self._check_open()
                count = api.llama_tokenize(
                    self._vocab, data, len(data), buffer, capacity, add_special, parse_special
                )
            if count >= 0:
                return list(buffer[:count])
            if -count <= capacity:
                raise EngineError("llama.cpp could not tokenise the text")
            capacity = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """As the base class says. Raises ValueError for an id outside the vocabulary."""
        cached = self._pieces.get((token, special))
        if cached is None:
            if not 0 <= token < self._size:
                raise ValueError(f"token id {token} is outside the vocabulary of {self._size}")
            cached = self._pieces[token, special] = self._native_piece(token, special)
        return cached

    def pieces(self, *, special: bool = False) -> list[bytes]:
        found: list[bytes] = []
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        to_piece = api.llama_token_to_piece
        while len(found) < self._size:
            with self._lock:  # others may have it in between
                self._check_open()
                for token in range(len(found), min(self._size, len(found) + _PIECES_AT_ONCE)):
                    count = to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, special)
                    if count < 0:
                        break
                    found.append(ctypes.string_at(buffer, count))
                else:
                    continue
            found.append(self._native_piece(len(found), special))  # a long one
        return found

    def _native_piece(self, token: int, special: bool) -> bytes:
        capacity = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            with self._lock:
                self._check_open()
                count = api.llama_token_to_piece(self._vocab, token, buffer, capacity, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            capacity = -count

"""The toy engine's tokenizer: one token per byte, and five special tokens."""

from __future__ import annotations

import re
from typing import Final

from .base import Vocabulary

_SPECIAL: Final[tuple[str, ...]] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TOY_TOKENS: Final = 256 + len(_SPECIAL)
"""Tokens with a meaning: 256 bytes and the special ones. Ids above stand for nothing."""

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPLIT: Final = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")


class ToyVocabulary(Vocabulary):
    """Byte-level vocabulary: ids 0 … 255 are bytes, then BOS, EOS, ``<|im_start|>`` and ``<|im_end|>``."""

    BOS: Final = 256
    EOS: Final = 257
    IM_START: Final = 258
    IM_END: Final = 259

    def __init__(self, size: int = TOY_TOKENS) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    @property
    def bos(self) -> int | None:
        return self.BOS

    @property
    def eos(self) -> int | None:
        return self.EOS

    @property
    def chat_template(self) -> str | None:
        return _CHAT_TEMPLATE

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return _SPECIAL

    @property
    def adds_bos(self) -> bool:
        return True

    def is_end_of_generation(self, token: int) -> bool:
        return token in (self.EOS, self.IM_END)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = [self.BOS] if add_special else []
        parts = _SPLIT.split(text) if parse_special else [text]
        for part in parts:
            if parse_special and part in _SPECIAL:
                tokens.append(256 + _SPECIAL.index(part))
            else:
                tokens.extend(part.encode())
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self._size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self._size}")
        if token < 256:
            return bytes((token,))
        if special and token < TOY_TOKENS:
            return _SPECIAL[token - 256].encode()
        return b""

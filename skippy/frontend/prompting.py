"""Requests → prompt tokens: chat template, no special tokens out of user text, tokenisation in a thread."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import trio

from skippy.engine import Vocabulary
from skippy.telemetry import NULL_TELEMETRY, Telemetry, names

from .errors import ApiError
from .prompts import Prompt
from .schemas import ChatMessage
from .templates import TemplateRenderer

T = TypeVar("T")

# For models that bring no template: ChatML, which is also what llama.cpp falls back to.
CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@attrs.frozen(slots=True)
class PromptSegment:
    """A part of a rendered prompt; texts of special tokens count as such only in a ``trusted`` one."""

    text: str
    trusted: bool


class PromptBuilder:
    """Turns messages and prompts into token ids for one model.

    Tokenisation runs in a worker thread, one call at a time. All methods may be cancelled at any point;
    a tokenisation that has begun is finished first.
    """

    def __init__(
        self, vocabulary: Vocabulary, renderer: TemplateRenderer, telemetry: Telemetry = NULL_TELEMETRY
    ) -> None:
        self._vocabulary = vocabulary
        self._renderer = renderer
        self._telemetry = telemetry
        self._limiter = trio.CapacityLimiter(1)
        self._template = vocabulary.chat_template or CHATML_TEMPLATE
        self._bos_text = _token_text(vocabulary, vocabulary.bos)
        self._eos_text = _token_text(vocabulary, vocabulary.eos)
        texts = sorted({text for text in vocabulary.special_tokens if text}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None

    async def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Prompt tokens of a conversation, ready for the assistant's next words.

        Raises:
            ApiError: 400, the template refused the messages or was stopped.
        """
        segments = await self.render(messages)
        return await self._tokenise(self._encode_segments, segments)

    async def render(self, messages: Sequence[ChatMessage]) -> list[PromptSegment]:
        """The rendered conversation, in order.

        Texts that contain a special token's text are replaced by placeholders that nobody can guess before
        the template runs, and put back afterwards as untrusted segments.
        """
        originals: dict[str, str] = {}

        def guarded(text: str) -> str:
            if self._special is None or self._special.search(text) is None:
                return text
            # White space stays outside, where the template can trim it.
            core = text.strip()
            if self._special.search(core) is None:
                core = text
            before, after = text.split(core, 1)
            placeholder = f"x{secrets.token_hex(16)}x"
            originals[placeholder] = core
            return before + placeholder + after

        context: dict[str, Any] = {
            "messages": [_template_message(message, guarded) for message in messages],
            "add_generation_prompt": True,
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            "tools": None,
            "documents": None,
        }
        with self._telemetry.span(names.STAGE_OPENAI_CHAT_TEMPLATE, messages=len(messages)) as span:
            rendered = await self._renderer.render(self._template, context)
            span["rendered_chars"] = len(rendered)
        return _split(rendered, originals)

    async def tokens(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Prompt tokens of raw text, or of token ids as they are.

        Texts of special tokens count as such: the caller writes the prompt. ``name`` is that of its field.

        Raises:
            ApiError: 400, text that no tokenizer takes, or ids that the model does not have.
        """
        if isinstance(prompt, str):
            return await self._tokenise(self._encode_text, prompt)
        check_token_ids(prompt, self._vocabulary, name)
        return list(prompt)

    def echo(self, prompt: Prompt) -> str:
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        data = b"".join(self._vocabulary.piece(token, special=True) for token in prompt)
        return data.decode("utf-8", "replace")

    async def _tokenise(self, encode: Callable[[T], list[int]], value: T) -> list[int]:
        with self._telemetry.span(names.STAGE_OPENAI_TOKENIZE) as span:
            try:
                tokens = await trio.to_thread.run_sync(encode, value, limiter=self._limiter)
            except ValueError as error:  # text that no tokenizer takes, such as a word of 100,000 letters
                raise ApiError(f"the prompt cannot be tokenised: {error}") from error
            span["prompt_tokens"] = len(tokens)
        return tokens

    def _encode_text(self, prompt: str) -> list[int]:
        doubled = bool(self._bos_text) and self._vocabulary.adds_bos and prompt.startswith(self._bos_text)
        return self._vocabulary.tokenize(prompt, add_special=not doubled, parse_special=True)

    def _encode_segments(self, segments: Sequence[PromptSegment]) -> list[int]:
        vocabulary = self._vocabulary
        tokens: list[int] = []
        for segment in segments:
            tokens += vocabulary.tokenize(segment.text, add_special=False, parse_special=segment.trusted)
        # Most templates write BOS themselves. EOS is never added: the conversation goes on.
        if vocabulary.adds_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
            tokens.insert(0, vocabulary.bos)
        return tokens


def _template_message(message: ChatMessage, guarded: Callable[[str], str]) -> dict[str, str]:
    result = {"role": message.role, "content": guarded(message.content)}
    if message.name is not None:
        result["name"] = guarded(message.name)
    return result


def _split(rendered: str, originals: dict[str, str]) -> list[PromptSegment]:
    if not originals:
        return [PromptSegment(rendered, True)] if rendered else []
    segments = []
    # One capture group: pieces alternate between template text and placeholders.
    for index, piece in enumerate(re.split(f"({'|'.join(originals)})", rendered)):
        if index % 2:
            segments.append(PromptSegment(originals[piece], False))
        elif piece:
            segments.append(PromptSegment(piece, True))
    return segments


def _token_text(vocabulary: Vocabulary, token: int | None) -> str:
    return "" if token is None else vocabulary.piece(token, special=True).decode("utf-8", "replace")


def check_token_ids(prompt: Sequence[int], vocabulary: Vocabulary, name: str) -> None:
    """Refuse token ids that the model does not have."""
    for index, token in enumerate(prompt):
        if token >= vocabulary.size:
            param = f"{name}[{index}]"
            text = f"{param} is {token}; this model's token ids are 0 to {vocabulary.size - 1}"
            raise ApiError(text, param=param)

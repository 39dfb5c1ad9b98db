"""Requests → prompt tokens: chat template, no special tokens out of user text, tokenisation in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import attrs
import trio

from skippy.engine import Vocabulary
from skippy.telemetry import NULL_TELEMETRY, Telemetry, names

from .chat_settings import ChatSettings
from .continuing import harmony_opening, split_beginning, thinks
from .conversation import (
    guarded_message,
    needs_features,
    plain_message,
    template_messages,
    template_tools,
)
from .errors import ApiError
from .generation import Constraint
from .guarding import Guard, PromptSegment, SpecialTexts
from .prompts import Prompt
from .schemas import ChatMessage
from .template_features import TemplateFeatures, TemplateText, probe
from .templates import TemplateRenderer
from .token_ids import check_token_ids
from .tools import THINK, AnswerReading, ReasoningTags, ToolFormat, marks
from .tools.grammar import CallRules, answer_grammar

T = TypeVar("T")

NO_SETTINGS: Final = ChatSettings()

# For models that bring no template: ChatML, which is also what llama.cpp falls back to.
CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_OPENING: Final = 100
"""Characters at a rendering's end in which a tag may stand that opens the reasoning."""
MAX_TEMPLATES: Final = 8
"""Templates of which it is remembered what they can do."""


@attrs.frozen(slots=True)
class ChatPrompt:
    """A conversation ready for the assistant's next words.

    Attributes:
        reading: how those are to be read; None: they are text.
        constraint: what they are held to; None: nothing.
    """

    tokens: list[int]
    reading: AnswerReading | None = None
    constraint: Constraint | None = None


class PromptBuilder:
    """Turns messages and prompts into token ids for one model.

    Tokenisation runs in a worker thread, one call at a time. All methods may be cancelled at any point;
    a tokenisation that has begun is finished first. Text that is longer than ``context_length`` times the
    longest token is refused before it: megabytes would take seconds, which everybody waits for.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        renderer: TemplateRenderer,
        telemetry: Telemetry = NULL_TELEMETRY,
        *,
        context_length: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._longest_piece = 0
        self._renderer = renderer
        self._telemetry = telemetry
        self._limiter = trio.CapacityLimiter(1)
        self._template = vocabulary.chat_template or CHATML_TEMPLATE
        self._bos_text = _token_text(vocabulary, vocabulary.bos)
        self._eos_text = _token_text(vocabulary, vocabulary.eos)
        self._special = SpecialTexts(vocabulary.special_tokens)
        self._text = TemplateText.of(self._template)
        self._features: dict[str, TemplateFeatures] = {}
        self._probing = trio.Lock()
        self._known_marks: dict[tuple[ToolFormat | None, ReasoningTags | None], dict[str, int]] = {}

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        settings: ChatSettings = NO_SETTINGS,
        constraint: Constraint | None = None,
    ) -> ChatPrompt:
        """Prompt tokens of a conversation, ready for the assistant's next words.

        Args:
            constraint: what the answer is held to, apart from its reasoning and its calls.

        Raises:
            ApiError: 400, the template refused the messages or was stopped, or has no way to do what the
                settings ask for.
        """
        messages, beginning = self._split(messages, settings)
        opening, segments = await self._render(messages, beginning, settings)
        text = self._template_text(settings)
        use, tags = settings.tool_use, text.reasoning
        framed = text.format is ToolFormat.HARMONY
        tool_format = await self._tool_format(text, settings) if use.tools or framed else None
        opened = harmony_opening(opening, beginning) if framed else ""
        tokens = await self._tokenise(self._encode_segments, segments, "messages")
        if settings.reasoning_format == "deepseek":
            tags = tags or THINK
        in_thought = tags is not None and thinks(opening, beginning, tags)
        shaped = constraint is not None and not (tags is None and tool_format is None)
        if use.is_enforced or shaped:
            calls = None
            if (
                tool_format is ToolFormat.CODER
            ):  # whose values have no grammar; such models know this one, too
                tool_format = ToolFormat.HERMES
            if tool_format is not None:
                calls = self._call_rules(settings, tool_format, opened or opening + beginning)
            answer = None if constraint is None else constraint.grammar
            marked = self._marks(tool_format, tags)
            grammar = answer_grammar(calls, answer, reasoning=tags, thinks=in_thought, tokens=marked)
            param = "tool_choice" if use.required else "tools"
            constraint = Constraint(grammar, param if constraint is None else constraint.param)
        if settings.reasoning_format == "none":
            tags, in_thought = None, False
        if tags is None and tool_format is None:
            return ChatPrompt(tokens, None, constraint)
        reading = AnswerReading(
            tools=tool_format,
            names=use.allowed,
            parallel=use.parallel,
            reasoning=tags,
            thinks=in_thought,
            texts={tool.name: tool.texts for tool in use.tools} if tool_format is ToolFormat.CODER else {},
            opened=opened,
            shown=frozenset(self._marks(tool_format, tags).values()),
        )
        return ChatPrompt(tokens, reading, constraint)

    def _call_rules(self, settings: ChatSettings, tool_format: ToolFormat, prompt_end: str) -> CallRules:
        use = settings.tool_use
        return CallRules(
            format=tool_format,
            template=settings.template or self._template,
            arguments=use.arguments,
            required=use.required,
            parallel=use.parallel,
            prompt_end=prompt_end,
        )

    async def render(
        self, messages: Sequence[ChatMessage], settings: ChatSettings = NO_SETTINGS
    ) -> list[PromptSegment]:
        """The rendered conversation, in order. Raises as :meth:`chat` does.

        If it ends with the assistant's own words, these are the end, so that the answer goes on from there.
        Texts that contain a special token's text, or might become part of one, are replaced by placeholders
        that nobody can guess before the template runs, and put back afterwards as untrusted segments.
        """
        return (await self._render(*self._split(messages, settings), settings))[1]

    async def _render(
        self, messages: Sequence[ChatMessage], beginning: str, settings: ChatSettings
    ) -> tuple[str, list[PromptSegment]]:
        """What the template ends with, and the whole with the ``beginning`` of the answer behind it."""
        guard = Guard(self._special)
        use = settings.tool_use
        context = self._context(guard.value(self._variables(settings)))
        if needs_features(messages, use):
            features = await self.features(settings)
            shown = template_messages(messages, use, features)
            if use.tools and features.tools:
                context["tools"] = template_tools(use.tools, guard)
        else:
            shown = [plain_message(message) for message in messages]
        context["messages"] = [guarded_message(message, guard) for message in shown]
        with self._telemetry.span(names.STAGE_OPENAI_CHAT_TEMPLATE, messages=len(messages)) as span:
            rendered = await self._renderer.render(settings.template or self._template, context)
            span["rendered_chars"] = len(rendered)
        opening, text = rendered[-_OPENING:], self._template_text(settings)
        if beginning and text.format is ToolFormat.HARMONY:
            rendered += harmony_opening(opening, beginning)
        return opening, guard.segments(rendered + guard.text(beginning))

    def _split(
        self, messages: Sequence[ChatMessage], settings: ChatSettings
    ) -> tuple[Sequence[ChatMessage], str]:
        return split_beginning(messages) if settings.prefill_assistant else (messages, "")

    async def features(self, settings: ChatSettings = NO_SETTINGS) -> TemplateFeatures:
        """What the template can do; tried out when it is first asked for.

        Raises:
            ApiError: it could not be tried out now.
        """
        template = settings.template or self._template
        async with self._probing:
            found = self._features.pop(template, None)
            if found is None:
                found = await probe(
                    lambda context: self._renderer.render(template, {**self._context({}), **context})
                )
            self._features[template] = found
            if len(self._features) > MAX_TEMPLATES:
                del self._features[next(iter(self._features))]
        return found

    @property
    def takes_effort(self) -> bool:
        """Whether the model's own template can be told how much to reason."""
        return bool(self._text.variables & {"reasoning_effort", "enable_thinking"})

    async def describe(self) -> dict[str, Any]:
        """What the model's own template can do, for clients: JSON values. Raises as :meth:`features` does."""
        features = await self.features()
        tags = self._text.reasoning
        return {
            "tool_format": (await self._tool_format(self._text, NO_SETTINGS)).value,
            **attrs.asdict(features),
            "reasoning": None if tags is None else {"begin": tags.begin, "end": tags.end},
            "variables": sorted(self._text.variables - {"tools"}),
        }

    async def _tool_format(self, text: TemplateText, settings: ChatSettings) -> ToolFormat:
        """How calls are written: as the template's model does, or as it is told where the template is not."""
        if text.format is ToolFormat.HARMONY or (await self.features(settings)).tools:
            return text.format
        return ToolFormat.GENERIC

    def _template_text(self, settings: ChatSettings) -> TemplateText:
        return self._text if settings.template is None else TemplateText.of(settings.template)

    def _variables(self, settings: ChatSettings) -> dict[str, Any]:
        """Variables that the request sets for the template."""
        variables = dict(settings.variables)
        effort, text = settings.reasoning_effort, self._template_text(settings)
        if effort is None:
            return variables
        if "reasoning_effort" in text.variables:
            variables["reasoning_effort"] = effort
        elif effort == "none" and "enable_thinking" in text.variables:
            variables["enable_thinking"] = False
        elif effort != "none" or text.reasoning is not None:
            message = f"reasoning_effort is {effort!r}, but this model's chat template has no way to say so"
            raise ApiError(message, param="reasoning_effort", code="unsupported_model_feature")
        return variables

    def _context(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {
            **variables,
            "add_generation_prompt": True,
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            "tools": None,
            "documents": None,
        }

    def _marks(self, tools: ToolFormat | None, reasoning: ReasoningTags | None) -> dict[str, int]:
        """What a parser looks for and is a control token, which stands for nothing in detokenised text."""
        found = self._known_marks.get((tools, reasoning))
        if found is None:
            found = self._known_marks[tools, reasoning] = {}
            for text in marks(tools, reasoning):
                for token in self._vocabulary.tokenize(text, add_special=False, parse_special=True):
                    whole = self._vocabulary.piece(token, special=True)
                    if whole == text.encode() and not self._vocabulary.piece(token):
                        found[text] = token
        return found

    async def tokens(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Prompt tokens of raw text, or of token ids as they are.

        Texts of special tokens count as such: the caller writes the prompt. ``name`` is that of its field.

        Raises:
            ApiError: 400, text that no tokenizer takes, or ids that the model does not have.
        """
        if isinstance(prompt, str):
            return await self._tokenise(self._encode_text, prompt, name)
        check_token_ids(prompt, self._vocabulary.size, name)
        return list(prompt)

    def echo(self, prompt: Prompt) -> str:
        """The text of a prompt."""
        if isinstance(prompt, str):
            return prompt
        data = b"".join(self._vocabulary.piece(token, special=True) for token in prompt)
        return data.decode("utf-8", "replace")

    async def _tokenise(self, encode: Callable[[T], list[int]], value: T, param: str) -> list[int]:
        with self._telemetry.span(names.STAGE_OPENAI_TOKENIZE) as span:
            try:
                tokens = await trio.to_thread.run_sync(encode, value, limiter=self._limiter)
            except _TooLongError as error:
                raise ApiError(str(error), param=param, code="context_length_exceeded") from None
            except ValueError as error:  # text that no tokenizer takes, such as a word of 100,000 letters
                raise ApiError(f"the prompt cannot be tokenised: {error}", param=param) from error
            span["prompt_tokens"] = len(tokens)
        return tokens

    def _check_length(self, characters: int) -> None:
        """Raises _TooLongError. A character is at least one byte, so this refuses nothing that would fit."""
        context = self._context_length
        if context is None or characters <= context:
            return
        if not self._longest_piece:
            self._longest_piece = max(map(len, self._vocabulary.pieces(special=True)))
        if characters > context * self._longest_piece:
            raise _TooLongError(
                f"the prompt has {characters} characters, which are more than {context} tokens, the context "
                f"that prompt and answer share: no token is longer than {self._longest_piece} bytes"
            )

    def _encode_text(self, prompt: str) -> list[int]:
        self._check_length(len(prompt))
        doubled = bool(self._bos_text) and self._vocabulary.adds_bos and prompt.startswith(self._bos_text)
        return self._vocabulary.tokenize(prompt, add_special=not doubled, parse_special=True)

    def _encode_segments(self, segments: Sequence[PromptSegment]) -> list[int]:
        self._check_length(sum(len(segment.text) for segment in segments))
        vocabulary = self._vocabulary
        tokens: list[int] = []
        for segment in segments:
            tokens += vocabulary.tokenize(segment.text, add_special=False, parse_special=segment.trusted)
        # Most templates write BOS themselves. EOS is never added: the conversation goes on.
        if vocabulary.adds_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
            tokens.insert(0, vocabulary.bos)
        return tokens


class _TooLongError(ValueError):
    """A text that cannot fit, whatever its tokens are."""


def _token_text(vocabulary: Vocabulary, token: int | None) -> str:
    return "" if token is None else vocabulary.piece(token, special=True).decode("utf-8", "replace")

"""What ConfigureGeneration asks of the stages beside sampling: its chat sampling metadata, a JSON object.

Source: ``docs/protocol.md``, section "Chat sampling metadata".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from skippy.config.options import MAX_CHUNK_SIZES
from skippy.protocol import Message, RemoteProtocolError
from skippy.protocol.strict_json import canonical_json, parse_object

from .errors import SettingsRefused
from .interfaces import ReplyChannel

MAX_GRAMMAR_CHARACTERS: Final = 128 * 1024
MAX_METADATA_BYTES: Final = 512 * 1024
"""More than all keys take, a grammar full of escapes among them; parsing stops the stage meanwhile."""
MAX_TOP_LOGPROBS: Final = 20
MAX_NAMESPACE_DIGITS: Final = 64
MAX_CHECKPOINTS: Final = 1024
DROP_WORDS: Final = ("all", "common")
I32_MAX: Final = 2**31 - 1
_NAMESPACE: Final = re.compile(f"[0-9a-f]{{1,{MAX_NAMESPACE_DIGITS}}}")


@attrs.frozen(slots=True)
class GenerationSettings:
    """What the chat sampling metadata of ConfigureGeneration asks of the stages.

    Attributes:
        top_logprobs: of the last stage: send the log-probability of each chosen token, and those of this many
            likeliest tokens, 0 to 20; None sends none.
        cache_namespace: of every stage: the part of its prefix cache that the request reads and writes, up to
            64 lower-case hexadecimal digits; "" is the common one.
        cache_audit: of every stage: compare so many of the request's first tokens, once it is stopped, with
            what it remembers of them; the request restores nothing. 0: none.
        cache_drop: of every stage: forget what it remembers in all namespaces, in the common one, or in those
            that begin with these digits; "": nothing.
        grammar: of the last stage: what is generated fits this grammar, in llguidance's variant of Lark, of
            at most 131072 characters; it begins behind the prompt. "": none.
        cache_report: of every stage: tell what its prefix cache holds, in the reply annex.
        timing_report: of every stage: tell what the last prompt has taken it, in the reply annex.
        cache_checkpoints: of every stage that can restore no other prefix: keep the state of the request's
            first so many tokens, when a chunk ends there; at most 1,024 lengths, ascending.
        cache_chunks: of every stage: restore only what was computed alone, and in chunks of these sizes, at
            most 1,024, the last one's again and again, up to the prompt's last token; then one by one. ():
            anything.
    """

    top_logprobs: int | None = None
    cache_namespace: str = ""
    cache_audit: int = 0
    cache_drop: str = ""
    grammar: str = ""
    cache_checkpoints: tuple[int, ...] = ()
    cache_chunks: tuple[int, ...] = ()
    cache_report: bool = False
    timing_report: bool = False

    def check_annexed(self, stage_index: int, channels: Iterable[ReplyChannel]) -> None:
        """SettingsRefused where log-probabilities would have to pass a channel that has no room for them."""
        if self.top_logprobs is not None and not all(channel.annexed for channel in channels):
            raise SettingsRefused(
                "top_logprobs: log-probabilities travel in the reply annex, which a neighbour of stage "
                f"{stage_index} did not agree to, as plain generation-8 peers never do"
            )

    def check_plain(self, stage_index: int) -> None:
        """SettingsRefused for what a plain generation-8 peer behind this stage would have to do."""
        if self.grammar:
            raise SettingsRefused(
                f"grammar: it is enforced on the last stage, and the stage behind stage {stage_index} is a "
                "plain generation-8 peer, which knows no grammars"
            )

    def to_metadata(self) -> str | None:
        """The text that travels; None where nothing is asked for."""
        asked = attrs.asdict(self, filter=lambda field, value: value != field.default)
        return canonical_json(asked).decode() if asked else None


def parse_metadata(text: str | None) -> GenerationSettings:
    """The settings in a chat sampling metadata text; an absent or empty one asks for nothing.

    Raises:
        SettingsRefused: a key that is not known, or a value that is not allowed, by name.
    """
    if not text:
        return GenerationSettings()
    if len(text) > MAX_METADATA_BYTES:
        raise SettingsRefused(
            f"chat sampling metadata of {len(text)} characters; at most {MAX_METADATA_BYTES} are allowed"
        )
    try:
        fields = parse_object(text.encode(), "chat sampling metadata")
        top = fields.integer_or_absent("top_logprobs", 0, MAX_TOP_LOGPROBS)
        namespace = fields.text_or_absent("cache_namespace")
        audit = fields.integer_or_absent("cache_audit", 1, I32_MAX)
        drop = fields.text_or_absent("cache_drop")
        grammar = fields.text_or_absent("grammar")
        checkpoints = fields.integers_or_absent("cache_checkpoints", 1, I32_MAX)
        chunks = fields.integers_or_absent("cache_chunks", 1, I32_MAX)
        report = fields.boolean_or_absent("cache_report")
        timing = fields.boolean_or_absent("timing_report")
        fields.end()
    except RemoteProtocolError as exc:
        raise SettingsRefused(str(exc)) from exc
    _check_digits("cache_namespace", namespace)
    if drop not in DROP_WORDS:
        _check_digits("cache_drop", drop, f"{', '.join(DROP_WORDS)} or ")
    if grammar == "":
        raise SettingsRefused("chat sampling metadata: grammar is empty; leave it out")
    if len(checkpoints) > MAX_CHECKPOINTS or list(checkpoints) != sorted(set(checkpoints)):
        raise SettingsRefused(
            f"chat sampling metadata: cache_checkpoints must be at most {MAX_CHECKPOINTS} ascending lengths"
        )
    if len(chunks) > MAX_CHUNK_SIZES:
        raise SettingsRefused(
            f"chat sampling metadata: cache_chunks has {len(chunks)} sizes; at most {MAX_CHUNK_SIZES}"
        )
    return GenerationSettings(
        top,
        namespace or "",
        audit or 0,
        drop or "",
        grammar or "",
        checkpoints,
        chunks,
        bool(report),
        bool(timing),
    )


def grammar_start(message: Message) -> int:
    """How many tokens come before what a grammar is about. Raises SettingsRefused where that is not said."""
    count = message.state.prompt_token_count
    if count < 1:
        raise SettingsRefused(
            f"grammar: it begins behind the prompt, but prompt_token_count of ConfigureGeneration is {count}"
        )
    return count


def drops(which: str, namespace: str) -> bool:
    """Whether what is to be forgotten, as :attr:`GenerationSettings.cache_drop` has it, is in a namespace."""
    if which in DROP_WORDS:
        return which == "all" or not namespace
    return bool(which) and namespace.startswith(which)


def _check_digits(name: str, value: str | None, words: str = "") -> None:
    if value is not None and not _NAMESPACE.fullmatch(value):
        raise SettingsRefused(
            f"chat sampling metadata: {name} is {value[:80]!r}, must be {words}1 to {MAX_NAMESPACE_DIGITS} "
            "lower-case hexadecimal digits, or left out"
        )

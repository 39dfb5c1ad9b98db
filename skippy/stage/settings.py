"""What ConfigureGeneration asks of the stages beside sampling: its chat sampling metadata, a JSON object.

Source: ``docs/protocol.md``, section "Chat sampling metadata".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from skippy.protocol import RemoteProtocolError
from skippy.protocol.strict_json import canonical_json, parse_object

from .errors import SettingsRefused
from .interfaces import ReplyChannel

MAX_METADATA_BYTES: Final = 64 * 1024
"""Far more than all keys take; parsing stops the stage meanwhile."""
MAX_TOP_LOGPROBS: Final = 20
MAX_NAMESPACE_DIGITS: Final = 64
_NAMESPACE: Final = re.compile(f"[0-9a-f]{{1,{MAX_NAMESPACE_DIGITS}}}")


@attrs.frozen(slots=True)
class GenerationSettings:
    """What the chat sampling metadata of ConfigureGeneration asks of the stages.

    Attributes:
        top_logprobs: of the last stage: send the log-probability of each chosen token, and those of this many
            likeliest tokens, 0 to 20; None sends none.
        cache_namespace: of every stage: the part of its prefix cache that the request reads and writes, up to
            64 lower-case hexadecimal digits; "" is the common one.
    """

    top_logprobs: int | None = None
    cache_namespace: str = ""

    def check_annexed(self, stage_index: int, channels: Iterable[ReplyChannel]) -> None:
        """SettingsRefused where log-probabilities would have to pass a channel that has no room for them."""
        if self.top_logprobs is not None and not all(channel.annexed for channel in channels):
            raise SettingsRefused(
                "top_logprobs: log-probabilities travel in the reply annex, which a neighbour of stage "
                f"{stage_index} did not agree to, as plain generation-8 peers never do"
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
        fields.end()
    except RemoteProtocolError as exc:
        raise SettingsRefused(str(exc)) from exc
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise SettingsRefused(
            f"chat sampling metadata: cache_namespace is {namespace[:80]!r}, must be 1 to "
            f"{MAX_NAMESPACE_DIGITS} lower-case hexadecimal digits, or left out"
        )
    return GenerationSettings(top, namespace or "")

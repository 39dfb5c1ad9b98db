"""What ConfigureGeneration asks of the last stage beside sampling: its chat sampling metadata, a JSON object.

Source: ``docs/protocol.md``, section "Chat sampling metadata".
"""

from __future__ import annotations

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


@attrs.frozen(slots=True)
class GenerationSettings:
    """What the chat sampling metadata of ConfigureGeneration asks of the last stage.

    Attributes:
        top_logprobs: send the log-probability of each chosen token, and those of this many likeliest tokens,
            0 to 20; None sends none.
    """

    top_logprobs: int | None = None

    def check_annexed(self, stage_index: int, channels: Iterable[ReplyChannel]) -> None:
        """SettingsRefused where log-probabilities would have to pass a channel that has no room for them."""
        if self.top_logprobs is not None and not all(channel.annexed for channel in channels):
            raise SettingsRefused(
                "top_logprobs: log-probabilities travel in the reply annex, which a neighbour of stage "
                f"{stage_index} did not agree to, as plain generation-8 peers never do"
            )

    def to_metadata(self) -> str | None:
        """The text that travels; None where nothing is asked for."""
        asked = attrs.asdict(self, filter=lambda _, value: value is not None)
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
        fields.end()
    except RemoteProtocolError as exc:
        raise SettingsRefused(str(exc)) from exc
    return GenerationSettings(top)

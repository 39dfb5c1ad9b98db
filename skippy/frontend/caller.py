"""Who has sent a request, as far as answering it depends on that."""

from __future__ import annotations

import attrs
import trio

from .access import KeyId
from .direct import DirectBody


@attrs.frozen(slots=True, kw_only=True)
class Caller:
    """Who asks: the nursery of the connection, the request's id, a shorter way to the client, the API key.

    Attributes:
        credentials: what the request has shown.
        key: what that is to the server, where it asks for keys.
        route: the application's rule for what was asked.
        address: where the connection comes from; "" where that is not known.
    """

    nursery: trio.Nursery
    request_id: str
    direct: DirectBody | None = None
    credentials: str | None = attrs.field(default=None, repr=False)
    key: KeyId | None = None
    route: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """Tells clients apart: by their keys where the server asks for some, else by their addresses."""
        return self.address if self.key is None else self.key.hex()

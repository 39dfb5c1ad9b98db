"""What all routes and WebSockets share: who may ask, and what browsers may do with the answers."""

from __future__ import annotations

import re
from typing import Final

from quart import Response, request, websocket
from quart.wrappers import Request, Websocket
from quart_trio import QuartTrio

from .access import AccessPolicy
from .connection import credentials, exit_stack, request_id, route, set_key
from .metrics import Metrics

SECURITY_HEADERS: Final = {
    # Scripts and styles are files of ours, nothing is fetched from or sent to anybody else, nobody puts the
    # page in a frame, and no text is ever parsed as HTML.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""On every response."""
OPEN_PATHS: Final = frozenset(("/", "/health", "/healthz", "/readyz"))
"""What is answered without a key, beside :data:`OPEN_FOLDER`."""
OPEN_FOLDER: Final = "/web/"
"""Files of the web page, which asks for the key."""
_PREFLIGHT_SECS: Final = 600
_TOKENS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{1,2000}")


def guard(app: QuartTrio, policy: AccessPolicy, metrics: Metrics) -> None:
    """Have ``policy`` decide who is served, before anything else of a request is looked at."""

    def check_head(head: Request | Websocket) -> None:
        host, origin = head.headers.get("host"), head.headers.get("origin")
        policy.check_host(host)
        policy.check_origin(origin, host)

    @app.before_request
    async def check_request() -> Response | None:
        check_head(request)
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
            return Response("", status=204)  # browsers ask without a key
        if request.path in OPEN_PATHS or request.path.startswith(OPEN_FOLDER):
            return None
        key = policy.check_key(credentials(request))
        set_key(key)
        if request.method == "POST":
            exit_stack(request).enter_context(policy.running(key))
        return None

    @app.before_websocket
    async def check_websocket() -> None:
        check_head(websocket)

    @app.after_request
    async def add_headers(response: Response) -> Response:
        response.headers["x-request-id"] = request_id(request)
        response.headers.update(SECURITY_HEADERS)
        metrics.responded(route(request), response.status_code)
        if response.status_code == 401:
            response.headers["www-authenticate"] = "Bearer"
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if (
            origin is not None
            and not policy.is_own_origin(origin, host)
            and policy.allows_origin(origin, host)
        ):
            _share(response, origin)
        return response

    async def add_handshake_headers(response: Response | None) -> Response | None:
        if response is not None:  # the handshake was refused
            response.headers["x-request-id"] = request_id(websocket)
            response.headers.update(SECURITY_HEADERS)
        return response

    # Quart's annotation of the decorator has no None, which is what it is called with.
    app.after_websocket(add_handshake_headers)  # type: ignore[type-var]


def _share(response: Response, origin: str) -> None:
    """Let the page of another origin, which may use the endpoint, read the answer."""
    headers = response.headers
    headers["access-control-allow-origin"] = origin
    headers["access-control-expose-headers"] = "x-request-id, retry-after"
    headers["cross-origin-resource-policy"] = "cross-origin"
    headers.add("vary", "origin")
    asked = request.headers
    if request.method != "OPTIONS" or "access-control-request-method" not in asked:
        return
    headers["access-control-allow-methods"] = "GET, POST, DELETE"
    headers["access-control-max-age"] = str(_PREFLIGHT_SECS)
    wanted = asked.get("access-control-request-headers", "")
    if _TOKENS.fullmatch(wanted):
        headers["access-control-allow-headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":
        headers["access-control-allow-private-network"] = "true"

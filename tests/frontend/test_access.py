"""Who is served: Host, Origin, API keys, and what browsers are told."""

from __future__ import annotations

import hmac
import socket
import uuid
from typing import Any

import httpx
import pytest
import trio

from skippy.config import AccessOptions, ConfigError
from skippy.frontend.access import AccessPolicy
from skippy.frontend.errors import ApiError
from skippy.frontend.options import FrontendOptions

from .support import ScriptedGenerator, bearer, chat_body, client, say, serving

KEYS = ("sk-first", "sk-second")
CHAT = "/v1/chat/completions"
PATHS = ["/", "/health", "/readyz", "/v1/models", "/kv", "/nowhere"]


def access(**options: Any) -> FrontendOptions:
    return FrontendOptions(access=AccessOptions(**options))


# -- Host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [None, "", "localhost", "LOCALHOST:9337", "127.0.0.1", "127.0.0.1:1", "10.1.2.3:80", "[::1]",
     "[fe80::1]:80", "chat.localhost:80", "localhost.", "bound", "allowed.example:443", "ALLOWED.example",
     socket.gethostname(), f"{socket.gethostname()}.local:9337"],
)  # fmt: skip
def test_hosts_that_are_this_server(host: str | None) -> None:
    options = AccessOptions(allowed_hosts="Allowed.Example")
    AccessPolicy(options, names=["Bound"]).check_host(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9337", "localhost.evil.example", "127.0.0.1.evil.example", "*", "127.1",
     ":80", "localhost:port", "localhost@evil.example", "evil.example/localhost", "localhost evil",
     "[::1", "::1", "2130706433", "0x7f000001", "[localhost]", "http://localhost", "sub.allowed.example",
     "evil-localhost"],
)  # fmt: skip
def test_hosts_that_are_not(host: str) -> None:
    with pytest.raises(ApiError) as refused:
        AccessPolicy(AccessOptions(allowed_hosts=["allowed.example"])).check_host(host)
    assert (refused.value.status, refused.value.code) == (403, "host_not_allowed")
    AccessPolicy(AccessOptions(allowed_hosts=["*"])).check_host(host)


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_checks_the_host(path: str) -> None:
    """A page whose name was made to resolve to this machine learns nothing but that it is there."""
    generator = ScriptedGenerator(say("x"))
    async with client(generator) as http:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            answer = await http.request(method, path, headers={"host": "rebound.example"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
            assert answer.json()["error"]["type"] == "invalid_request_error"


# -- Origin and CORS -----------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1", "file://", ""])
@pytest.mark.parametrize("path", PATHS)
async def test_every_route_refuses_pages_of_other_origins(path: str, origin: str) -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            asked = {"origin": origin, "access-control-request-method": "DELETE"}
            answer = await http.request(method, path, headers=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_its_own_page_may_do_everything() -> None:
    async with serving(ScriptedGenerator(say("hi"))) as url, httpx.AsyncClient(base_url=url) as http:
        for origin in (url, url.replace("http:", "https:"), url.upper()):
            answer = await http.post(CHAT, json=chat_body(), headers={"origin": origin})
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers


async def test_a_named_origin_may_ask_and_read() -> None:
    app = "https://app.example"
    async with client(ScriptedGenerator(say("hi")), access(cors_origins=app, api_keys=KEYS)) as http:
        asked = {
            "origin": app,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-os",
            "access-control-request-private-network": "true",
        }
        preflight = await http.options(CHAT, headers=asked)
        assert preflight.status_code == 204
        allowed = {
            name.removeprefix("access-control-"): value
            for name, value in preflight.headers.items()
            if name.startswith("access-control")
        }
        assert allowed == {
            "allow-origin": app,
            "allow-methods": "GET, POST, DELETE",
            "allow-headers": "authorization, content-type, x-stainless-os",
            "allow-private-network": "true",
            "max-age": "600",
            "expose-headers": "x-request-id, retry-after",
        }
        answer = await http.post(CHAT, json=chat_body(), headers={"origin": app, **bearer(KEYS[0])})
        assert answer.status_code == 200
        # Its page must be able to read why a request was refused, too.
        refused = await http.post(CHAT, json=chat_body(), headers={"origin": app})
        assert refused.status_code == 401
        for response in (answer, refused):
            assert response.headers["access-control-allow-origin"] == app
            assert "origin" in response.headers["vary"]
            assert "access-control-allow-credentials" not in response.headers
        other = await http.post(CHAT, json=chat_body(), headers={"origin": "https://app.example.evil"})
        assert other.status_code == 403


async def test_a_preflight_is_told_no_header_that_is_none() -> None:
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x\tevil: 1",
    }
    async with client(ScriptedGenerator(say("hi")), access(cors_origins="*")) as http:
        answer = await http.options(CHAT, headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-headers" not in answer.headers


# -- keys ----------------------------------------------------------------------------------------------


async def test_with_keys_every_route_but_health_and_the_page_asks_for_one() -> None:
    generator = ScriptedGenerator(say("hi"))
    async with client(generator, access(api_keys=KEYS)) as http:
        for path in ("/health", "/healthz", "/readyz"):
            assert (await http.get(path)).status_code == 200
        for method, path in [
            ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", CHAT), ("POST", "/v1/completions"),
            ("GET", "/kv"), ("DELETE", "/kv"), ("GET", "/nowhere"), ("OPTIONS", CHAT), ("GET", "/health/"),
            ("GET", "/web"), ("POST", "/webs/x"),
        ]:  # fmt: skip
            for headers in ({}, bearer("sk-wrong"), bearer("sk-firs"), bearer("sk-first-"), {"api-key": "x"}):
                answer = await http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path, headers)
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "sk-" not in answer.text
        for headers in (bearer(KEYS[0]), bearer(KEYS[1]), {"x-api-key": KEYS[0]}, {"api-key": KEYS[1]}):
            assert (await http.post(CHAT, json=chat_body(), headers=headers)).status_code == 200
            assert (await http.get("/kv", headers=headers)).status_code == 200


async def test_what_the_chain_lacks_is_for_those_with_a_key() -> None:
    generator = ScriptedGenerator(say("hi"))
    generator.unready = "stage at 10.0.0.2:19000 is away"
    async with client(generator, access(api_keys=KEYS)) as http:
        for headers, text in (({}, "not ready"), (bearer(KEYS[0]), generator.unready)):
            answer = await http.get("/readyz", headers=headers)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, text)


def test_keys_are_compared_whole_and_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    policy = AccessPolicy(AccessOptions(api_keys=["a", "b", "c"]))
    for shown, right in (("a", True), ("c", True), ("d", False), ("a" * 10_000, False), ("\xff€", False)):
        compared.clear()
        assert policy.has_key(shown) is right
        assert compared == [(32, 32)] * 3  # all of them, whichever was right


def test_keys_are_in_no_text() -> None:
    options = AccessOptions(api_keys=["sk-secret"])
    assert "sk-secret" not in repr(options) + str(options)
    for wrong in (["sk-secret x"], ["sk-secret", ""], ["sk-secret\n"], ["sk-secret" * 100]):
        with pytest.raises(ConfigError, match=r"api_keys: number \d must be") as refused:
            AccessOptions(api_keys=wrong)
        assert "sk-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [{"api_key_concurrency": 1}, {"api_keys": ["a"], "api_key_concurrency": 0}, {"api_keys": ["a"] * 1001},
     {"cors_origins": ["app.example"]}, {"cors_origins": ["https://app.example/"]},
     {"cors_origins": ["null"]}, {"allowed_hosts": ["http://a"]}, {"allowed_hosts": ["a:80"]},
     {"allowed_hosts": [""]}],
)  # fmt: skip
def test_options_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AccessOptions(**wrong)


# -- how many at once ----------------------------------------------------------------------------------


async def test_a_key_may_have_so_many_requests_at_once() -> None:
    go_on = trio.Event()
    generator = ScriptedGenerator(lambda request: [ord("a"), go_on, ord("b")])
    codes: list[int] = []

    async with client(generator, access(api_keys=KEYS, api_key_concurrency=2)) as http:

        async def ask(key: str, *, stream: bool) -> None:
            answer = await http.post(CHAT, json=chat_body(stream=stream), headers=bearer(key))
            codes.append(answer.status_code)

        async with trio.open_nursery() as nursery:
            for stream in (True, False):
                nursery.start_soon(lambda stream=stream: ask(KEYS[0], stream=stream))  # type: ignore[misc]
            while generator.active < 2:
                await trio.lowlevel.checkpoint()
            third = await http.post(CHAT, json=chat_body(), headers=bearer(KEYS[0]))
            assert third.status_code == 429
            assert third.headers["retry-after"] == "1"
            assert third.json()["error"]["code"] == "rate_limit_exceeded"
            # Others are not concerned, nor is what runs no model.
            assert (await http.get("/v1/models", headers=bearer(KEYS[0]))).status_code == 200
            nursery.start_soon(lambda: ask(KEYS[1], stream=True))
            while generator.active < 3:
                await trio.lowlevel.checkpoint()
            go_on.set()
        assert codes == [200] * 3
        # Whatever has ended counts no more, refusals included.
        for body in (chat_body(), chat_body(n=0), chat_body(), chat_body()):
            status = (await http.post(CHAT, json=body, headers=bearer(KEYS[0]))).status_code
            assert status == (400 if "n" in body else 200)


async def test_a_client_that_leaves_makes_room_for_its_keys_next_request() -> None:
    never = trio.Event()
    generator = ScriptedGenerator(lambda request: [ord("a"), never])
    async with client(generator, access(api_keys=KEYS, api_key_concurrency=1)) as http:
        for _ in range(3):
            async with http.stream(
                "POST", CHAT, json=chat_body(stream=True), headers=bearer(KEYS[0])
            ) as answer:
                assert answer.status_code == 200
            await generator.idle.wait()


# -- headers -------------------------------------------------------------------------------------------


async def test_what_browsers_are_told_with_every_answer() -> None:
    async with client(ScriptedGenerator(say("hi")), access(api_keys=KEYS)) as http:
        answers = [
            await http.get("/health"),
            await http.get("/nowhere", headers=bearer(KEYS[0])),
            await http.get("/v1/models"),
            await http.get("/health", headers={"host": "evil.example"}),
            await http.post("/health"),
            await http.post(CHAT, json=chat_body(stream=True), headers=bearer(KEYS[0])),
        ]
        assert [answer.status_code for answer in answers] == [200, 404, 401, 403, 405, 200]
    for answer in answers:
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert uuid.UUID(answer.headers["x-request-id"])

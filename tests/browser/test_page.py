"""The web page in a real browser: a headless Chromium. Screenshots are kept in ``test-artefacts/``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from skippy.config import AccessOptions
from skippy.frontend.options import FrontendOptions
from tests.frontend.support import MODEL, ScriptedGenerator, say, serving
from tests.frontend.test_inside import chain
from tests.support.chromium import Page, open_page

EVIL = (
    '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>\n'
    "```html\n<svg onload=window.hacked=3>\n```\n&lt;b&gt; <a href='javascript:window.hacked=4'>a</a>"
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return tmp_path / "profile"


@contextlib.asynccontextmanager
async def page_of(
    generator: ScriptedGenerator, profile: Path, **access: Any
) -> AsyncIterator[tuple[Page, str]]:
    """The page of a server around ``generator``, loaded, and the server's URL."""
    options = FrontendOptions(access=AccessOptions(**access))
    with trio.fail_after(60):
        async with open_page(profile) as page, serving(generator, options) as url:
            await page.view(1280, 800)
            await page.go(url)
            yield page, url


async def ask(page: Page, text: str) -> None:
    await page.js("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def wait_answered(page: Page, count: int = 1) -> None:
    await page.until(f"document.querySelectorAll('.message .foot').length === {count}")
    await page.until("document.querySelector('#stop').hidden")


def body_of(role: str) -> str:
    return f".message.{role}:last-of-type .body"


async def test_asking_stopping_and_asking_again(profile: Path) -> None:
    """By the keyboard alone."""
    go_on, never = trio.Event(), trio.Event()
    generator = ScriptedGenerator(lambda request: [*b"Hello, ", go_on, *b"world", never])
    async with page_of(generator, profile) as (page, url):
        await page.until(f"document.querySelector('#model').textContent === {json.dumps(MODEL)}")
        await page.until("document.querySelector('#link').textContent === 'live'")
        assert await page.js("document.activeElement.id") == "prompt"
        await page.screenshot("empty")
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("two")
        assert await page.js("document.querySelector('#prompt').value") == "one\ntwo"
        await page.press("Enter")
        await page.until("document.querySelector('.message.assistant .body').textContent === 'Hello, '")
        assert await page.text(".message.user .body") == "one\ntwo"
        assert await page.js("document.querySelector('#log').ariaBusy") == "true"
        go_on.set()  # what comes shows as it comes
        await page.until("document.querySelector('.message.assistant .body').textContent === 'Hello, world'")
        assert generator.active == 1
        await page.press("Escape")
        await generator.idle.wait()
        await wait_answered(page)
        assert "stopped" in await page.text(".foot .stats")
        assert await page.text(".message.assistant .body") == "Hello, world"
        assert await page.js("document.querySelectorAll('.error').length") == 0
        # Again, by the keyboard: the same question, another answer in place of that one.
        generator.script = say("Bye")
        await page.js("document.querySelector('[data-again]').focus()")
        await page.press("Enter")
        await page.until("document.querySelector('.message.assistant .body').textContent === 'Bye'")
        await wait_answered(page)
        assert await page.js("document.querySelectorAll('.message').length") == 2
        assert generator.requests[0].prompt == generator.requests[1].prompt
        # The next question brings the conversation along.
        await ask(page, "three")
        await wait_answered(page, 2)
        prompt = bytes(token for token in generator.requests[2].prompt if token < 256).decode()
        assert [word for word in ("one\ntwo", "Bye", "three", "Hello") if word in prompt] == [
            "one\ntwo", "Bye", "three",
        ]  # fmt: skip
        assert await page.js("document.querySelectorAll('[data-again]').length") == 1
        await page.js("document.querySelector('#new').click()")
        await page.until("document.querySelectorAll('.message').length === 0")
        assert page.complaints() == []
        own = (url, url.replace("http:", "ws:"))
        assert [address for address in page.requested() if not address.startswith(own)] == []


async def test_text_is_never_html(profile: Path) -> None:
    """What the model says, what is asked, and what the server complains of."""
    generator = ScriptedGenerator(say(EVIL))
    async with page_of(generator, profile) as (page, _):
        await ask(page, EVIL)
        await wait_answered(page)
        for role in ("user", "assistant"):
            shown = await page.js(f"document.querySelector('.message.{role} .body').innerText")
            lines = [line for line in EVIL.splitlines() if not line.startswith("```")]
            assert [line for line in str(shown).splitlines() if line] == lines
            assert await page.text(f".message.{role} pre") == "<svg onload=window.hacked=3>"
        assert (
            await page.js("document.querySelectorAll('main img, main script, .message svg, main a').length")
            == 0
        )
        assert await page.js("window.hacked ?? null") is None
        await page.screenshot("text-is-text")
        assert page.complaints() == []
        # Nor could it become HTML by a mistake in a script.
        for attempt in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.write('<b>x</b>')",
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "eval('1')",
            "new Function('return 1')()",
        ):
            said = await page.js(
                f"(() => {{ try {{ {attempt}; return 'done' }} catch (e) {{ return e.name }} }})()"
            )
            assert said in ("TypeError", "EvalError"), attempt
        inline = "document.head.append(Object.assign(document.createElement('style'), {textContent: 'p{}'}))"
        await page.js(inline)
        assert any("Content Security Policy" in text for text in page.complaints())


async def test_settings_and_a_key(profile: Path) -> None:
    generator = ScriptedGenerator(say("hi"))
    async with page_of(generator, profile, api_keys=["sk-right"]) as (page, _):
        # It asks for the key by itself.
        await page.until("document.querySelector('#settings').open")
        assert await page.js("document.activeElement.name") == "api_key"
        assert await page.text("#link") != "live"
        await page.screenshot("settings")
        await page.type("sk-wrong")
        await page.press("Enter")
        await page.until("document.querySelector('#settings').open")
        await page.js("document.querySelector('[name=api_key]').select()")
        await page.type("sk-right")
        await page.press("Enter")
        await page.until("document.querySelector('#link').textContent === 'live'")
        await page.until(f"document.querySelector('#model').textContent === {json.dumps(MODEL)}")
        await page.js("document.querySelector('#open-settings').click()")
        for name, value in (
            ("system", "be brief"),
            ("temperature", "0.5"),
            ("max_tokens", "7"),
            ("seed", "11"),
        ):
            await page.js(f"document.querySelector('[name={name}]').focus()")
            await page.type(value)
        # Asked in the same task: no event that the browser queues, like a dialog's "close", comes before it.
        await page.js(
            "document.querySelector('#settings-form .primary').click();"
            "document.querySelector('#prompt').value = 'hello';"
            "document.querySelector('#composer').requestSubmit()"
        )
        await wait_answered(page)
        asked = generator.requests[-1]
        assert asked.sampling is not None
        assert (asked.sampling.temperature, asked.max_tokens, asked.sampling.seed) == (0.5, 7, 11)
        assert "be brief" in bytes(token for token in asked.prompt if token < 256).decode()
        # All but the key is kept for the next visit of this browser.
        kept = json.loads(await page.js("localStorage.getItem('skippy.settings')"))
        assert kept == {
            "system": "be brief",
            "temperature": "0.5",
            "top_p": "",
            "max_tokens": "7",
            "seed": "11",
        }
        assert await page.js("sessionStorage.getItem('skippy.api_key')") == "sk-right"
        # What is being typed stays, whatever wants the settings open; Escape takes it, too.
        await page.js("document.querySelector('#open-settings').click()")
        await page.js("document.querySelector('[name=top_p]').focus()")
        await page.type("0.9")
        await page.js("document.dispatchEvent(new CustomEvent('key-needed'))")
        assert await page.js("document.activeElement.name") == "api_key"
        await page.press("Escape")
        await page.until("!document.querySelector('#settings').open")
        assert json.loads(await page.js("localStorage.getItem('skippy.settings')"))["top_p"] == "0.9"


async def test_errors_are_said(profile: Path) -> None:
    generator = ScriptedGenerator(lambda request: [*b"Hel", ValueError("a fault")])
    async with page_of(generator, profile) as (page, _):
        await ask(page, "hello")
        await wait_answered(page)
        assert "the server failed to handle this request" in await page.text(".message .error")
        assert await page.text(".message.assistant .body") == "Hel"
        assert await page.js("document.querySelector('.message .error').role") == "alert"


async def test_pages_of_others_get_nothing(profile: Path) -> None:
    """Scripts of another origin, in the same browser."""
    generator = ScriptedGenerator(say("hi"))
    async with page_of(generator, profile) as (page, url):
        await page.go("about:blank")
        read = "fetch({}, {}).then(r => r.type === 'opaque' ? 'opaque' : 'read', () => 'refused')"
        for path in ("/", "/slots", "/health", "/v1/models"):
            assert await page.js(read.format(json.dumps(url + path), "{}")) == "refused"
        simple = {
            "method": "POST",
            "mode": "no-cors",
            "body": "{}",
            "headers": {"content-type": "text/plain"},
        }
        post = read.format(json.dumps(url + "/v1/completions"), json.dumps(simple))
        assert await page.js(post) in ("opaque", "refused")
        assert generator.requests == []
        socket = f"new WebSocket({json.dumps(url.replace('http:', 'ws:') + '/live')})"
        ends = "s.onopen = () => d('open'); s.onerror = () => d('no')"
        assert await page.js(f"new Promise(d => {{ const s = {socket}; {ends} }})") == "no"
        frame = (
            f"new Promise(d => {{ const f = document.createElement('iframe'); f.src = {json.dumps(url)};"
            " f.onload = () => { try { d(f.contentDocument ? 'own' : 'blocked') } catch { d('blocked') } };"
            " document.body.append(f) })"
        )
        assert await page.js(frame) == "blocked"


# Controls without a name for those who do not see them.
NAMELESS = """[...document.querySelectorAll('button, input, textarea, [role=region], [role=img], th')].filter(
    e => !e.closest('[hidden]') && !(e.ariaLabel || e.textContent.trim() || e.labels?.length
        || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)"""
SHOWN = "[...document.querySelectorAll('#chat, #chain')].filter(e => e.offsetWidth).map(e => e.id)"
# Whether anything is wider than the screen.
WIDE = """document.documentElement.scrollWidth > innerWidth
    || [...document.querySelectorAll('.bar *, .composer, main, .tile, .stages, dialog[open]')].some(
        e => e.getBoundingClientRect().right > innerWidth + 0.5)"""


async def test_the_chain_on_a_screen_and_on_a_phone(profile: Path) -> None:
    async with open_page(profile) as page, chain(lanes=3) as (http, pool, generator):
        await page.view(1280, 900)
        await page.go(str(http.base_url))
        await page.until("document.querySelectorAll('#lanes tr').length === 3")
        stages = await page.js("[...document.querySelectorAll('#stages li')].map(e => e.innerText)")
        assert [stage.split("\n") for stage in stages] == [
            ["stage-0", "layers 0:2", "2 layers"],
            ["stage-1", "layers 2:4", "2 layers"],
            ["stage-2", "layers 4:6", "2 layers"],
        ]
        async with trio.open_nursery() as nursery:

            async def load() -> None:
                body = {"model": MODEL, "prompt": "the quick brown fox jumps over the lazy dog",
                        "max_tokens": 40, "temperature": 0, "ignore_eos": True}  # fmt: skip
                await http.post("/v1/completions", json=body)
                await http.post("/v1/completions", json={**body, "max_tokens": 4000})
                ended.set()

            ended = trio.Event()
            nursery.start_soon(load)
            await page.until("document.querySelector('#last-bar').children.length === 5")
            await page.until("document.querySelector('#lanes [data-state=decode]')")
            await page.until("Number(document.querySelector('#rate').textContent) > 0")
            assert await page.text("#running") == "1"
            assert "was slowest" in await page.text("#hops")
            assert await page.text("#concurrency") == "of 3"
            await page.until("document.querySelector('#cached').textContent !== '0 %'")
            await page.until("document.querySelectorAll('#stages .time').length === 5")
            await page.screenshot("chain")
            assert await page.js(NAMELESS) == []
            await page.view(1280, 900, dark=True)
            await page.screenshot("chain-dark")
            for width in (360, 390):
                await page.view(width, 800, mobile=True)
                for view in ("chain", "chat"):
                    await page.js(f"document.querySelector('[data-show={view}]').click()")
                    assert await page.js(SHOWN) == [view]
                    assert not await page.js(WIDE)
                    await page.screenshot(f"phone-{width}-{view}")
            await page.js("document.querySelector('#open-settings').click()")
            assert not await page.js(WIDE)
            await page.screenshot("phone-settings")
            await page.press("Escape")
            # A lane's request can be ended from the page.
            await page.view(1280, 900)
            cancel = "document.querySelector('#lanes button:not([hidden])')"
            assert (await page.js(f"{cancel}.ariaLabel")).startswith("Cancel request ")
            await page.js(f"{cancel}.click()")
            await ended.wait()
        while pool.idle_lanes < 3:
            await trio.lowlevel.checkpoint()
        assert generator.status().totals.generated_tokens < 4000
        assert page.complaints() == []

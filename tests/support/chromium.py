"""A headless Chromium, driven over the DevTools protocol.

Where there is none, tests that want one are skipped, unless REQUIRED is set: then they fail.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

REQUIRED = "SKIPPY_REQUIRE_BROWSER"
ARTEFACTS = "SKIPPY_TEST_ARTEFACTS"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-sandbox",  # whoever runs the tests may be root, and the pages are our own
    # The tests' own server is on an address; whatever has a name is not found.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def find_chromium() -> str:
    """Its program. Skips the test where there is none, or fails it where there must be one."""
    for name in NAMES:
        if (program := shutil.which(name)) is not None:
            return program
    text = f"no Chromium ({', '.join(NAMES)}): the browser tests did not run"
    if os.environ.get(REQUIRED):
        pytest.fail(text)
    pytest.skip(text)


def artefacts() -> Path:
    """Where screenshots are kept; git ignores it."""
    folder = Path(os.environ.get(ARTEFACTS) or Path(__file__).parents[2] / "test-artefacts")
    folder.mkdir(exist_ok=True)
    return folder


class Page:
    """One tab."""

    def __init__(self, socket: WebSocketConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[trio.Event, dict[str, Any]]] = {}
        self._session: str | None = None
        self._told = trio.lowlevel.ParkingLot()
        self.events: list[dict[str, Any]] = []
        """All that it has told of itself."""

    async def listen(self) -> None:
        while True:
            message = json.loads(await self._socket.get_message())
            if "id" not in message:
                self.events.append(message)
                self._told.unpark_all()
            elif message["id"] in self._waiting:
                done, answer = self._waiting.pop(message["id"])
                answer.update(message)
                done.set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        number = next(self._numbers)
        done, answer = trio.Event(), dict[str, Any]()
        self._waiting[number] = done, answer
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_message(json.dumps(message))
        await done.wait()
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def go(self, url: str) -> None:
        """Load a page, and wait until it has."""
        self.events.clear()
        await self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            await self._told.park()

    async def js(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = await self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true: the page looks with each frame that it draws."""
        look = f"const look = () => ({expression}) ? done() : requestAnimationFrame(look)"
        await self.js(f"new Promise(done => {{ {look}; look() }})")

    async def text(self, selector: str) -> str:
        return str(await self.js(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r", " ": " "}.get(key)
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        fields: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
        }
        if text is not None:
            fields["text"] = text
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def view(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        """The size of the window, and the system's colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, name: str) -> Path:
        """Keep what is to be seen as a test artefact."""
        picture = await self.call("Page.captureScreenshot", format="png")
        path = artefacts() / f"{name}.png"
        path.write_bytes(base64.b64decode(picture["data"]))
        return path

    def complaints(self) -> list[str]:
        """Errors of its scripts, and what was blocked."""
        found = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(str(parameters["entry"]["text"]))
        return found

    def requested(self) -> set[str]:
        """Addresses of all that it has asked for."""
        asked = {
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        }
        sockets = {
            event["params"]["url"] for event in self.events if event["method"] == "Network.webSocketCreated"
        }
        return asked | sockets


@contextlib.asynccontextmanager
async def open_page(folder: Path, *, log: Callable[[str], object] = lambda _: None) -> AsyncIterator[Page]:
    """A new browser with one tab; both end with the block.

    Args:
        folder: an empty one, for its profile.
    """
    program = find_chromium()
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(
            [program, *_ARGUMENTS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr is not None
        try:
            url = await _endpoint(process.stderr)
            nursery.start_soon(_drain, process.stderr, log)
            async with open_websocket_url(url, max_message_size=_MAX_MESSAGE_BYTES) as socket:
                page = Page(socket)
                nursery.start_soon(page.listen)
                await page.open()
                yield page
                nursery.cancel_scope.cancel()
        finally:
            _end_group(process)
            with trio.CancelScope(shield=True):
                await process.wait()
                await process.stderr.aclose()


def _end_group(process: trio.Process) -> None:
    """Kill the browser with all of its processes, which are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)


async def _endpoint(stderr: trio.abc.ReceiveStream) -> str:
    said = b""
    async for chunk in stderr:
        said += chunk
        for line in said.split(b"\n")[:-1]:
            if line.startswith(b"DevTools listening on "):
                return line.removeprefix(b"DevTools listening on ").decode().strip()
    raise AssertionError(f"Chromium ended: {said.decode(errors='replace')[-2000:]}")


async def _drain(stderr: trio.abc.ReceiveStream, log: Callable[[str], object]) -> None:
    async for chunk in stderr:
        log(chunk.decode(errors="replace"))

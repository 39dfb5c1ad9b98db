"""The template worker: what templates may do, and what happens to those that do more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from skippy.frontend.errors import ApiError
from skippy.frontend.templates import MAX_WAITING, TemplateRenderer

MIB = 1024 * 1024


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[TemplateRenderer]:
    settings: dict[str, Any] = {"cpu_secs": 5, "memory_bytes": 512 * MIB, "max_output_bytes": MIB, **limits}
    renderer = TemplateRenderer(**settings)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(renderer.run)
            yield renderer
            nursery.cancel_scope.cancel()
    assert renderer.worker_pid is None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def chat(*contents: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"messages": messages, "bos_token": "<s>", "add_generation_prompt": True, "tools": None}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hé"),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hé"}]'),
        ("{{ {'b': '<', 'a': 1} | tojson(indent=1) }}", '{\n "b": "<",\n "a": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ 1 + 1 }}{% endgeneration %}", "2"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }}{{ missing is defined }}", "TrueFalse"),
    ],
)
async def test_renders(template: str, text: str) -> None:
    async with running() as renderer:
        assert await renderer.render(template, chat("hé")) == text


async def test_a_variable_may_have_any_name() -> None:
    async with running() as renderer:
        context = {**chat("x"), "self": 1, "context": 2, "range": 3}
        assert await renderer.render("{{ context }}{{ range }}", context) == "23"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurse"),
        ("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}", "larger than"),
    ],
)
async def test_refusals_carry_the_reason(template: str, reason: str) -> None:
    async with running() as renderer:
        with pytest.raises(ApiError, match=reason) as caught:
            await renderer.render(template, chat("x"))
        assert caught.value.status == 400
        first = renderer.worker_pid
        assert await renderer.render("ok", {}) == "ok"
        assert renderer.worker_pid == first


_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [_LOOP, "{{ 9 ** (9 ** 9) }}", "{{ ('x' * 400000000) ~ ('y' * 400000000) }}"],
    ids=["loop", "power", "memory"],
)
async def test_bombs_are_stopped_and_the_next_request_works(template: str) -> None:
    async with running(cpu_secs=0.5) as renderer:
        await renderer.render("warm", {})
        first = renderer.worker_pid
        assert first is not None
        with pytest.raises(ApiError, match=r"too long|memory") as caught:
            await renderer.render(template, {})
        assert caught.value.status == 400
        assert not is_alive(first)
        assert await renderer.render("next", {}) == "next"
        assert renderer.worker_pid not in (first, None)


async def test_jobs_that_wait_are_bounded() -> None:
    renderer = TemplateRenderer(cpu_secs=5, memory_bytes=512 * MIB, max_output_bytes=MIB)
    async with trio.open_nursery() as nursery:  # without a worker nothing is ever taken
        for _ in range(MAX_WAITING):
            nursery.start_soon(renderer.render, "x", {})
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ApiError, match="try again") as caught:
            await renderer.render("x", {})
        assert caught.value.status == 429
        nursery.cancel_scope.cancel()


async def test_a_worker_that_does_not_answer_is_killed() -> None:
    async with running(cpu_secs=0.4) as renderer:
        await renderer.render("warm", {})
        pid = renderer.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # uses no processor time, so only the wall clock can end it
        with pytest.raises(ApiError, match="too long"):
            await renderer.render("x", {})
        assert not is_alive(pid)
        assert await renderer.render("next", {}) == "next"


async def test_a_cancelled_request_leaves_no_stale_answer() -> None:
    async with running() as renderer:
        await renderer.render("warm", {})
        slow = "{% for i in range(99999) %}{{ i }}{% endfor %}"
        for _ in range(3):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(renderer.render, slow, {})
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            assert await renderer.render("{{ messages[0].content }}", chat("mine")) == "mine"


async def test_a_worker_killed_while_idle_is_replaced() -> None:
    async with running() as renderer:
        await renderer.render("warm", {})
        pid = renderer.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await trio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await renderer.render("next", {}) == "next"


async def test_a_worker_killed_at_work_costs_nobody_an_answer() -> None:
    async with running() as renderer:
        await renderer.render("warm", {})
        pid = renderer.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it has the job for sure, and cannot have answered
        texts: list[str] = []

        async def render() -> None:
            texts.append(await renderer.render("{{ messages[0].content }}", chat("mine")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(render)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(pid, signal.SIGKILL)
        assert texts == ["mine"]
        assert not is_alive(pid)


async def test_a_worker_that_cannot_start_is_no_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as renderer:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            with pytest.raises(ApiError) as caught:
                await renderer.render("x", {})
            assert caught.value.status == 500
        assert await renderer.render("next", {}) == "next"


async def test_no_worker_outlives_the_renderer() -> None:
    async with running() as renderer:
        await renderer.render("warm", {})
        pid = renderer.worker_pid
        assert pid is not None
        assert is_alive(pid)
    assert not is_alive(pid)


def test_the_worker_imports_little() -> None:
    code = (
        "import sys, skippy.frontend.template_worker; "
        "print([m for m in ('quart', 'trio', 'numpy', 'hypercorn') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

"""A generation as a task: every way in which it can end."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from skippy.frontend.caller import Caller
from skippy.frontend.choices import ChoiceResult, Piece
from skippy.frontend.errors import ApiError
from skippy.frontend.generation import FinishReason, GenerationRequest
from skippy.frontend.metrics import Metrics
from skippy.frontend.requests import RunningRequests
from skippy.frontend.running import SHUTTING_DOWN, GenerationTask
from skippy.frontend.tools import THINK, AnswerReading, ToolFormat, collect as answer_of

from .support import Script, ScriptedGenerator, say


def make(generator: ScriptedGenerator, *stops: str, max_tokens: int = 100) -> GenerationTask:
    async def prepare() -> list[GenerationRequest]:
        return [GenerationRequest(prompt=[1], max_tokens=max_tokens)]

    return GenerationTask(generator, prepare, stops, stall_secs=10, buffer=2)


async def collect(task: GenerationTask) -> str:
    return "".join([piece.text async for piece in task.events if piece is not None])


async def test_an_answer_that_is_whole_cannot_be_ended() -> None:
    """Nor is its client told so, while the request is still in the list of those that run."""
    generator = ScriptedGenerator(say("abc"))
    task = make(generator)
    async with trio.open_nursery() as nursery:
        requests = RunningRequests(Metrics(generator.status))
        with requests.running(task, Caller(nursery=nursery, request_id="id")):
            nursery.start_soon(task.run)
            assert await collect(task) == "abc"
            assert requests.cancel("id", None) == 0
    assert (task.outcome, task.error) == ("completed", None)


@pytest.mark.parametrize(
    ("script", "stops", "text", "reason", "tokens"),
    [
        (say("abc"), [], "abc", "stop", 3),
        (say("x" * 500), [], "x" * 100, "length", 100),
        (say("abcdef"), ["cd"], "ab", "stop", 4),
        (say("abc"), ["cd"], "abc", "stop", 3),
        # The stop string is complete only once the longer one, begun earlier, can no longer come.
        (say("abc"), ["bc", "abcd"], "a", "stop", 3),
        (say(b"\xe2\x82"), ["\ufffd"], "", "stop", 2),
        (say(""), [], "", "stop", 0),
    ],
)
async def test_normal_ends(
    script: Script, stops: list[str], text: str, reason: FinishReason, tokens: int
) -> None:
    generator = ScriptedGenerator(script)
    task = make(generator, *stops)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        await task.started()
        assert await collect(task) == text
    assert (task.outcome, task.finish_reason, task.usage.completion_tokens) == ("completed", reason, tokens)
    assert task.error is None
    assert generator.active == 0


async def test_a_reader_that_stalls_loses_the_generation(autojump_clock: trio.testing.MockClock) -> None:
    generator = ScriptedGenerator(say("abcdef"))
    task = make(generator)
    start = trio.current_time()
    await task.run()
    assert trio.current_time() - start == 10
    assert (task.outcome, generator.active) == ("stalled", 0)
    assert await collect(task) == "ab"
    assert task.error is not None
    assert task.error.status == 408


async def test_a_slow_reader_keeps_the_generation(autojump_clock: trio.testing.MockClock) -> None:
    generator = ScriptedGenerator(say("abcdef"))
    task = make(generator)
    text = ""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        async for piece in task.events:
            await trio.sleep(9)
            text += piece.text if piece is not None else ""
    assert (text, task.outcome) == ("abcdef", "completed")


async def test_express_takes_what_a_waiting_reader_would_get() -> None:
    steps = [trio.Event() for _ in range(4)]
    task = make(ScriptedGenerator(lambda _: [steps[0], 97, steps[1], 98, steps[2], 99, 100, 101, steps[3]]))
    taken: list[str] = []
    task.express = lambda _, text: taken.append(text) or text != "b"  # type: ignore[func-returns-value]
    got: list[str] = []
    go_on = trio.Event()

    async def read() -> None:
        async for piece in task.events:
            assert piece is not None
            got.append(piece.text)
            await go_on.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        await trio.testing.wait_all_tasks_blocked()
        steps[0].set()  # nobody waits yet
        await trio.testing.wait_all_tasks_blocked()
        assert taken == []
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        go_on = trio.Event()
        steps[1].set()
        await trio.testing.wait_all_tasks_blocked()
        assert (taken, got) == (["b"], ["a", ""])
        steps[2].set()  # the reader is busy with what was left to it
        await trio.testing.wait_all_tasks_blocked()
        assert (taken, got) == (["b"], ["a", ""])
        go_on.set()
        steps[3].set()
    assert (taken, got) == (["b"], ["a", "", "c", "d", "e", ""])  # the last piece says why


@pytest.mark.parametrize("tokens", [0, 1])
async def test_shut_down(tokens: int) -> None:
    generator = ScriptedGenerator(lambda request: [*([97] * tokens), trio.Event()])
    task = make(generator)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        await trio.testing.wait_all_tasks_blocked()
        task.end(ApiError(SHUTTING_DOWN, status=503))
        if tokens:
            await task.started()
            assert await collect(task) == "a"
        else:
            with pytest.raises(ApiError, match="shutting down"):
                await task.started()
    assert task.error is not None
    assert (task.error.status, generator.active) == (503, 0)


async def test_shut_down_after_the_end_changes_nothing() -> None:
    task = make(ScriptedGenerator(say("a")))
    await task.run()
    task.end(ApiError(SHUTTING_DOWN, status=503))
    assert (task.outcome, task.error) == ("completed", None)


async def test_cancellation_from_outside_frees_the_lane() -> None:
    generator = ScriptedGenerator(lambda request: [trio.Event()])
    task = make(generator)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)
        await trio.testing.wait_all_tasks_blocked()
        assert generator.active == 1
        nursery.cancel_scope.cancel()
    assert (task.outcome, generator.active) == ("cancelled", 0)


async def test_unknown_failures_stay_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    task = make(ScriptedGenerator(lambda request: [97, RuntimeError("secret")]))
    await task.run()
    assert task.error is not None
    assert task.error.status == 500
    assert "secret" not in task.error.message
    assert "secret" in caplog.text


async def test_express_takes_reasoning_and_calls_too() -> None:
    text = b'<think>Hm</think>So <tool_call>{"name": "f"}</tool_call>'
    waits = [trio.Event() for _ in text]
    steps = [step for pair in zip(waits, text, strict=True) for step in pair]
    request = GenerationRequest(
        prompt=[1],
        max_tokens=100,
        reading=AnswerReading(tools=ToolFormat.HERMES, names=frozenset({"f"}), reasoning=THINK),
    )

    async def prepare() -> list[GenerationRequest]:
        return [request]

    task = GenerationTask(ScriptedGenerator(lambda _: steps), prepare, (), stall_secs=10, buffer=2)
    pieces: list[Piece] = []
    task.express = lambda index, text: not pieces.append(Piece(index, text))  # type: ignore[func-returns-value]
    task.express_piece = lambda piece: not pieces.append(piece)  # type: ignore[func-returns-value]
    result = ChoiceResult()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(task.run)

        async def read() -> None:
            async for piece in task.events:
                assert piece is not None
                assert piece.finish_reason is not None  # the last one; all others were taken
                result.add(piece)

        nursery.start_soon(read)
        for wait in waits:
            await trio.testing.wait_all_tasks_blocked()
            wait.set()
    for piece in pieces:
        result.add(piece)
    answer = answer_of(result.deltas)
    assert (result.text, answer.reasoning, [call.name for call in answer.calls]) == ("So", "Hm", ["f"])
    assert task.finish_reason == "tool_calls"

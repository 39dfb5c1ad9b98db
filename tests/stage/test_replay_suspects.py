"""A request that a stage dies of, among others that are lost with it each time."""

from __future__ import annotations

import trio
import trio.testing

from skippy.frontend.generation import ChainUnavailable, GenerationRequest
from skippy.protocol import MessageKind
from tests.stage.test_chain import generate, unsplit_tokens
from tests.stage.test_replay import PORTS, lossy_chain
from tests.support.lossy import Fate, Frame

POISON = [256, *b"poison"]
OTHERS = [[256, *b"one that is longer" * count] for count in (2, 5, 8)]
TOKENS = 40


async def test_others_outlive_a_request_that_its_stage_dies_of(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Replayed together, none of them would come to a token before the stage dies again."""
    ended: dict[int, list[int] | str] = {}
    deaths = 0

    async def client(prompt: list[int]) -> None:
        try:
            ended[len(prompt)] = await generate(
                chain.generator, GenerationRequest(prompt=prompt, max_tokens=TOKENS)
            )
        except ChainUnavailable as error:
            ended[len(prompt)] = str(error)

    def fate(frame: Frame) -> Fate:
        nonlocal deaths
        is_poison = frame.port == PORTS["stage 1"] and frame.prompt_tokens == len(POISON)
        late = frame.kind == MessageKind.DECODE_REPLAY_FINAL_EMBD
        if not is_poison or not (late or (frame.kind == MessageKind.DECODE_EMBD and not deaths and ready())):
            return None
        deaths += 1
        chain.transport.break_links(PORTS["stage 1"])
        return "lose"

    def ready() -> bool:
        """Everybody is in the middle of an answer."""
        return chain.transport.count(PORTS["return stream"]) > 40

    async with lossy_chain(lanes=4) as chain:
        chain.transport.fate = fate
        async with trio.open_nursery() as nursery:
            for prompt in (POISON, *OTHERS):
                nursery.start_soon(client, prompt)
    assert deaths == 4
    poisoned = ended.pop(len(POISON))
    assert isinstance(poisoned, str)
    assert "lost again, after 3 replays" in poisoned
    assert ended == {len(prompt): unsplit_tokens(prompt, TOKENS) for prompt in OTHERS}

"""What is generated fits the request's grammar, in every chain, and no grammar harms a stage."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from typing import Any, ClassVar

import attrs
import pytest
import trio
import trio.testing

from skippy.config import KvCacheConfig
from skippy.engine import Segment
from skippy.engine.grammar import GrammarFailed, GrammarVocabulary, read_tokens
from skippy.engine.toy import ToyEngine
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.constraints import check_constraint
from skippy.frontend.driver import ChainGenerator
from skippy.frontend.generation import Constraint, GenerationRequest, InvalidGrammar, TooManyRequests
from skippy.protocol import MessageKind, SamplingConfig
from skippy.stage import GenerationSettings, SettingsRefused, grammars as grammars_module
from skippy.stage.grammars import MAX_WAITING, MAX_WAITING_EACH, Grammars
from skippy.workers.grammar import Checker, Tokens
from skippy.workers.parent import JobFailed, Worker
from tests.stage.test_chain import PROMPT, generate, generator_over, unsplit_tokens, wait_for_sequences
from tests.stage.test_replay import PORTS, lossy_chain, once
from tests.support.cluster import LAYERS, toy_cluster
from tests.support.driver import Driver, driver_of

K = MessageKind
SAMPLED = SamplingConfig(flags=1, seed=11, temperature=0.9, top_k=40, repeat_penalty=1.2)
WORDS = 'start: word (" " word){1,3} "."\nword: /[a-z]{2,4}/\n'
LIKE_WORDS = re.compile(r"[a-z]{2,4}( [a-z]{2,4}){1,3}\.")
END = ToyVocabulary.EOS


def held(grammar: str = WORDS, sampling: SamplingConfig | None = None, **fields: Any) -> GenerationRequest:
    constraint = Constraint(grammar, "grammar")
    fields = {"prompt": PROMPT, "max_tokens": 40, **fields}
    return GenerationRequest(sampling=sampling, constraint=constraint, **fields)


def unsplit_held(grammar: str, sampling: SamplingConfig | None, count: int) -> list[int]:
    """What the whole model draws out of what the grammar allows, up to the end."""
    engine, place = (
        ToyEngine(0, LAYERS, LAYERS),
        GrammarVocabulary.of(ToyVocabulary()).compile(grammar, len(PROMPT)),
    )
    sampler = engine.new_sampler(sampling)
    engine.decode([Segment(0, 0, len(PROMPT) - 1, tokens=PROMPT[:-1])])
    sampler.accept(PROMPT[:-1])
    history = list(PROMPT)
    while len(history) - len(PROMPT) < count:
        sampler.accept(history[-1:])
        engine.decode([Segment(0, len(history) - 1, 1, tokens=history[-1:], logits=1)])
        allowed = place.allowed(history)
        token = sampler.sample(engine.logits(0), len(history) - len(PROMPT), allowed)
        assert allowed[token]
        if token in (END, ToyVocabulary.IM_END):
            break
        history.append(token)
    return history[len(PROMPT) :]


async def text_and_reason(generator: ChainGenerator, request: GenerationRequest) -> tuple[str, str | None]:
    async with generator.generate(request) as stream:
        text = bytes([token async for token in stream]).decode()
        return text, stream.finish_reason


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
async def test_the_text_fits_and_ends(stages: int, sampling: SamplingConfig | None) -> None:
    with trio.fail_after(30):
        async with toy_cluster(stages) as cluster, generator_over(cluster, lanes=1) as generator:
            text, reason = await text_and_reason(generator, held(sampling=sampling))
            assert LIKE_WORDS.fullmatch(text)
            assert reason == "stop"
            assert list(text.encode()) == unsplit_held(WORDS, sampling, 40)
            # With its limit inside of the grammar; and with log-probabilities, which change nothing.
            assert await text_and_reason(generator, held(sampling=sampling, max_tokens=4)) == (
                text[:4],
                "length",
            )
            assert (await text_and_reason(generator, held(sampling=sampling, top_logprobs=2)))[0] == text
            # The next request on the same lane is free again.
            assert await generate(
                generator, GenerationRequest(prompt=PROMPT, max_tokens=6)
            ) == unsplit_tokens(PROMPT, 6)
            await wait_for_sequences(cluster)
            assert all(stage.context.served.is_set() for stage in cluster.stages)


async def test_requests_side_by_side_have_each_their_own() -> None:
    texts: dict[int, str] = {}
    with trio.fail_after(30):
        async with toy_cluster(2, lane_count=4) as cluster, generator_over(cluster, lanes=4) as generator:

            async def ask(number: int) -> None:
                request = held(f'start: "{number}" /[a-c]{{8,9}}/', attrs.evolve(SAMPLED, seed=number))
                texts[number], _ = await text_and_reason(generator, request)

            async with trio.open_nursery() as nursery:
                for number in range(8):
                    nursery.start_soon(ask, number)
    assert all(re.fullmatch(f"{number}[a-c]{{8,9}}", texts[number]) for number in range(8))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: %json", "empty json"),
        ('start: %json {"not": {}}', "Unimplemented keys"),
        ("start: " + "(" * 20_000, "nested"),
        ("start: <|nothing|>", "unknown special token"),
        ("start: <[9999]>", "9999"),
        ('start: %json {"$ref": "#"}', "no text fits it"),
        ("x" * (128 * 1024 + 1), "at most 131072 are allowed"),
        ('start: %json {"properties": {' + ", ".join(f'"p{n}": {{}}' for n in range(4000)) + "}}", "it "),
    ],
)
async def test_bad_grammars_are_refused_by_every_side(grammar: str, reason: str) -> None:
    """Before a lane is taken; and by a last stage that is told by another driver than our own."""
    with trio.fail_after(30):
        async with toy_cluster(1) as cluster, generator_over(cluster, lanes=1) as generator:
            with pytest.raises(InvalidGrammar, match=re.escape(reason)) as caught:
                await generate(generator, held(grammar))
            assert (caught.value.status, caught.value.param) == (400, "grammar")
            assert len(str(caught.value)) < 3000
        async with toy_cluster(2) as cluster, driver_of(cluster) as driver:
            driver.prompt_tokens = 5
            metadata = GenerationSettings(grammar=grammar).to_metadata()
            await driver.send(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
            assert await driver.ended()
            await wait_for_sequences(cluster)
            async with driver_of(cluster) as second:
                await second.start(PROMPT)
                assert await second.decode(len(PROMPT) - 1, PROMPT[-1]) == unsplit_tokens(PROMPT, 1)[0]


async def start_held(driver: Driver, grammar: str = WORDS) -> None:
    driver.prompt_tokens = len(PROMPT)
    metadata = GenerationSettings(grammar=grammar).to_metadata()
    await driver.ask(K.CONFIGURE_GENERATION, chat_sampling_metadata=metadata)
    await driver.ask(K.PREFILL_EMBD, 0, PROMPT[:-1])


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_foreign_token_fails_its_request_alone(stages: int) -> None:
    right = unsplit_held(WORDS, None, 4)
    with trio.fail_after(30):
        async with toy_cluster(stages) as cluster, driver_of(cluster) as bad, driver_of(cluster) as good:
            for driver in (bad, good):
                driver.request_id += driver is good
                await start_held(driver)
                assert await driver.decode(len(PROMPT) - 1, PROMPT[-1]) == right[0]
            await bad.send(K.DECODE_EMBD, len(PROMPT), [ord("!")], decode_step=1)
            assert await bad.ended()
            assert await good.decode(len(PROMPT), right[0]) == right[1]


async def test_what_is_replayed_is_fed_without_draws() -> None:
    right = unsplit_held(WORDS, None, 6)
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster:
            async with driver_of(cluster) as driver:
                await start_held(driver)
                await driver.ask(K.PREFILL_EMBD, len(PROMPT) - 1, PROMPT[-1:])
                await driver.ask(K.DECODE_REPLAY_EMBD, len(PROMPT), right[:3], decode_step=3)
                await driver.send(K.DECODE_REPLAY_FINAL_EMBD, len(PROMPT) + 3, right[3:5], decode_step=5)
                assert (await driver.reply()).predicted == right[5]
            async with driver_of(cluster) as driver:
                await start_held(driver)
                await driver.ask(K.PREFILL_EMBD, len(PROMPT) - 1, PROMPT[-1:])
                await driver.send(K.DECODE_REPLAY_FINAL_EMBD, len(PROMPT), [right[0], 0, 1], decode_step=3)
                assert await driver.ended()
            await wait_for_sequences(cluster)


async def test_a_verify_window_is_held_up_to_the_first_draft_that_does_not_fit() -> None:
    right = unsplit_held(WORDS, None, 8)
    base = len(PROMPT) - 1
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster, driver_of(cluster) as driver:
            await start_held(driver)
            await driver.verify(1, base, [PROMPT[-1], *right[:2], ord("?"), ord("x")])
            predicted = list((await driver.reply()).predicted_tokens)
            assert predicted[:3] == right[:3]
            assert len(predicted) == 5
            # The drafts that were wrong are taken back, and others stand in their place.
            driver.generation += 1
            await driver.verify(2, base + 3, right[2:6])
            assert list((await driver.reply()).predicted_tokens) == right[3:7]
            # So is the end, which is no part of the text.
            driver.generation += 1
            await driver.verify(3, base + 5, [*right[4:5], END])
            predicted = list((await driver.reply()).predicted_tokens)
            assert predicted[0] == right[5]
            driver.generation += 1
            await driver.verify(4, base + 6, right[5:7])
            assert list((await driver.reply()).predicted_tokens) == right[6:8]


async def test_a_lost_stage_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    right = unsplit_held(WORDS, SAMPLED, 40)
    for number in range(2, len(right), 3):
        async with lossy_chain() as chain:
            chain.transport.fate = once(PORTS["return stream"], number, "lose")
            assert await generate(chain.generator, held(sampling=SAMPLED)) == right
        assert chain.replays == ["begin", "end"]


async def test_what_is_remembered_of_a_prompt_goes_with_every_grammar(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Known answers belong to their grammar; what is restored is fed to it where it was generated."""
    other = "start: /[0-9]{12}/"
    kv = KvCacheConfig(mode="lookup-record", min_tokens=8)
    async with lossy_chain(kv=kv) as chain:
        for _ in range(2):
            for grammar in (WORDS, other):
                expected = unsplit_held(grammar, None, 40)
                assert await generate(chain.generator, held(grammar)) == expected
            free = await generate(chain.generator, GenerationRequest(prompt=PROMPT, max_tokens=6))
            assert free == unsplit_tokens(PROMPT, 6)
        # All of it restored, generated tokens among them, behind the loss of a stage.
        chain.transport.fate = once(
            PORTS["return stream"], chain.transport.count(PORTS["return stream"]) + 9, "lose"
        )
        right = unsplit_held(WORDS, SAMPLED, 40)
        assert await generate(chain.generator, held(sampling=SAMPLED)) == right
        assert chain.replays == ["begin", "end"]


async def test_settings_that_leave_nothing_to_draw_are_said_to() -> None:
    nothing = attrs.evolve(SAMPLED, flags=3, ignore_eos=True)
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster, generator_over(cluster, lanes=1) as generator:
            with pytest.raises(Exception, match="ruled out by the sampling settings"):
                await generate(generator, held('start: "a"', nothing))


async def test_a_grammar_without_a_prompts_length_is_refused() -> None:
    with trio.fail_after(30):
        async with toy_cluster(1) as cluster, driver_of(cluster) as driver:
            await driver.send(K.CONFIGURE_GENERATION, chat_sampling_metadata=json.dumps({"grammar": WORDS}))
            assert await driver.ended()


async def test_the_process_that_compiles_is_kept_and_replaced_and_ended() -> None:
    grammars = Grammars(ToyVocabulary())
    with trio.fail_after(30):
        await grammars.check('start: "a"')
        first = grammars.worker_pid
        assert first is not None
        await grammars.check('start: "b"')
        assert grammars.worker_pid == first
        os.kill(first, signal.SIGKILL)
        await trio.to_thread.run_sync(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
        await grammars.check('start: "a"')  # known
        await grammars.check('start: "c"')
        assert grammars.worker_pid not in (None, first)
        await grammars.close()
        assert grammars.worker_pid is None


async def test_grammars_that_wait_are_bounded() -> None:
    grammars = Grammars(ToyVocabulary())
    await grammars.check('start: "known"')
    async with trio.open_nursery() as nursery, grammars._turns.turn("first"):
        for number in range(MAX_WAITING_EACH):
            nursery.start_soon(grammars.check, f'start: "{number}"', "first")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(TooManyRequests, match="16 of yours wait for a grammar to be compiled"):
            await check_constraint(Constraint('start: "more"', "grammar"), grammars, "first")
        for number in range(MAX_WAITING_EACH, MAX_WAITING):
            nursery.start_soon(grammars.check, f'start: "{number}"', f"other {number}")
        await trio.testing.wait_all_tasks_blocked()
        await grammars.check('start: "known"', "first")
        with pytest.raises(TooManyRequests, match="64 wait for a grammar to be compiled") as caught:
            await check_constraint(Constraint('start: "more"', "grammar"), grammars, "last")
        assert caught.value.status == 429
        nursery.cancel_scope.cancel()
    await grammars.close()


async def test_a_client_with_many_grammars_holds_up_no_other() -> None:
    """Those of one client wait for each other; another one's is next."""
    grammars = Grammars(ToyVocabulary(), threads=False)
    order = []

    async def check(name: str, client: str) -> None:
        await grammars.check(f'start: "{name}"', client)
        order.append(name)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery, grammars._turns.turn("hog"):
            for name, client in (("a1", "hog"), ("a2", "hog"), ("a3", "hog"), ("b1", "b"), ("c1", "c")):
                nursery.start_soon(check, name, client)
                await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as gone:
                gone.cancel()  # whoever leaves is out of the queue
                await check("d1", "d")
    assert order == ["a1", "b1", "c1", "a2", "a3"]


# Each of many rules can end wherever another one begins.
AMBIGUOUS = "".join(
    [
        "ambiguous: " + " | ".join(f"r{n} ambiguous" for n in range(150)) + ' | "x"\n',
        *(f"r{n}: /[a-zA-Z ]/ r{n}?\n" for n in range(150)),
    ]
)


async def test_what_takes_too_long_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor time that ends a test is remembered as an answer; a busy machine's is not."""
    grammars = Grammars(ToyVocabulary())
    asked: list[bool] = []

    async def ask(worker: Worker, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(len(asked) != 0)
        raise JobFailed("it took too long", out_of_time=asked[-1])

    monkeypatch.setattr(Worker, "ask", ask)
    for _ in range(4):
        with pytest.raises(SettingsRefused, match="grammar: compiling it failed: it took too long"):
            await grammars.check(WORDS)
    assert asked == [False, True]
    await grammars.close()


def test_an_ambiguous_grammar_is_refused() -> None:
    error = Checker(read_tokens(Words())).answer({"grammar": f"start: ambiguous\n{AMBIGUOUS}"})["error"]
    assert re.search("too complex|too ambiguous", error)


class Words(ToyVocabulary):
    """One with many tokens of several letters, as models have."""

    LETTERS = "abcdefghij"
    WORDS: ClassVar[list[bytes]] = ["".join(word).encode() for word in itertools.product(LETTERS, repeat=4)]

    @property
    def size(self) -> int:
        return super().size + len(self.WORDS)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        first = super().size
        return super().piece(token, special=special) if token < first else self.WORDS[token - first]


async def test_a_grammar_that_turns_out_to_be_slow_fails_alone_and_is_remembered() -> None:
    """Its test draws too little to find that out: the engine's thread does not wait for it."""
    grammars = Grammars(Words(), threads=False)
    hidden = f"start: /[0-9]{{20}}/ ambiguous\n{AMBIGUOUS}"
    prefix = list(b"0" * 20)
    with trio.fail_after(30):
        bad, good = await grammars.open(hidden, 0), await grammars.open(WORDS, 0)
        assert bad.allowed(prefix[:5])[ord("7")]
        for _ in range(2):
            with pytest.raises(GrammarFailed, match="too complex, or too ambiguous: .* more than 50 ms"):
                bad.allowed(prefix)
        bad.rewind(3)
        assert good.allowed([])[ord("a")]
        for _ in range(2):
            with pytest.raises(SettingsRefused, match="too ambiguous"):
                await grammars.check(hidden)
        await grammars.check(WORDS)
        await grammars.close()


async def test_what_takes_long_is_done_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs in its process meanwhile, so no session should have to wait for it."""
    made: list[int] = []
    once_made = trio.Event()
    genuine = grammars_module.GrammarVocabulary

    def make(tokens: Tokens) -> GrammarVocabulary:
        made.append(len(tokens.tokens))
        trio.from_thread.run_sync(once_made.set)
        return genuine(tokens)

    monkeypatch.setattr(grammars_module, "GrammarVocabulary", make)
    with trio.fail_after(30):
        async with toy_cluster(2) as cluster, generator_over(cluster, lanes=1) as generator:
            await once_made.wait()
            text, reason = await text_and_reason(generator, held())
            assert reason == "stop"
            assert LIKE_WORDS.fullmatch(text)
    assert made == [ToyVocabulary().size]
    await Grammars(None).get_ready()


async def test_a_plain_peer_cannot_hold_an_answer_to_a_grammar() -> None:
    with pytest.raises(SettingsRefused, match=r"^grammar: .* stage 1 is a plain generation-8 peer"):
        GenerationSettings(grammar=WORDS).check_plain(1)
    GenerationSettings(3).check_plain(1)

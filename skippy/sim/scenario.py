"""What a seed stands for: a chain, its weather, what is asked of it, and what goes wrong. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

import attrs

from skippy.config import OpenAIOptions, StageOptions
from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.frontend.generation import GenerationRequest
from skippy.kv.settings import extra_sequences
from skippy.protocol import SamplingConfig

from .engine import StepCost
from .faults import Conditions, Direction, Fault, FaultKind, LinkFault, LinkName
from .oracle import ToyModel
from .prefixes import Prefixes, draw_prefixes, share
from .sizes import LARGE, SIZES, Size, draw_size

FAULT_NAMES: Final = ("weather", *(kind.value for kind in FaultKind), "crash", "vanish")
"""What ``--faults`` may name: the links' latency, bandwidth and slices, the faults of a link, a stage that is
killed and started again, and one that is cut off from the network for a while."""


@attrs.frozen(slots=True)
class Asked:
    """A request, and what its client is like.

    Attributes:
        at: when it comes.
        leaves_after: tokens after which the client goes away; None: it stays to the end.
        patience: seconds after which the client goes away; None: it stays.
        pause: seconds that the client takes for each token, or piece of text.
        stops: it reads text, which ends at any of these; None: it reads tokens.
    """

    at: float
    request: GenerationRequest
    leaves_after: int | None = None
    patience: float | None = None
    pause: float = 0.0
    stops: tuple[str, ...] | None = None


@attrs.frozen(slots=True)
class Blow:
    """Something that goes wrong at a time.

    Attributes:
        fault: of one of the links that are open then; None: it hits a stage.
        place: which link, as a part of all there are, 0 to 1.
        stage: which stage is hit.
        kills: its process ends, and starts again later.
        silent: it is cut off from the network meanwhile, so nobody is told that it is away.
        secs: how long it is away.
    """

    at: float
    fault: Fault | None = None
    direction: Direction = Direction.FORWARD
    place: float = 0.0
    stage: int = 0
    kills: bool = False
    silent: bool = False
    secs: float = 0.0


@attrs.frozen(slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation depends on.

    Attributes:
        splits: layers of each stage.
        lanes: requests at once.
        drivers: peers that speak the protocol to stage 0 by themselves, beside the front end.
        sequences: native sequences of each stage; where there are fewer than lanes and drivers, these wait.
        prefixes: what the stages remember; None: nothing.
        size: what the numbers were drawn from.
    """

    seed: int
    splits: tuple[int, ...]
    lanes: int
    drivers: int
    sequences: int
    model: ToyModel
    conditions: Conditions
    cost: StepCost
    options: StageOptions
    openai: OpenAIOptions
    batch_max_tokens: int | None
    asked: tuple[Asked, ...]
    faults: tuple[LinkFault, ...]
    blows: tuple[Blow, ...]
    prefixes: Prefixes | None = None
    size: Size = LARGE

    @property
    def native_sequences(self) -> int:
        """All native sequences of a stage, those included in which nothing but prefixes are kept."""
        cache = None if self.prefixes is None else self.prefixes.cache
        return self.sequences + extra_sequences(cache, lane_count=self.sequences, kv_unified=False)

    @property
    def faulty(self) -> bool:
        """Whether anything is meant to go wrong."""
        return bool(self.faults or self.blows)


def draw(
    seed: int,
    *,
    size: str | None = None,
    stages: int | None = None,
    requests: int | None = None,
    faults: Collection[str] = FAULT_NAMES,
) -> Scenario:
    """The scenario of a seed.

    Args:
        size: one of SIZES; None: the seed says.
        stages, requests: how many; None: the seed says.
        faults: names of :data:`FAULT_NAMES` that may come.
    """
    chance = random.Random(f"scenario/{seed}")
    of = draw_size(seed) if size is None else SIZES[size]
    count = stages or chance.choice(of.stages)
    lanes = chance.choice(of.lanes)
    splits = tuple(chance.choice([1, 1, 2]) for _ in range(count))
    model = ToyModel(
        layers=sum(splits),
        context_length=chance.choice([64, 96, 128]),
        end_at=chance.choice([None, 20, 40]),
    )
    asked = [
        _ask(chance, model, of)
        for _ in range(
            requests if requests is not None else chance.randint(1, of.requests_for_each_lane * lanes + 1)
        )
    ]
    prefixes = draw_prefixes(seed, of)
    if prefixes is not None:
        asked = _sharing(seed, prefixes, model, of, asked, of.returning if requests is None else 0)
    drivers = chance.choice([0, 0, 1])
    drawn = _Faults(chance, count, lanes, of.secs, faults)
    return Scenario(
        seed=seed,
        splits=splits,
        lanes=lanes,
        drivers=drivers,
        sequences=lanes + (drivers if chance.random() < 0.5 else 0),
        model=model,
        conditions=_weather(chance, "weather" in faults),
        cost=chance.choice(
            [StepCost(), StepCost(0.002), StepCost(0.01, 0.0005), StepCost(0.05, 0.002)],
        ),
        options=_options(chance),
        openai=_openai(chance, lanes),
        batch_max_tokens=chance.choice([None, 16]),
        asked=tuple(sorted(asked, key=lambda each: each.at)),
        faults=tuple(drawn.of_links()),
        blows=tuple(sorted(drawn.blows(), key=lambda blow: blow.at)),
        prefixes=prefixes,
        size=of,
    )


def _sharing(
    seed: int, prefixes: Prefixes, model: ToyModel, size: Size, asked: list[Asked], most: int
) -> list[Asked]:
    """These requests and at most ``most`` others, with prompts that have beginnings in common."""
    chance = random.Random(f"returning/{seed}")
    more = [_ask(chance, model, size) for _ in range(chance.randint(0, most))]
    later = [attrs.evolve(each, at=chance.uniform(0, 2 * size.secs)) for each in more]
    asked = sorted([*asked, *later], key=lambda each: each.at)
    prompts = share(seed, prefixes, model, [each.request for each in asked])
    return [
        attrs.evolve(
            each,
            request=attrs.evolve(each.request, prompt=prompt, namespace="ab" * (sum(prompt) % 5 == 0)),
        )
        for each, prompt in zip(asked, prompts, strict=True)
    ]


def _options(chance: random.Random) -> StageOptions:
    return StageOptions(
        max_inflight=chance.choice([1, 4, 8]),
        reply_credit_limit=chance.choice([None, None, 0, 1]),
        async_prefill_forward=chance.random() < 0.8,
        safe_mode=chance.random() < 0.15,
        # A stage that is dialled and silent may still be loading: that wait has no other end than this.
        downstream_connect_timeout_secs=10,
        peer_timeout_secs=chance.choice([1.5, 2.0, 4.0]),
        warm_preconnect=chance.random() < 0.25,
        link_token=chance.choice([None, "secret"]),
    )


def _openai(chance: random.Random, lanes: int) -> OpenAIOptions:
    if chance.random() < 0.5:
        policy = {"prefill_chunk_policy": "fixed", "prefill_chunk_size": chance.choice([3, 8, 200])}
    else:
        policy = {"prefill_adaptive_start": 8, "prefill_adaptive_step": 8, "prefill_adaptive_max": 24}
        policy["prefill_chunk_size"] = 8
    return OpenAIOptions(
        generation_concurrency=lanes,
        generation_queue_capacity=256,
        adaptive_generation_concurrency=chance.random() < 0.2,
        **policy,  # type: ignore[arg-type]
    )


def _weather(chance: random.Random, bad: bool) -> Conditions:
    if not bad or chance.random() < 0.2:
        return Conditions()
    return Conditions(
        latency=chance.choice([0.0, 0.0, 0.0005, 0.02, 0.1]),
        jitter=chance.choice([0.0, 0.0, 0.005]),
        bandwidth=chance.choice([float("inf"), float("inf"), 200_000.0]),
        capacity=chance.choice([256 * 1024, 1500]),
        slices=chance.choice([None, None, None, 400, 100, 20]),
        partial=chance.choice([0.0, 0.0, 0.3]),
    )


def _ask(chance: random.Random, model: ToyModel, size: Size) -> Asked:
    prompt = [ToyVocabulary.BOS] * (chance.random() < 0.5)
    prompt += [chance.randrange(32, 127) for _ in range(chance.choice(size.prompt))]
    sampling = None
    if chance.random() < 0.5:
        sampling = SamplingConfig(
            flags=1,
            seed=chance.randrange(2**32),
            temperature=chance.choice([0.0, 0.7, 1.5]),
            top_k=chance.choice([0, 20]),
            repeat_penalty=chance.choice([1.0, 1.2]),
            presence_penalty=chance.choice([0.0, 0.3]),
            ignore_eos=chance.random() < 0.2,
        )
    request = GenerationRequest(
        prompt=prompt,
        max_tokens=chance.choice(size.answer),
        sampling=sampling,
        top_logprobs=chance.choice([None, None, None, 0, 2]),
    )
    leaves = chance.random()
    return Asked(
        at=chance.choice([0.0, chance.uniform(0, size.secs)]),
        request=request,
        leaves_after=chance.randint(0, 8) if leaves < 0.2 else None,
        patience=chance.uniform(0, 2) if leaves > 0.85 else None,
        pause=chance.choice([0.0, 0.0, 0.0, 0.05]),
        stops=chance.choice([None, None, (), ("e", "Z9")]),
    )


class _Faults:
    """The dice for what goes wrong."""

    def __init__(
        self, chance: random.Random, stages: int, lanes: int, secs: float, names: Collection[str]
    ) -> None:
        self._chance = chance
        self._stages = stages
        self._lanes = lanes
        self._secs = secs
        self._kinds = [kind for kind in FaultKind if kind.value in names]
        self._crash, self._vanish = "crash" in names, "vanish" in names
        # A third of all seeds has none, so that what holds without faults is looked at too.
        self._many = chance.choice([0, 1, 2]) if stages > 1 else 0

    def of_links(self) -> list[LinkFault]:
        chance = self._chance
        if not self._kinds or not self._many:
            return []
        return [self._of_link() for _ in range(chance.randint(0, 2 * self._many))]

    def _of_link(self) -> LinkFault:
        chance = self._chance
        edge = chance.randrange(self._stages)
        # The last stage dials stage 0 for its return streams.
        dialler, listener = (edge, edge + 1) if edge + 1 < self._stages else (edge, 0)
        name = LinkName(
            f"stage-{dialler}", f"stage-{listener}", chance.randrange(self._lanes + chance.randrange(3))
        )
        if chance.random() < 0.3:
            place = {"byte": chance.randrange(4000)}
        else:
            place = {
                "frame": chance.randrange(chance.choice([4, 40])),
                "byte": chance.choice([0, 1, 50, 9999]),
            }
        return LinkFault(name, chance.choice(list(Direction)), self._fault(**place))

    def _fault(self, frame: int | None = None, byte: int = 0) -> Fault:
        chance = self._chance
        kind = chance.choice(self._kinds)
        if kind is FaultKind.LIE:
            salt = chance.randrange(2**32)
            return Fault(kind, frame=frame or 0, rewrite=lambda data: _garbled(data, salt))
        secs = chance.choice([float("inf"), 0.5, 5.0, 30.0])
        if kind is FaultKind.TRICKLE:
            secs = chance.choice([0.001, 0.05])
        return Fault(
            kind,
            frame=frame,
            byte=byte,
            secs=secs,
            length=chance.choice([1, 4]),
            mask=chance.choice([0x01, 0x80, 0xFF]),
        )

    def blows(self) -> list[Blow]:
        chance = self._chance
        if not self._many:
            return []
        blows = [
            Blow(
                at=chance.uniform(0, self._secs),
                fault=self._timed(),
                direction=chance.choice(list(Direction)),
                place=chance.random(),
            )
            for _ in range(chance.randint(0, self._many) if self._timed_kinds else 0)
        ]
        for wanted, silent in ((self._crash, False), (self._vanish, True)):
            if wanted and chance.random() < 0.5:
                blows.append(
                    Blow(
                        at=chance.uniform(0, self._secs),
                        stage=chance.randrange(1 if chance.random() < 0.8 else 0, self._stages),
                        kills=not silent or chance.random() < 0.5,
                        silent=silent,
                        secs=chance.choice([0.1, 1.0, 3.0]),
                    )
                )
        return blows

    @property
    def _timed_kinds(self) -> list[FaultKind]:
        return [kind for kind in self._kinds if kind is not FaultKind.LIE]

    def _timed(self) -> Fault:
        while (fault := self._fault()).kind is FaultKind.LIE:
            pass
        return fault


def _garbled(data: bytes, salt: int) -> bytes:
    """Another frame: cut, repeated, or with other words in it."""
    chance = random.Random(salt + len(data))
    what = chance.randrange(4)
    if what == 0:
        return data[: len(data) // 2]
    if what == 1:
        return data * 2
    if what == 2:
        return chance.randbytes(len(data))
    changed = bytearray(data)
    place = chance.randrange(0, max(1, len(data) - 3), 4)
    changed[place : place + 4] = chance.randrange(2**32).to_bytes(4, "little")
    return bytes(changed)

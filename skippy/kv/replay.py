"""What stage 0 remembers of answers: their first tokens, where equal requests must be given the same.

A request whose sampling makes no draw has one right answer (up to what the composition of batches moves, see
docs/performance.md). So the first tokens of an equal one are known before anything is computed, and with its
prompt restored the rest goes on from there.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import attrs

from skippy.protocol.messages import DEFAULT_SAMPLERS, SamplingConfig

from .radix import tokens_of
from .settings import KvSettings

MAX_REPLAY_TOKENS: Final = 8
_DOMAIN: Final = b"skippy-sampling-fingerprint-v2"


def sampling_replay_safe(sampling: SamplingConfig | None) -> bool:
    """Whether sampling makes no draw, so that equal logits always give the equal token.

    Without sampling, or disabled, it is greedy. Else it has to be at a temperature of at most 0, without what
    would draw or keep state all the same (dynamic temperature, XTC, mirostat), in the usual order of
    samplers.
    """
    if sampling is None or not sampling.enabled:
        return True
    return (
        sampling.temperature <= 0
        and sampling.mirostat_mode == 0
        and sampling.xtc_probability <= 0
        and sampling.dynatemp_range <= 0
        and sampling.samplers == DEFAULT_SAMPLERS
    )


def sampling_fingerprint(sampling: SamplingConfig | None, metadata: str | None = None) -> bytes:
    """SHA-256 over every field of the sampling block, by name and bits (so -0.0 is not 0.0), and the
    metadata.

    Args:
        metadata: chat sampling metadata that has a say in sampling.

    Raises:
        TypeError: a field has a type for which there is no encoding here.
    """
    settings = SamplingConfig() if sampling is None else sampling
    digest = hashlib.sha256(_DOMAIN)
    for field in attrs.fields(SamplingConfig):
        digest.update(_text(field.name) + _encode(getattr(settings, field.name)))
    digest.update(b"-" if metadata is None else b"+" + _text(metadata))
    return digest.digest()


def _encode(value: object) -> bytes:
    if isinstance(value, int):  # and bool
        return b"i" + struct.pack("<q", value)
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        return b"s" + _text(value)
    if isinstance(value, tuple):
        return b"t" + struct.pack("<Q", len(value)) + b"".join(map(_encode, value))
    raise TypeError(f"no encoding for a {type(value).__name__}")


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


@attrs.define(slots=True)
class ReplayCounters:
    """Counts since the start.

    Attributes:
        hits, misses: questions that could have been answered, by whether they were.
        records: answers that were new, or longer than what was known.
        conflicts: answers that differed from what is known, and were not recorded unless audited.
    """

    hits: int = 0
    misses: int = 0
    records: int = 0
    conflicts: int = 0


class ReplayCache:
    """First tokens of answers, at most 8 of each, by namespace, prompt and sampling.

    Holds digests of prompts, not prompts; as many as ``settings.max_entries``, the least recently used goes
    first. In memory only, so it belongs to one chain of stages. The seed has no part in it: no draw is made.
    """

    def __init__(self, settings: KvSettings) -> None:
        self.counters = ReplayCounters()
        self._settings = settings
        self._answers: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def find(
        self,
        namespace: str,
        prompt: Sequence[int],
        sampling: SamplingConfig | None,
        *,
        metadata: str | None = None,
    ) -> tuple[int, ...]:
        """The first tokens of the answer; none where they are not known, or not sure to be the same again."""
        if not self._settings.lookup or not self._can_know(prompt, sampling):
            return ()
        key = _key(namespace, prompt, sampling, metadata)
        known = self._answers.get(key, ())
        if known:
            self.counters.hits += 1
            self._answers.move_to_end(key)
        else:
            self.counters.misses += 1
        return known

    def record(
        self,
        namespace: str,
        prompt: Sequence[int],
        sampling: SamplingConfig | None,
        tokens: Sequence[int],
        *,
        metadata: str | None = None,
        audited: bool = False,
    ) -> None:
        """Remember the first of ``tokens``, generated after ``prompt``.

        What is known stays, unless the answer begins with it and is longer, or it was computed to check what
        is remembered: then another answer replaces what is known, which may come from what was wrong.
        """
        tokens = tuple(tokens[:MAX_REPLAY_TOKENS])
        if not tokens or not self._can_know(prompt, sampling):
            return
        key = _key(namespace, prompt, sampling, metadata)
        known = self._answers.get(key, ())
        common = min(len(known), len(tokens))
        if known[:common] != tokens[:common]:
            self.counters.conflicts += 1
            if not audited:
                return
            known = ()
        if len(tokens) > len(known):
            self._answers[key] = tokens
            self.counters.records += 1
        self._answers.move_to_end(key)
        if len(self._answers) > self._settings.max_entries:
            self._answers.popitem(last=False)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()

    def _can_know(self, prompt: Sequence[int], sampling: SamplingConfig | None) -> bool:
        return len(prompt) >= self._settings.min_tokens and sampling_replay_safe(sampling)


def _key(
    namespace: str, prompt: Sequence[int], sampling: SamplingConfig | None, metadata: str | None
) -> bytes:
    seedless = None if sampling is None else attrs.evolve(sampling, seed=0)
    digest = hashlib.sha256(_text(namespace))
    digest.update(sampling_fingerprint(seedless, metadata))
    digest.update(tokens_of(prompt))
    return digest.digest()

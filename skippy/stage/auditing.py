"""Audits: what is remembered of a prompt, against the same prompt computed again without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skippy.engine import EngineError
from skippy.kv.schedule import cut_schedule

from .keeping import KvEntry, Reference, StageCache, log
from .states import StateLost

AUDIT_TOLERANCE: Final = 2.0
"""Largest difference of a number in the cache that passes where chunks or batches were not the same.

Other chunks and batches of the bundled model moved numbers by up to 0.65; one wrong token, by 9.
"""


async def audit(
    cache: StageCache,
    namespace: str,
    tokens: Sequence[int],
    sequence: int,
    *,
    schedule: tuple[int, ...],
    alone: bool,
) -> None:
    """Compare what is remembered of ``tokens`` with a sequence that holds them and perhaps more.

    Bit by bit where both were computed alone and in the same chunks, else within AUDIT_TOLERANCE. What
    differs is remembered no more. An exported state is imported for it, if there is an empty sequence or one
    that is kept.

    Args:
        schedule, alone: how the sequence was computed, as :class:`~skippy.kv.entries.Entry` has it.
    """
    match = cache.index.match(namespace, tokens)
    if match is None:
        return
    entry, length, counters = match.entry, match.length, cache.index.counters
    chunks, whole = cut_schedule(entry.schedule, length)
    exact = alone and entry.alone and whole and chunks == cut_schedule(schedule, length)[0]
    with Reference(cache, entry):
        try:
            difference = await _difference(cache, entry, sequence, length)
        except (EngineError, StateLost, ValueError) as exc:
            cache.warnings.tell("a remembered prefix could not be audited", tokens=length, error=str(exc))
            return
    if difference is None:
        return
    counters.audits += 1
    counters.largest_difference = max(counters.largest_difference, difference)
    if difference <= (0.0 if exact else AUDIT_TOLERANCE):
        return
    counters.audit_failures += 1
    log.error(
        "a remembered prefix differs from what computing it again gives, and is forgotten",
        tokens=length,
        difference=difference,
        exact=exact,
    )
    if not entry.removed:
        cache.forget(entry)


async def _difference(cache: StageCache, entry: KvEntry, sequence: int, length: int) -> float | None:
    """How far an entry is from what ``sequence`` holds; None where there is no room to find out.

    Raises:
        EngineError, StateLost: its state cannot be imported, and is forgotten.
        ValueError: one of them is shorter than ``length``.
    """
    remembered, scheduler = entry.sequence, cache.scheduler
    if remembered is not None:
        return await scheduler.run(lambda engine: engine.difference(sequence, remembered, length))
    imported = scheduler.take_sequence()
    if imported is None:
        return None
    try:
        await cache.import_state(entry, imported)
        return await scheduler.run(lambda engine: engine.difference(sequence, imported, length))
    finally:
        scheduler.release_sequence(imported)

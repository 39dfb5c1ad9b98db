"""Where a prompt is cut so that its state can be kept there: for models that cannot shorten a sequence."""

from __future__ import annotations

from .settings import KvSettings


def checkpoints(length: int, settings: KvSettings, *, restored: int = 0) -> tuple[int, ...]:
    """Lengths, ascending, at which the state of a prompt of ``length`` tokens is to be kept on the way.

    They lie on a grid of ``shared_prefix_stride_tokens`` (or ``min_tokens``, if that is less), from
    ``min_tokens`` on. With the state at the end there are ``shared_prefix_record_limit`` of them: the longest
    on the grid first, which a prompt with another end shares, then those nearest to lengths in geometric
    progression between ``min_tokens`` and ``length``, so that what is shared may be short, too. With a limit
    of 0: the whole grid.

    Args:
        restored: the first tokens, whose state is there already.
    """
    grid, least = settings.grid, max(1, settings.min_tokens)
    rungs = list(range(-(-least // grid) * grid, length, grid))
    if settings.record_limit:
        rungs = _ladder(rungs, least, length, settings.record_limit - 1)
    return tuple(rung for rung in rungs if rung > restored)


def _ladder(rungs: list[int], least: int, length: int, count: int) -> list[int]:
    chosen = rungs[-1:] if count else []
    free = rungs[:-1]
    for step in range(count - 1, 0, -1):
        if not free:
            break
        target = least * (length / least) ** (step / count)
        nearest = min(free, key=lambda rung: (abs(rung - target), -rung))
        free.remove(nearest)
        chosen.append(nearest)
    return sorted(chosen)

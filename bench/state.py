"""What a stage pays to copy, export, import and compare what a sequence holds, against computing it.

    python -m bench.state [--layers 10] [--held 2000] [--part 100] [--context 4096] [--threads 2] [--rounds 9]

The middle layers of the model, a cache per sequence. `moved by llama.cpp` is its own copy between such
sequences: all cells of the context, held or not, with the next decode, and what that takes longer for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np

from skippy.cli.demo import find_model
from skippy.engine import EngineOptions, Segment
from skippy.engine.llama import LlamaEngine
from skippy.engine.llama.native import api
from skippy.models import SliceInfo, ensure_slice

from .common import Report, Spread, machine, parser, table

PIECE = 2**20
CHUNK = 100
SOURCE, TARGET, OTHER = 0, 1, 2


@attrs.frozen
class Case:
    """One operation, timed alone, and what puts the engine back to where it was."""

    name: str
    run: Callable[[], object]
    undo: Callable[[], object]


class Stage:
    """The engine under test; its first sequence holds ``held`` positions of noise."""

    def __init__(self, info: SliceInfo, context: int, threads: int, held: int) -> None:
        options = EngineOptions(
            context_length=context, max_sequences=4, n_threads=threads, n_threads_batch=threads
        )
        self.engine = LlamaEngine.load(info, options)
        self._random = np.random.default_rng(0)
        self.chunks = [self._timed(CHUNK) for _ in range(held // CHUNK)]
        if held % CHUNK:
            self._timed(held % CHUNK)

    def _timed(self, rows: int) -> float:
        """Seconds to compute so many rows behind what is there."""
        info = self.engine.info
        data = self._random.normal(0, 1, (rows, info.input_width)).astype(np.float32).data.cast("B")
        segment = Segment(SOURCE, self.engine.length(SOURCE), rows, activation=data)
        output = memoryview(bytearray(rows * info.output_width * 4))
        started = time.perf_counter()
        self.engine.decode([segment], output)
        return time.perf_counter() - started

    def step(self) -> float:
        seconds = self._timed(1)
        self.engine.trim(SOURCE, self.engine.length(SOURCE) - 1)
        return seconds

    def native_copy(self) -> float:
        """Seconds that llama.cpp's own copy makes the next decode longer, or 0 if nobody can tell."""
        plain = min(self.step() for _ in range(3))
        memory = api.llama_get_memory(self.engine._context)
        api.llama_memory_seq_cp(memory, SOURCE, OTHER, -1, -1)
        copied = self.step()
        self.engine.drop(OTHER)
        return max(0.0, copied - plain)


def cases_of(engine: LlamaEngine, part: int) -> list[Case]:
    state = engine.export_state(SOURCE)
    pieces = [state[start : start + PIECE] for start in range(0, len(state), PIECE)]
    held = engine.length(SOURCE)
    engine.copy(SOURCE, OTHER)

    def nothing() -> None: ...

    def drop() -> None:
        engine.drop(TARGET)

    return [
        Case("copy all", lambda: engine.copy(SOURCE, TARGET), drop),
        Case(f"copy {part}", lambda: engine.copy(SOURCE, TARGET, part), drop),
        Case("export all", lambda: engine.export_state(SOURCE), nothing),
        Case(f"export {part}", lambda: engine.export_state(SOURCE, part), nothing),
        Case("import", lambda: engine.import_state(TARGET, state), drop),
        Case("import from pieces of 1 MiB", lambda: engine.import_state(TARGET, pieces), drop),
        Case("compare all with an equal sequence", lambda: engine.difference(SOURCE, OTHER, held), nothing),
    ]


def measure(cases: Sequence[Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case; a round runs all of them, and the first is not counted."""
    found: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            started = time.perf_counter()
            result = case.run()
            seconds = time.perf_counter() - started
            del result
            case.undo()
            if number:
                found[case.name].append(seconds)
    return found


def middle(model: Path, layers: int) -> SliceInfo:
    whole = SliceInfo.from_file(model).layer_count
    start = max(1, (whole - layers) // 2)
    return ensure_slice(model, start, min(start + layers, whole - 1))


def main() -> int:
    made = parser(__doc__, rounds=9)
    for name, default in (("layers", 10), ("held", 2000), ("part", 100), ("context", 4096), ("threads", 2)):
        made.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    args = made.parse_args()
    stage = Stage(middle(find_model(args.model), args.layers), args.context, args.threads, args.held)
    engine, out = stage.engine, Report(args.out, "state")
    info = engine.info
    out.add(
        f"{info.layer_end - info.layer_start} layers, {args.held} of {args.context} positions of "
        f"{info.position_bytes} bytes each, {args.threads} threads, {args.rounds} rounds, {machine()}"
    )
    times = {"moved by llama.cpp": [stage.native_copy() for _ in range(args.rounds)]}
    times.update(measure(cases_of(engine, args.part), args.rounds))
    times[f"compute {CHUNK} positions"] = stage.chunks
    rows = [[name, Spread.of([second * 1e3 for second in seconds]).show()] for name, seconds in times.items()]
    out.add(table(["operation", "ms"], rows))
    out.finish(times)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

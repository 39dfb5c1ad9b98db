"""``python -m fuzz TARGET``: mutate the corpus and feed a target, or hand the target to atheris."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from . import CORPUS

LIMIT_MIB: Final = 64
"""How much the resident size may grow over a run: inputs are at most 64 KiB, so this is generous."""


def corpus_of(name: str) -> list[bytes]:
    """The seeds of a target, in order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def _peak_mib() -> float:
    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def inputs(name: str, runs: int, seed: int) -> Iterator[bytes]:
    """The seeds as they are, then ``runs`` mutated ones."""
    from .mutate import mutated
    from .targets import HEADS

    corpus, rng = corpus_of(name), random.Random(f"{name} {seed}")
    yield from corpus
    for _ in range(runs):
        yield mutated(rng, corpus, HEADS.get(name, 0))


def run(name: str, runs: int, seed: int) -> bool:
    """Feed the corpus and ``runs`` mutated inputs to a target; print the counts.

    Returns False after a finding: an exception, whose input is kept in the working directory, or a resident
    size that grew by more than the limit.
    """
    from .targets import TARGETS

    target, fed = TARGETS[name], 0
    base, started = _peak_mib(), time.monotonic()
    for count, data in enumerate(inputs(name, runs, seed)):
        fed += len(data)
        try:
            target(data)
        except Exception:
            traceback.print_exc()
            path = Path(f"crash-{name}-{hashlib.sha256(data).hexdigest()[:12]}")
            path.write_bytes(data)
            print(f"{name}: input {count} of seed {seed} broke the invariant; kept as {path}")
            return False
    grown = _peak_mib() - base
    print(
        f"{name}: {runs} mutated inputs, seed {seed}, {fed / 1e6:.1f} MB, "
        f"{time.monotonic() - started:.0f} s, resident size +{grown:.1f} MiB: nothing found",
        flush=True,
    )
    if grown > LIMIT_MIB:
        print(f"{name}: the resident size grew by more than {LIMIT_MIB} MiB")
        return False
    return True


def run_atheris(names: Sequence[str], seconds: int, new: Path | None) -> bool:
    """Coverage-guided fuzzing of each target for ``seconds``; whether none has a finding.

    Each has a process of its own, since libFuzzer ends it; they are forked from this one, which imports what
    they run: with instrumentation that takes longer than a short run.

    Args:
        new: keeps the inputs that reach new code; None keeps none. (libFuzzer writes them to the first folder
            it is given, which must not be the corpus.)
    """
    try:
        import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        sys.exit("error: atheris is not installed; pip install -e '.[fuzz]'")
    with atheris.instrument_imports(
        include=["skippy.protocol", "skippy.models", "skippy.config", "skippy.frontend"]
    ):
        from .targets import TARGETS
    codes = []
    for name in names:
        print(f"{name}: coverage-guided, {seconds} s", file=sys.stderr, flush=True)
        if (child := os.fork()) == 0:
            seeds = ",".join(map(str, sorted((CORPUS / name).iterdir())))
            corpus = [f"-seed_inputs={seeds}"] if new is None else [str(new), str(CORPUS / name)]
            # libFuzzer looks at the peak, and a process inherits that of the process that started it.
            limit = f"-rss_limit_mb={int(_peak_mib()) + 1024}"
            atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", limit, *corpus], TARGETS[name])
            atheris.Fuzz()
            os._exit(1)  # Fuzz does not return.
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return not any(codes)


def replay(name: str, paths: Sequence[Path]) -> None:
    """Feed kept inputs once; a finding's traceback comes out as it is."""
    from .targets import TARGETS

    for path in paths:
        TARGETS[name](path.read_bytes())
        print(f"{name}: {path}: fine")


def main() -> int:
    names = sorted(path.name for path in CORPUS.iterdir())
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", choices=[*names, "all"])
    parser.add_argument("inputs", nargs="*", type=Path, help="feed these files once instead of mutating")
    parser.add_argument("--runs", type=int, default=10_000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="coverage-guided, with atheris")
    parser.add_argument("--seconds", type=int, default=60, help="with --atheris: how long for each target")
    parser.add_argument("--new", type=Path, help="with --atheris: a folder for inputs that reach new code")
    arguments = parser.parse_args()
    if arguments.target == "all" and (arguments.new or arguments.inputs):
        parser.error("name one target")
    if arguments.inputs:
        replay(arguments.target, arguments.inputs)
        return 0
    chosen = names if arguments.target == "all" else [arguments.target]
    if arguments.atheris:
        return 0 if run_atheris(chosen, arguments.seconds, arguments.new) else 1
    results = [run(name, arguments.runs, arguments.seed) for name in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

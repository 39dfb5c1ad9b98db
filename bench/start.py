"""From the command to a chain that serves: ``python -m bench.start --against FOLDER``.

FOLDER is another checkout of this project, ``git worktree add FOLDER COMMIT``; both run with this Python, in
turn, and nobody else should be using the machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .common import BenchError, in_turn, ratios

STAGES = 3


def start(folder: Path) -> float:
    """Seconds until ``skippy run`` of that checkout prints the line to try."""
    command = [sys.executable, "-m", "skippy.cli", "run", "--stages", str(STAGES), "--bind", "127.0.0.1:0"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        served = any("curl" in line for line in process.stdout)
        took = time.monotonic() - began
        process.send_signal(signal.SIGINT)
    if not served:
        raise BenchError(f"skippy run in {folder} ended before it served")
    return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True, metavar="FOLDER", help="another checkout")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="pairs (default: 7)")
    asked = parser.parse_args()
    folders = {"here": Path.cwd(), "there": asked.against.resolve()}
    times: dict[str, list[float]] = {name: [] for name in folders}
    try:
        for folder in folders.values():  # slices are cut, and bytecode is written
            start(folder)
        for number in range(asked.rounds):
            for name in in_turn(list(folders), number):
                times[name].append(start(folders[name]))
            here, there = (times[name][-1] for name in folders)
            print(f"round {number + 1}: {here:.2f} s here, {there:.2f} s there", flush=True)
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"here / there: {ratios(times['here'], times['there']).show()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m fuzz.mutants``: what mutmut's run in ``mutants/`` came to, by module."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Final

FOLDER: Final = Path("mutants/skippy/protocol")
_SURVIVED: Final = 0
_FAILED: Final = (1, 3)  # a test failed, or pytest itself
_NO_TEST: Final = (5, 33)
_INTERRUPTED: Final = 2  # the run was stopped while the tests ran


def outcome(code: int | None) -> str:
    """What an exit code of mutmut's worker means; whatever ended it otherwise was a limit on its time."""
    if code is None or code == _INTERRUPTED:
        return "open"
    if code == _SURVIVED:
        return "survived"
    if code in _NO_TEST:
        return "untested"
    return "killed" if code in _FAILED else "timeout"


def main() -> int:
    total: Counter[str] = Counter()
    print("| module | mutants | judged | killed | of them by time | survived |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for path in sorted(FOLDER.glob("*.meta")):
        codes = json.loads(path.read_bytes())["exit_code_by_key"].values()
        counts = Counter(outcome(code) for code in codes)
        total += counts
        if counts:
            print(_row(path.name.removesuffix(".py.meta"), counts))
    print(_row("all", total))
    killed, judged = total["killed"] + total["timeout"], total.total() - total["open"]
    if judged:
        print(f"\n{killed} of {judged} killed: {100 * killed / judged:.1f} %; {total['open']} not judged")
    return 0 if judged else 1


def _row(name: str, counts: Counter[str]) -> str:
    killed, survived = counts["killed"] + counts["timeout"], counts["survived"] + counts["untested"]
    cells = (counts.total(), counts.total() - counts["open"], killed, counts["timeout"], survived)
    return f"| {name} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())

"""``python -m fuzz.judge``: judge mutmut's mutants, each in a fork of a process that has collected the tests.

mutmut itself starts pytest anew for each mutant, which takes several times as long as the tests that kill it.
Everything else is mutmut's: the mutants, which tests reach which function, the results in ``mutants/``.

What was judged is kept. The order is by chance, the same with the same seed, so that what a stopped run has
judged is a fair sample.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
from _pytest.runner import runtestprotocol
from mutmut.configuration import config
from mutmut.mutation import trampoline
from mutmut.utils.format_utils import mangled_name_from_mutant_name

from .mutants import FOLDER, outcome

_CPU_SECONDS: Final = 5.0  # for one test, besides twice what it took when mutmut watched it
_INTERRUPTED: Final = 2  # this and the next are pytest's own, the third is mutmut's
_BROKEN: Final = 3
_UNTESTED: Final = 33


class Results:
    """Exit codes of the mutants of one module, as mutmut keeps them."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._document = json.loads(path.read_bytes())
        self.codes: dict[str, int | None] = self._document["exit_code_by_key"]

    def save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._document, indent=4))
        new.replace(self._path)


class Judge:
    """A pytest plugin: runs the collected tests once for each mutant, in ``workers`` processes at a time."""

    def __init__(self, results: Sequence[Results], names: Sequence[str], workers: int) -> None:
        self._owner = {name: module for module in results for name in module.codes}
        self._names = names
        self._workers = workers
        self._running: dict[int, tuple[str, int]] = {}
        self._killers: dict[str, list[str]] = {}
        stats = json.loads(Path("mutmut-stats.json").read_bytes())
        self._tests: dict[str, list[str]] = stats["tests_by_mangled_function_name"]
        self._durations: dict[str, float] = stats["duration_by_test"]
        self._items: dict[str, pytest.Item] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        everything = list(self._items)
        for name, code, fault in (("", 0, "fail without"), ("fail", 1, "pass with")):
            pid, _ = self._start(name, everything)
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) != code:
                raise pytest.UsageError(f"the tests {fault} a mutation")
        gc.freeze()
        for name in self._names:
            function = mangled_name_from_mutant_name(name)
            tests = self._tests.get(function, [])
            if not tests:
                self._record(name, _UNTESTED)
                continue
            if len(self._running) == self._workers:
                self._reap()
            pid, killer = self._start(name, self._in_order(function, tests))
            self._running[pid] = name, killer
        while self._running:
            self._reap()
        return True

    def _in_order(self, function: str, tests: Sequence[str]) -> list[str]:
        """First what killed other mutants of the function, the latest first, then the quick ones."""
        rest = sorted(tests, key=lambda test: self._durations.get(test, 0.0))
        order = dict.fromkeys([*reversed(self._killers.get(function, [])), *rest])
        return [test for test in order if test in self._items]

    def _start(self, name: str, tests: Sequence[str]) -> tuple[int, int]:
        """Fork; the child ends with 0 when all tests pass, and with 1 at the first that fails.

        Returns its process id and a pipe on which it says which one that was.
        """
        read, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            return pid, read
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        trampoline.set_mutant_under_test(name)
        # Looked up in the environment at each call of a mutated function, it takes half the time of a test.
        trampoline.get_mutant_under_test = lambda: name
        try:
            code = 0
            for test in tests:
                # The processor's time, so that a busy machine changes nothing. The signal ends the process.
                signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS + 2 * self._durations.get(test, 0.0))
                if not _passes(self._items[test]):
                    os.write(write, test.encode())
                    code = 1
                    break
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except BaseException:
            code = _BROKEN
        os._exit(code)

    def _reap(self) -> None:
        pid, status = os.wait()
        name, pipe = self._running.pop(pid)
        with open(pipe) as file:
            killer = file.read()
        if killer:
            self._killers.setdefault(mangled_name_from_mutant_name(name), []).append(killer)
        self._record(name, os.waitstatus_to_exitcode(status))

    def _record(self, name: str, code: int) -> None:
        module = self._owner[name]
        module.codes[name] = code
        module.save()


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.judge", description=__doc__)
    parser.add_argument("names", nargs="*", help="judge these again, e.g. 'skippy.protocol.rules.*'")
    parser.add_argument("--survivors", action="store_true", help="judge again what was not killed by a test")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    results = [Results(path) for path in sorted(FOLDER.glob("*.meta"))]
    known = [pair for module in results for pair in module.codes.items()]
    random.Random(arguments.seed).shuffle(known)
    names = [
        name
        for name, code in known
        if outcome(code) == "open"
        or (arguments.survivors and outcome(code) != "killed")
        or any(fnmatch(name, pattern) for pattern in arguments.names)
    ]
    args = ["--rootdir=.", "--tb=no", "-s", *config().pytest_add_cli_args]
    args += config().pytest_add_cli_args_test_selection
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir("mutants")
    sys.path.insert(0, os.getcwd())
    return int(pytest.main(args, plugins=[Judge(results, names, arguments.workers)]))


if __name__ == "__main__":
    sys.exit(main())

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
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
from _pytest.runner import runtestprotocol
from mutmut.configuration import config
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.utils.format_utils import mangled_name_from_mutant_name

from .mutants import FOLDER, outcome

_CPU_SECONDS: Final = 60  # for the tests of one mutant; the clean ones take less than 20 in all
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
        self._running: dict[int, str] = {}
        stats = json.loads(Path("mutmut-stats.json").read_bytes())
        self._tests: dict[str, list[str]] = stats["tests_by_mangled_function_name"]
        self._durations: dict[str, float] = stats["duration_by_test"]
        self._items: dict[str, pytest.Item] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        everything = list(self._items)
        for name, code, fault in (("", 0, "fail without"), ("fail", 1, "pass with")):
            _, status = os.waitpid(self._start(name, everything), 0)
            if os.waitstatus_to_exitcode(status) != code:
                raise pytest.UsageError(f"the tests {fault} a mutation")
        gc.freeze()
        for name in self._names:
            tests = self._tests.get(mangled_name_from_mutant_name(name), [])
            if not tests:
                self._record(name, _UNTESTED)
                continue
            if len(self._running) == self._workers:
                self._reap()
            self._running[self._start(name, tests)] = name
        while self._running:
            self._reap()
        return True

    def _start(self, name: str, tests: Sequence[str]) -> int:
        """Fork; the child ends with 0 when all tests pass, 1 at the first that fails."""
        pid = os.fork()
        if pid:
            return pid
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _CPU_SECONDS, spent + _CPU_SECONDS + 1))
        set_mutant_under_test(name)
        try:
            code = 0 if all(map(_passes, self._in_order(tests))) else 1
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except BaseException:
            code = _BROKEN
        os._exit(code)

    def _in_order(self, tests: Sequence[str]) -> Iterator[pytest.Item]:
        """Quick ones first."""
        known = [test for test in tests if test in self._items]
        return (self._items[test] for test in sorted(known, key=lambda test: self._durations.get(test, 0.0)))

    def _reap(self) -> None:
        pid, status = os.wait()
        self._record(self._running.pop(pid), os.waitstatus_to_exitcode(status))

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

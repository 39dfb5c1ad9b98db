"""Faults planted into our own code: each can be planted, and the simulation finds them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuzz.sim_mutants import MUTANTS, ROOT, SURVIVED, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_a_change_of_what_is_there(mutant: Mutant) -> None:
    source = (ROOT / mutant.path).read_text("utf-8")
    changed = mutant.apply(source)
    assert changed != source
    compile(changed, mutant.path, "exec")
    with pytest.raises(ValueError, match=mutant.name):
        mutant.apply("")


def test_names_are_not_given_twice() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 10


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuzz.sim_mutants", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", ["keep-sequence", "deliver-twice", "ignore-epoch"])
def test_a_mutant_is_found(name: str) -> None:
    done = run(name, "--seeds", "40", "--size", "large")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"| `{name}` | ")


def test_a_mutant_that_is_not_found_says_so() -> None:
    done = run("skip-stop-ack", "--seeds", "0")
    assert (done.returncode, done.stdout.split(" | ")[2]) == (SURVIVED, "more than 0")
    assert run("no-such-mutant").returncode == 2

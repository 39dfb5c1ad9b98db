"""Faults planted into our own code, and how many seeds of the simulation it takes to find each.

``python -m fuzz.sim_mutants`` tries all of them, ``python -m fuzz.sim_mutants NAME`` one; ``--seeds`` says
how many seeds each is given, ``--size`` how large their storms are. A mutant that survives means that the
simulation does not look at something.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

import attrs

ROOT: Final = Path(__file__).parent.parent
SEEDS: Final = 1000
SURVIVED: Final = 3
"""Exit status of a mutant that no seed has found."""


@attrs.frozen(slots=True)
class Mutant:
    """A change of one module.

    Attributes:
        what: what it does wrong, in words.
        path: of the module.
        old: text that is there once.
        new: what is there instead.
    """

    name: str
    what: str
    path: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")

    def apply(self, source: str) -> str:
        """Raises ValueError where the text is not there, or more than once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.old)} times {self.old!r}")
        return source.replace(self.old, self.new)


MUTANTS: Final = (
    Mutant(
        "keep-sequence",
        "a session that ends does not give its sequence back",
        "skippy/stage/scheduler.py",
        "        self._free.add(sequence)\n        self._waiting.unpark()\n",
        "        self._waiting.unpark()\n",
    ),
    Mutant(
        "keep-rows",
        "a sequence that is given back keeps its rows",
        "skippy/stage/scheduler.py",
        "            self._engine.drop(sequence)\n",
        "            pass\n",
    ),
    Mutant(
        "keep-positions",
        "the cache positions of a request whose lane was cleaned stay reserved",
        "skippy/frontend/admission.py",
        "            self._free_tokens += self._reserved.pop(lane, 0)\n",
        "            self._reserved.pop(lane, 0)\n",
    ),
    Mutant(
        "free-positions-twice",
        "the cache positions of a request are given back as its lane is, and once more when that is idle",
        "skippy/frontend/admission.py",
        "        if lane.ended:\n            self._free_tokens += self._reserved.pop(lane)\n",
        "        self._free_tokens += self._reserved[lane]\n",
    ),
    Mutant(
        "skip-drain",
        "a lane is stopped before what it owes has come",
        "skippy/frontend/lanes.py",
        "                await lane.wait_settled()\n",
        "",
    ),
    Mutant(
        "skip-stop-ack",
        "a lane is leased again before its Stop is acknowledged",
        "skippy/frontend/lanes.py",
        "                await place.wait()\n",
        "",
    ),
    Mutant(
        "ignore-epoch",
        "a frame of a generation that was left behind is executed",
        "skippy/protocol/session.py",
        "            return message.kind in EPOCH_KINDS and epoch.same_flow(RequestEpoch.of(message))\n",
        "            return False\n",
    ),
    Mutant(
        "forget-unpark",
        "who waits for a native sequence is not woken",
        "skippy/stage/scheduler.py",
        "        self._free.add(sequence)\n        self._waiting.unpark()\n",
        "        self._free.add(sequence)\n",
    ),
    Mutant(
        "forget-writer",
        "the writer of a link is not woken for what was put",
        "skippy/stage/queues.py",
        "        self._items.append(item)\n        self._filled.unpark()\n",
        "        self._items.append(item)\n",
    ),
    Mutant(
        "lose-ack",
        "an acknowledgement does not give its credit back",
        "skippy/stage/downstream.py",
        "            if credit:\n                self._window.ack()\n",
        "",
    ),
    Mutant(
        "deliver-twice",
        "each fifth token is handed to the reader twice",
        "skippy/frontend/decoding.py",
        "        self._tokens.append((token, logprobs))\n",
        "        self._tokens.extend([(token, logprobs)] * (1 + (self._predicted == 4)))\n",
    ),
    Mutant(
        "no-rewind",
        "the rows that a rewind drops stay in the sampler's history",
        "skippy/stage/session.py",
        "        native.cut(length)\n",
        "",
    ),
    Mutant(
        "no-trim",
        "a rewind does not cut the native sequence",
        "skippy/stage/session.py",
        "        engine.trim(self.sequence, length)\n",
        "",
    ),
    Mutant(
        "keep-memory",
        "the memory of frames is not given back",
        "skippy/stage/memory.py",
        "        self.budget.give_back(size)\n",
        "",
    ),
    Mutant(
        "keep-waiting-stream",
        "a lane that ends goes on waiting for its return stream",
        "skippy/stage/predictions.py",
        "        self._hub.forget(self)\n",
        "",
    ),
    Mutant(
        "fail-nobody",
        "the replies that a lane owes do not fail as it ends",
        "skippy/stage/predictions.py",
        "            place.fail(failure)\n",
        "            pass\n",
    ),
    Mutant(
        "keep-right-to-send",
        "the right to send a decode frame past the writer is never given back",
        "skippy/stage/express.py",
        "        if not self._lent:\n            self._reservation.release()\n",
        "",
    ),
    Mutant(
        "forget-handshake-deadline",
        "a dialled stage that says nothing is waited for without end",
        "skippy/stage/dialing.py",
        "    with trio.move_on_after(timeout_secs) as deadline:\n",
        "    with trio.CancelScope() as deadline:\n",
    ),
    Mutant(
        "replay-one-short",
        "a replay leaves the first generated token out",
        "skippy/frontend/prefill.py",
        "feed.replay(len(prompt), generated, ",
        "feed.replay(len(prompt), generated[1:] or generated, ",
    ),
    Mutant(
        "keep-lost-session",
        "a lane that ends keeps its session",
        "skippy/stage/steps.py",
        "        self._session.close()\n        self._session = None\n",
        "        self._session = None\n",
    ),
    Mutant(
        "lose-frame",
        "the frame that ends the engine's own receiving is lost",
        "skippy/stage/relay.py",
        "            self._frame = frame\n            return False\n",
        "            return False\n",
    ),
    Mutant(
        "receive-into-row",
        "a frame is received into the row of the step before it, which may still wait for its wave",
        "skippy/stage/repeat.py",
        "        self._next, self._begun = self._begun, self._next\n",
        "",
    ),
    Mutant(
        "keep-rewound",
        "what is remembered is not cut where its session goes back and takes another way",
        "skippy/stage/holding.py",
        "            index.truncate(entry, position)\n",
        "            pass\n",
    ),
    Mutant(
        "forget-restored",
        "penalties do not know the tokens that were restored",
        "skippy/stage/remembering.py",
        "        self._recall(self.holding.restored, length)\n",
        "",
    ),
    Mutant(
        "keep-tail",
        "a sequence that was restored is not cut to what the session uses of it",
        "skippy/stage/holding.py",
        "        return restored is not None\n",
        "        return False\n",
    ),
    Mutant(
        "keep-restored",
        "a prefix that was restored, and is given up before a row has run, stays in use",
        "skippy/stage/remembering.py",
        "        self.holding.undo()\n",
        "",
    ),
    Mutant(
        "leave-place",
        "who gives back what was restored gives its place on the stage up, too",
        "skippy/stage/remembering.py",
        "            self._spare = self._scheduler.take_sequence()\n",
        "            pass\n",
    ),
    Mutant(
        "settle-alone",
        "a stage goes by the length that it has itself, not by what the chain has settled on",
        "skippy/stage/restoring.py",
        "            length, below = await self._ask_below(message, length, kind)\n",
        "            _, below = await self._ask_below(message, length, kind)\n",
    ),
    Mutant(
        "tell-length",
        "a peer that asks for all of a prefix or nothing is told a length",
        "skippy/stage/restoring.py",
        "ReplyKind.ACK, 0 if self.whole else length, ",
        "ReplyKind.ACK, length, ",
    ),
    Mutant(
        "keep-missed-row",
        "a stage in between keeps the row that it ran behind a prefix which a later stage lacks",
        "skippy/stage/fusing.py",
        "        if event in _AFTER_A_MISS and not behind_a_hit and self._session is not None:\n",
        "        if not event and self._session is not None:\n",
    ),
    Mutant(
        "forget-miss",
        "stage 0 keeps the row that it ran behind a prefix which a later stage lacks",
        "skippy/stage/fusing.py",
        "                self._session.roll_back()\n        return reply\n",
        "                pass\n        return reply\n",
    ),
    Mutant(
        "forget-peer-timeout",
        "a neighbour that has fallen silent is not given up",
        "skippy/stage/liveness.py",
        "        if self._agreed and silent >= timeout_secs:\n",
        "        if self._agreed and silent >= 100 * timeout_secs:\n",
    ),
    Mutant(
        "forget-heartbeats",
        "an idle neighbour hears nothing of this stage",
        "skippy/stage/liveness.py",
        "            self._speak(now, ours)\n",
        "            pass\n",
    ),
    Mutant(
        "seed-by-row",
        "every draw of a seeded request uses the seed of the first",
        "skippy/stage/history.py",
        "        token = self.sampler.sample(logits, step, allowed)\n",
        "        token = self.sampler.sample(logits, 0, allowed)\n",
    ),
)


class _Planted(importlib.machinery.SourceFileLoader):
    """Loads the mutant of a module, past all that was compiled before."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(ROOT / mutant.path))
        self._mutant = mutant

    def path_stats(self, path: object) -> dict[str, object]:
        raise OSError("not to be cached")

    def get_data(self, path: object) -> bytes:
        return self._mutant.apply(super().get_data(str(path)).decode()).encode()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_loader(name, _Planted(self._mutant))


def plant(mutant: Mutant) -> None:
    """From here on this process has the mutant. Only before its module is imported."""
    assert mutant.module not in sys.modules, f"{mutant.module} is imported already"
    sys.meta_path.insert(0, _Finder(mutant))


def find(mutant: Mutant, seeds: int, size: str | None) -> int:
    """Plant a mutant, and try seeds until one finds it; the exit status."""
    plant(mutant)
    from skippy.sim.batch import Settings, run_seed

    for seed in range(seeds):
        result = run_seed(Settings(size=size), seed)
        if result.violation is not None:
            print(
                f"| `{mutant.name}` | {mutant.what} | {seed + 1} | {_first(result.violation)} |", flush=True
            )
            return 0
    print(f"| `{mutant.name}` | {mutant.what} | more than {seeds} | |", flush=True)
    return SURVIVED


def _first(text: str) -> str:
    return text.split("; ")[0].replace("|", "/")[:100]


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz.sim_mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--size", choices=["small", "large"], help="of the storms; default: the seed says")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    names = arguments.names or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no mutant is called {', '.join(unknown)}; there are {', '.join(known)}")
    if len(names) == 1:
        sys.exit(find(known[names[0]], arguments.seeds, arguments.size))
    command = [sys.executable, "-m", "fuzz.sim_mutants", "--seeds", str(arguments.seeds)]
    if arguments.size is not None:
        command += ["--size", arguments.size]
    codes = [subprocess.run([*command, name], check=False).returncode for name in names]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

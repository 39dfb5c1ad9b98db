"""Before a model is cut that nobody has cut before: a small one like it is, and compared with itself unsplit.

An error of slicing is silent: the chain answers, and wrongly. It shows on a small random model with the same
metadata (:mod:`skippy.models.mirror`) as a difference of any bit. Models whose shape has a record
(:mod:`skippy.models.records`) are not compared again, and no model is compared twice: what came of it is kept
below the cache folder, under a digest of all that decides it::

    prechecks/<digest>.json
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from skippy.engine.apart import ChildFailed, run_apart
from skippy.engine.certify import CutResult, compare_logits
from skippy.engine.options import usable_cores
from skippy.models import (
    RULES_VERSION,
    GGUFHeader,
    ModelError,
    Progress,
    default_cache_dir,
    family_of,
    plan_slice,
    write_slice,
)
from skippy.models.info import is_slice, layer_count
from skippy.models.mirror import MirrorError, tiny_like
from skippy.models.records import engine_version, own_records
from skippy.models.store import kept, replacing, unfinished
from skippy.models.tiny import TinyModel

TIMEOUT_SECS: Final = 300.0
"""For each of the two runs; they take a second or two."""
STEPS: Final = 2
_VERSION: Final = 1

Ranges = Sequence[tuple[int, int]]


class PrecheckError(ModelError):
    """A small model like this one is not the same when it is cut, or could not be compared."""

    def __init__(self, model: Path, cuts: Sequence[int], found: str) -> None:
        where = " and ".join(map(str, cuts))
        super().__init__(
            f"{model}: not cut at layer{'s' if len(cuts) > 1 else ''} {where}: {found}. "
            "--no-precheck (option `precheck`) goes on without this comparison"
        )


def precheck(
    header: GGUFHeader,
    ranges: Ranges,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    timeout: float = TIMEOUT_SECS,
) -> None:
    """Make sure that cutting a model there is exact, as far as a small one like it can tell.

    Returns at once for a model with a record, for one that was compared before, and for no cut at all. Blocks
    for some seconds otherwise, or while another process compares the same; safe from any thread.

    Args:
        header: of the whole model; a slice's says nothing and is let pass.
        ranges: layers of all stages, in order, as far as they are known: what is between them is one stage.
        progress: told ``"compare"``, 0 of 0, a few times each second; an exception of it ends the work.
        timeout: seconds for each run of the small model.

    Raises:
        PrecheckError: it is not exact, could not be run, or there is no small model like this one.
        UnsupportedArchitectureError: it cannot be cut there.
        ModelError: a file cannot be read or written.
    """
    if is_slice(header):
        return
    chain = whole_chain(ranges, layer_count(header))
    if len(chain) < 2:
        return
    for part in chain:
        plan_slice(header, *part)
    if own_records().cover(header):
        return
    _Trial.of(header, chain, Path(cache_dir or default_cache_dir()), progress, timeout).run()


def whole_chain(ranges: Ranges, layers: int) -> list[tuple[int, int]]:
    """All layers of a model, cut where one of the ranges begins or ends."""
    cuts = sorted({0, layers, *(cut for part in ranges for cut in part if 0 < cut < layers)})
    return list(itertools.pairwise(cuts))


@attrs.frozen(slots=True, eq=False)
class _Trial:
    """One way to cut one model.

    Attributes:
        path: the model's.
        chain: layers of the slices.
        models: small ones like it, the closest first.
        folder: of the cache.
        memo: where the outcome is kept.
    """

    path: Path
    chain: Ranges
    models: Sequence[TinyModel]
    folder: Path
    memo: Path
    progress: Progress | None
    timeout: float

    @classmethod
    def of(
        cls, header: GGUFHeader, chain: Ranges, folder: Path, progress: Progress | None, timeout: float
    ) -> _Trial:
        cuts = [start for start, _ in chain[1:]]
        try:
            models = [tiny_like(header, closely=False)]
            with contextlib.suppress(MirrorError):
                models.insert(0, tiny_like(header))
        except MirrorError as error:
            raise PrecheckError(
                header.path, cuts, f"it cannot be tried out on a small one: {error}"
            ) from error
        rules = [_VERSION, RULES_VERSION, engine_version(), family_of(header).text, STEPS]
        described = json.dumps([rules, [model.describe() for model in models]])
        digest = hashlib.sha256(described.encode()).hexdigest()
        memo = folder / "prechecks" / f"{digest}.json"
        return cls(header.path, chain, models, folder, memo, progress, timeout)

    @property
    def _cuts(self) -> list[int]:
        return [start for start, _ in self.chain[1:]]

    def run(self) -> None:
        """Raises PrecheckError, also for what was found before."""
        kept(self.memo, self._known, self._find_out, 0, self.progress)

    def _find_out(self) -> bool | None:
        result, known = self._compare(), _read(self.memo)
        if result.exact:
            known["exact"] = sorted({*known["exact"], *self.chain})
        else:
            known["wrong"][_name(self._cuts)] = (
                "a small random model like it, cut in the same places, gives other logits than unsplit, by "
                f"up to {result.difference:.3g}; {result.agreed} of {result.tokens} tokens agree"
            )
        text = json.dumps(known)
        with replacing(self.memo, len(text)) as temporary:
            temporary.write_text(text)
        return self._known()

    def _known(self) -> bool | None:
        known = _read(self.memo)
        wrong = known["wrong"].get(_name(self._cuts))
        if wrong is not None:
            raise PrecheckError(self.path, self._cuts, wrong)
        return True if set(known["exact"]).issuperset(self.chain) else None

    def _compare(self) -> CutResult:
        """On the first of the models that runs unsplit."""
        words = ""
        for model in self.models:
            with unfinished(self.folder, "precheck-", folder=True, mode=0o700) as folder:
                whole = model.write(folder / "model.gguf")
                expected, found = folder / "expected.npy", folder / "found.npy"
                try:
                    self._run([whole], expected, None)
                    if not np.isfinite(np.load(expected)).all():
                        raise ChildFailed("it gives what is not a number")
                except ChildFailed as error:
                    words = words or str(error)
                    continue
                try:
                    self._run(self._slices(whole, folder), found, expected)
                except (ChildFailed, ModelError) as error:
                    raise PrecheckError(
                        self.path, self._cuts, f"a small random model like it does not run when cut: {error}"
                    ) from error
                return compare_logits(tuple(self._cuts), np.load(found), np.load(expected))
        raise PrecheckError(
            self.path,
            self._cuts,
            f"it cannot be tried out, a small random model like it does not run: {words}",
        )

    def _slices(self, whole: Path, folder: Path) -> list[Path]:
        header = GGUFHeader.read(whole)
        return [
            write_slice(header, folder / f"{start}-{end}.gguf", start, end, source_sha256="0" * 64).path
            for start, end in self.chain
        ]

    def _run(self, files: Sequence[Path], out: Path, expected: Path | None) -> None:
        run_apart(
            files,
            out,
            expected,
            steps=STEPS,
            threads=min(4, usable_cores()),
            timeout=self.timeout,
            waiting=self._report,
        )

    def _report(self) -> None:
        if self.progress is not None:
            self.progress("compare", 0, 0)


def _name(cuts: Sequence[int]) -> str:
    return "+".join(map(str, cuts))


def _read(memo: Path) -> dict[str, Any]:
    """What is known; nothing where the file is missing or damaged."""
    try:
        known = json.loads(memo.read_bytes())
        exact = [(int(start), int(end)) for start, end in known["exact"]]
        return {"exact": exact, "wrong": {str(cuts): str(text) for cuts, text in known["wrong"].items()}}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {"exact": [], "wrong": {}}

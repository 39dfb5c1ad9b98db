"""``skippy certify``: is a model that is cut the same as the unsplit one?"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import attrs
import click
import numpy as np

from skippy import __version__
from skippy.config.quantization import PRESERVE
from skippy.engine import usable_cores
from skippy.engine.apart import ChildFailed, run_apart
from skippy.engine.certify import MOST_STEPS, CutResult, compare_logits
from skippy.engine.recipe import checkpoint_recipe
from skippy.models import (
    RULES_VERSION,
    GGUFHeader,
    Recipe,
    SliceInfo,
    UnsupportedArchitectureError,
    default_cache_dir,
    ensure_slice,
    header_path,
    plan_slice,
    printable,
    read_model,
    weights_sha256,
)
from skippy.models.store import unfinished

from .checkpoint_flags import checkpoint_options
from .ending import ending_in_order
from .errors import FAILURE, CliError, SettingError
from .model_flags import verify_option
from .models import MODEL
from .progress import SliceProgress

RECORD_VERSION: Final = 1
MOST_CUTS: Final = 64  # to name; of `all` there are as many as the model has layers


@click.command("certify")
@MODEL
@click.option(
    "--cuts",
    default="all",
    show_default=True,
    metavar="all|N,M,…",
    help="The layers at which to cut the model in two, one after the other; N+M cuts it in three.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_STEPS),
    default=3,
    show_default=True,
    help="Tokens to generate after each prompt.",
)
@click.option("--threads", type=click.IntRange(1, 512), help="Threads to compute with; default: all cores.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86400),
    default=600,
    show_default=True,
    metavar="SECS",
    help="How long loading and running may take, for each way to cut the model.",
)
@click.option(
    "--json",
    "record",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write a record of what was found.",
)
@verify_option
@checkpoint_options
def certify(
    model: Path,
    cuts: str,
    steps: int,
    threads: int | None,
    timeout: float,
    record: Path | None,
    verify_package: bool,
    checkpoint_quantization: str | None,
    checkpoint_imatrix: Path | None,
) -> int:
    """Run a model unsplit and cut, and say whether every bit of the logits is the same.

    Exit code 1: somewhere it may be cut, and is not the same.
    """
    if record is not None:
        _check_record(record)
    recipe = checkpoint_recipe(checkpoint_quantization, checkpoint_imatrix)
    with ending_in_order(), _scratch() as folder:
        header = read_model(header_path(model, cache_dir=folder, recipe=recipe))
        layers = _layers_of_whole(model, header)
        wanted = parse_cuts(cuts, layers)
        cores = threads or usable_cores()
        trial = Trial(model, header, folder, recipe, verify_package, layers, steps, cores, timeout)
        click.echo(
            f"{'model':<16}{model}\n{'architecture':<16}{printable(trial.architecture)}, {layers} layers"
        )
        results: list[CutResult] = []
        for number, places in enumerate(wanted, start=1):
            result = trial.cut(places, f"{_places(places)} ({number} of {len(wanted)})")
            likewise = bool(results and result.refused and result.refused == results[-1].refused)
            results.append(result)
            click.echo(f"{_places(places):<16}{'refused, likewise' if likewise else _outcome(result)}")
    click.echo(_summary(results))
    if record is not None:
        quantization = checkpoint_quantization or PRESERVE if trial.is_converted else None
        record.write_text(json.dumps(_record(trial, quantization, results), indent=1) + "\n")
    return FAILURE if any(result.verdict in ("differs", "failed") for result in results) else 0


def _check_record(record: Path) -> None:
    """What can be known of a file that is written after an hour of comparing."""
    folder = record.absolute().parent
    if not folder.is_dir():
        raise SettingError(f"--json: there is no folder {record.parent}")
    if not record.exists() and not os.access(folder, os.W_OK):
        raise SettingError(f"--json: the folder {record.parent} cannot be written to")


def parse_cuts(text: str, layers: int) -> list[tuple[int, ...]]:
    """``all``, or places ``N`` and ``N+M`` with commas between; each gives the layers at which slices begin.

    Raises:
        SettingError: not that, or not inside the model.
    """
    if text == "all":
        return [(cut,) for cut in range(1, layers)]
    items = text.split(",", MOST_CUTS)
    if len(items) > MOST_CUTS:
        raise SettingError(f"--cuts: at most {MOST_CUTS}, or all")
    wanted: list[tuple[int, ...]] = []
    for item in items:
        numbers = [part.strip() for part in item.split("+", layers)]
        if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers):
            raise SettingError(f"--cuts: {item.strip()[:40]!r} is no layer; give all, N,M or N+M")
        cuts = tuple(map(int, numbers))
        if not all(a < b for a, b in itertools.pairwise((0, *cuts, layers))):
            raise SettingError(
                f"--cuts: {item.strip()[:40]!r} does not fit a model with {layers} layers: "
                f"cuts are 1 to {layers - 1}, ascending"
            )
        wanted.append(cuts)
    return wanted


def _layers_of_whole(model: Path, header: GGUFHeader) -> int:
    info = SliceInfo.from_header(header)
    if not info.is_whole or info.source_sha256 is not None:
        raise CliError(f"{model}: is a slice, and only a whole model can be cut")
    if info.layer_count < 2:
        raise CliError(f"{model}: has a single layer, so it cannot be cut")
    return info.layer_count


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder where slices have room; the cache would keep what nobody wants twice."""
    cache = default_cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    with unfinished(cache, "certify-", folder=True, mode=0o700) as folder:
        yield folder


@attrs.define(slots=True, eq=False)
class Trial:
    """One model, run unsplit once and then cut in ways.

    Attributes:
        model, header: the whole model.
        folder: of slices, each kept only as long as it is run.
        recipe: what a checkpoint becomes.
        verify: check the SHA-256 of a package's parts.
        layers: of the model.
        steps: tokens after each prompt.
        threads: to compute with.
        timeout: seconds for one run.
        source_sha256: what slices say they are cut from; None before anything was run.
    """

    model: Path
    header: GGUFHeader
    folder: Path
    recipe: Recipe | None
    verify: bool
    layers: int
    steps: int
    threads: int
    timeout: float
    source_sha256: str | None = None

    @property
    def architecture(self) -> str:
        return self.header.text("general.architecture")

    @property
    def is_converted(self) -> bool:
        """Whether the model is a checkpoint."""
        return self.header.path.is_relative_to(self.folder)

    def cut(self, cuts: tuple[int, ...], label: str) -> CutResult:
        """Cut it there.

        Raises:
            CliError: the unsplit model does not run.
            ModelError: a file cannot be read or written.
        """
        parts = list(itertools.pairwise((0, *cuts, self.layers)))
        try:
            for start, end in parts:
                plan_slice(self.header, start, end)
        except UnsupportedArchitectureError as error:
            return CutResult(cuts, None, refused=str(error))
        if not self._expected.exists():
            try:
                self._run([(0, self.layers)], "unsplit", self._expected, None)
            except ChildFailed as error:
                raise CliError(f"{self.model}: the unsplit model does not run: {error}") from error
        found = self.folder / "found.npy"
        try:
            self._run(parts, label, found, self._expected)
        except ChildFailed as error:
            return CutResult(cuts, None, failed=str(error))
        return compare_logits(cuts, np.load(found), np.load(self._expected))

    @property
    def _expected(self) -> Path:
        return self.folder / "expected.npy"

    def _run(self, parts: Sequence[tuple[int, int]], label: str, out: Path, expected: Path | None) -> None:
        with SliceProgress(label) as progress:
            try:
                infos = [
                    ensure_slice(
                        self.model,
                        *part,
                        cache_dir=self.folder,
                        progress=progress,
                        verify=self.verify,
                        recipe=self.recipe,
                    )
                    for part in parts
                ]
                if self.source_sha256 is None:
                    self.source_sha256 = weights_sha256(infos[0], cache_dir=self.folder, progress=progress)
                progress("run", 0, 0)
                run_apart(
                    [info.path for info in infos],
                    out,
                    expected,
                    steps=self.steps,
                    threads=self.threads,
                    timeout=self.timeout,
                )
            finally:
                for path in (self.folder / "slices").glob("*.gguf"):
                    path.unlink()


def _places(cuts: Sequence[int]) -> str:
    return ("layer " if len(cuts) == 1 else "layers ") + " + ".join(map(str, cuts))


def _outcome(result: CutResult) -> str:
    if result.difference is None:
        return f"{result.verdict}: {result.refused or result.failed}"
    tokens = f"{result.agreed} of {result.tokens} tokens agree"
    if result.exact:
        return f"exact, {tokens}"
    return f"differs, logits by up to {result.difference:.3g}, {tokens}"


def _summary(results: Sequence[CutResult]) -> str:
    count = dict.fromkeys(("exact", "differs", "failed", "refused"), 0)
    for result in results:
        count[result.verdict] += 1
    others = "".join(f", {number} {verdict}" for verdict, number in list(count.items())[1:] if number)
    return f"{count['exact']} of {len(results)} exact{others}"


def _record(trial: Trial, quantization: str | None, results: Sequence[CutResult]) -> dict[str, Any]:
    return {
        "record_version": RECORD_VERSION,
        "skippy": __version__,
        "llama_cpp_python": metadata.version("llama-cpp-python"),
        "machine": platform.machine(),
        "rules_version": RULES_VERSION,
        "model": str(trial.model),
        "source_sha256": trial.source_sha256,
        "checkpoint_quantization": quantization,
        "architecture": trial.architecture,
        "layers": trial.layers,
        "steps": trial.steps,
        "threads": trial.threads,
        "cuts": [_entry(result) for result in results],
    }


def _entry(result: CutResult) -> dict[str, Any]:
    """``largest_error`` is null where there is none, or where a logit is not a number."""
    known = result.difference is not None and np.isfinite(result.difference)
    return {
        "cuts": list(result.cuts),
        "verdict": result.verdict,
        "largest_error": result.difference if known else None,
        "tokens_agreed": result.agreed,
        "tokens": result.tokens,
        "reason": result.refused or result.failed or None,
    }

"""``skippy inspect`` and ``skippy slice``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from skippy.engine.precheck import precheck as check_cuts
from skippy.engine.recipe import checkpoint_recipe
from skippy.models import (
    ModelSummary,
    SliceInfo,
    ensure_slice,
    fetch,
    header_path,
    inspect_model,
    is_checkpoint,
    is_package,
    is_reference,
    printable,
    read_model,
    write_package,
    write_slice_of,
    wrong_model_id,
)
from skippy.topology import LayerRange

from .checkpoint_flags import checkpoint_options
from .ending import ending_in_order
from .errors import SettingError
from .model_flags import loading_options
from .progress import SliceProgress


class _LocalPath(click.Path):
    """A path; of a model on a hub, the one that `fetch` prints has to be given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_reference(value):
            self.fail(f"{value} is on a hub; `skippy fetch {value}` brings it here and prints its path")
        return super().convert(value, param, ctx)


MODEL = click.argument("model", type=_LocalPath(path_type=Path))


@click.command("inspect")
@MODEL
@checkpoint_options
def inspect(model: Path, checkpoint_quantization: str | None, checkpoint_imatrix: Path | None) -> None:
    """Show what a model is, or what a checkpoint becomes, and how it can be cut."""
    recipe = checkpoint_recipe(checkpoint_quantization, checkpoint_imatrix)
    summary = inspect_model(header_path(model, recipe=recipe))
    if is_checkpoint(model):
        # What it becomes is in the cache under its digest; what was asked about is the folder.
        shown = attrs.evolve(summary.slice, path=model)
        summary = attrs.evolve(summary, slice=shown, name=model.resolve().name)
    for name, value in describe(summary):
        click.echo(f"{name:<16}{value}")


def describe(summary: ModelSummary) -> list[tuple[str, Any]]:
    """Label and value of every line that ``inspect`` prints."""
    info = summary.slice
    files = f" in {summary.files} files" if summary.files > 1 else ""
    lines: list[tuple[str, Any]] = [("model", info.path), ("size", size_text(info.file_bytes) + files)]
    lines.append(("name", summary.name))
    lines.append(("architecture", printable(info.architecture)))
    lines.append(("layers", _layers(info)))
    lines.append(("hidden size", info.hidden_size))
    kind = "" if summary.tokenizer is None else f" tokens ({summary.tokenizer})"
    lines.append(("vocabulary", f"{info.vocab_size}{kind}"))
    template = "none" if summary.template is None else f"{summary.template} characters"
    lines.append(("chat template", template))
    lines.append(("context", info.context_length or "not said"))
    lines.append(("head", "tied to the token embedding" if info.tied else "has weights of its own"))
    lines.append(("parameters", f"{summary.parameters:,}"))
    lines.append(
        ("weights", ", ".join(f"{kind} {size_text(size)}" for kind, size in summary.quantisation.items()))
    )
    for layers, size in _runs(summary.bytes_per_layer):
        numbers = f"{layers.start}" if len(layers) == 1 else f"{layers.start} to {layers.stop - 1}"
        lines.append(("" if layers.start else "per layer", f"{size_text(size)} ({numbers})"))
    lines.append(("outside layers", size_text(summary.other_bytes)))
    lines.append(("can be split", _cuts_text(summary)))
    return lines


def _cuts_text(summary: ModelSummary) -> str:
    if summary.unsplittable is not None:
        return f"no: {summary.unsplittable}"
    if len(summary.cuts) == summary.slice.layer_count - 1:
        return "at every layer"
    return "at layers " + ", ".join(map(str, summary.cuts))


def _runs(sizes: tuple[int, ...]) -> list[tuple[range, int]]:
    """Layers of one size that follow each other."""
    runs: list[tuple[range, int]] = []
    for index, size in enumerate(sizes):
        if runs and runs[-1][1] == size:
            runs[-1] = (range(runs[-1][0].start, index + 1), size)
        else:
            runs.append((range(index, index + 1), size))
    return runs


def _layers(info: SliceInfo) -> str:
    if info.is_whole:
        return str(info.layer_count)
    return f"{info.layer_start}:{info.layer_end} of {info.layer_count} (a slice)"


@click.command("slice")
@MODEL
@click.option("--layers", required=True, metavar="START:END", help="The layers to cut out: START to END-1.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write here instead of into the slice cache.",
)
@loading_options
@checkpoint_options
def slice_(
    model: Path,
    layers: str,
    out: Path | None,
    verify_package: bool,
    precheck: bool,
    checkpoint_quantization: str | None,
    checkpoint_imatrix: Path | None,
) -> None:
    """Cut layers out of a model, or make them of a checkpoint, and print the path of the slice."""
    wanted = LayerRange.parse(layers)
    recipe = checkpoint_recipe(checkpoint_quantization, checkpoint_imatrix)
    with ending_in_order(), SliceProgress(f"layers {wanted}") as progress:
        if out is not None and is_package(model):
            raise SettingError("--out: not of a layer package, whose slices are kept in the slice cache")
        if precheck:
            header = read_model(header_path(model, progress=progress, recipe=recipe))
            check_cuts(header, [(wanted.start, wanted.end)], progress=progress)
        if out is None:
            info = ensure_slice(
                model, wanted.start, wanted.end, progress=progress, verify=verify_package, recipe=recipe
            )
        else:
            info = write_slice_of(model, out, wanted.start, wanted.end, progress=progress, recipe=recipe)
    click.echo(info.path)


@click.command("fetch")
@click.argument("reference", metavar="hf://NAMESPACE/REPO[/FILE.gguf][:REVISION]")
@click.option("--layers", metavar="START:END", help="Of a package, only what these layers need.")
def fetch_(reference: str, layers: str | None) -> None:
    """Download a GGUF model or a layer package, as far as it is not here, and print its path."""
    wanted = None if layers is None else LayerRange.parse(layers)
    with ending_in_order(), SliceProgress(reference) as progress:
        path = fetch(reference, None if wanted is None else (wanted.start, wanted.end), progress)
    click.echo(path)


@click.command("package")
@MODEL
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The folder to make."
)
@click.option("--model-id", metavar="NAME", help="What the model is called; default: the file's name.")
def package(model: Path, out: Path, model_id: str | None) -> None:
    """Take a GGUF model apart into a layer package, of which each stage needs a few files only.

    The folder appears when it is whole; one that exists is left alone.
    """
    problem = None if model_id is None else wrong_model_id(model_id)
    if problem:
        raise SettingError(f"--model-id: {problem}")
    with ending_in_order(), SliceProgress(model.name) as progress:
        manifest = write_package(model, out, model_id=model_id, progress=progress)
    click.echo(manifest.path)


def size_text(size: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")

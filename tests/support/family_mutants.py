"""Does each rule of the families' table show? Take one away, and a small model of the family must notice.

``python -m tests.support.family_mutants`` goes through every line of the table and every rule in it (``make
rules``): without the rule some cut of some small model differs, is refused, or ends its process. What changes
nothing is a rule without a use, or a small model without what the rule is for: those that are known are in
:data:`QUIET`, with the reason.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs

from skippy.engine import EngineError
from skippy.engine.certify import Comparison
from skippy.models import FAMILIES, GGUFHeader, ModelError, families, possible_cuts
from skippy.models.tiny import tiny_architecture
from tests.support.families import VARIANTS, Variant, all_cuts, load

SECONDS = 600
UNNOTICED = 3

_PHASED = "slices begin at whole periods anyway, because of phase"
_SMALLER = "not for exactness: slices in the middle need no vocabulary where embeddings do"
QUIET = {
    **dict.fromkeys([("glm4", "entry_unless"), ("glm4moe", "entry_unless")], _SMALLER),
    ("afmoe", "window_period"): _PHASED,
    ("llama4", "window_period"): _PHASED,
    ("llama4", "window_default"): _PHASED,
    ("llama4", "kinds"): "layers without positions are those without a window, which are known already",
    ("smallthinker", "window_default"): _PHASED,
    ("smallthinker", "full_first"): _PHASED,
    ("minimax-01", "interval"): "layers keep their true indices, so what the file says stays right",
    ("glm5-next", "indexer"): "all layers of its small model have indexers of their own",
    ("qwen3tts", "keeps_vocabulary"): "its small model has as many tokens as rows",
    (
        "gemma2",
        "pinned",
    ): "both scales are the same in its small model, whose heads are as wide as its width says",
}
"""Rules whose absence no small model shows, and why."""


def rules() -> list[tuple[str, str]]:
    """Architectures and the rules in their lines."""
    # Whether a model is served is no question of cutting it.
    fields = [f for f in attrs.fields(families.Family) if f.name not in ("architecture", "generates")]
    return [
        (family.architecture, field.name)
        for family in FAMILIES.values()
        for field in fields
        if getattr(family, field.name) != field.default
    ]


def without(architecture: str, rule: str) -> families.Family:
    """The line of a family without one rule."""
    default = attrs.fields_dict(families.Family)[rule].default
    return attrs.evolve(FAMILIES[architecture], **{rule: default})


def variants_of(architecture: str) -> Iterator[Variant]:
    """Small models that a rule may show on, the plain ones first."""
    found = [variant for variant in VARIANTS if tiny_architecture(variant.model) == architecture]
    if not found:  # the diffusion models, which are not served
        found = [Variant(architecture)]
    yield from found


def notice(architecture: str, rule: str) -> str | None:
    """How a small model shows that a rule is missing; None: not at all. The process may end over it."""
    table = {**FAMILIES, architecture: without(architecture, rule)}
    for variant in variants_of(architecture):
        with tempfile.TemporaryDirectory() as folder:
            model = variant.write(Path(folder) / "model.gguf")
            possible = set(possible_cuts(GGUFHeader.read(model)))
            families.FAMILIES, before = table, families.FAMILIES
            try:
                found = _compare(model, Path(folder), variant, possible)
            finally:
                families.FAMILIES = before
        if found is not None:
            return f"{variant}: {found}"
    return None


def _compare(model: Path, folder: Path, variant: Variant, possible: set[int]) -> str | None:
    comparison = Comparison(model, folder, load)
    try:
        for cut in variant.cuts or all_cuts(comparison.layers):
            try:
                result = comparison.compare(*cut)
            except (EngineError, ModelError, ValueError) as error:  # rows of another width, too
                return f"cut at {cut}: {str(error)[-160:]}"
            if result.verdict == "differs" or (result.verdict == "refused" and possible.issuperset(cut)):
                return f"cut at {cut}: {result.verdict} {result.difference or result.refused}"
    finally:
        comparison.close()
    return None


def _apart(mutant: tuple[str, str]) -> tuple[bool, str]:
    command = [sys.executable, "-m", "tests.support.family_mutants", "--one", *mutant]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False, f"not done within {SECONDS} s"
    if done.returncode < 0:
        return True, f"the process ends with signal {-done.returncode}"
    return done.returncode == 0, done.stdout.strip() or done.stderr.strip()[-400:]


def main() -> int:
    parser = argparse.ArgumentParser(description="Take each rule of the table away: does it show?")
    parser.add_argument("only", nargs="*", help="architectures; without, all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("ARCHITECTURE", "RULE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        found = notice(*arguments.one)
        sys.stdout.write(f"{found or 'not noticed'}\n")
        return 0 if found else UNNOTICED
    chosen = [mutant for mutant in rules() if not arguments.only or mutant[0] in arguments.only]
    missed = 0
    sys.stdout.writelines(f"{name} {rule} does not show: {why}\n" for (name, rule), why in QUIET.items())
    chosen = [mutant for mutant in chosen if mutant not in QUIET]
    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        for (architecture, rule), (noticed, how) in zip(chosen, pool.map(_apart, chosen), strict=True):
            missed += not noticed
            sys.stdout.write(f"{'' if noticed else 'MISSED '}{architecture} without {rule}: {how}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} rules show\n")
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())

"""Every architecture of the table: chains of slices give the bits of the unsplit model.

Here each is cut in two and in three at one place, another for each; ``make families`` tries all of them.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from skippy.engine.certify import Comparison
from skippy.models import FAMILIES, GGUFHeader, UnsupportedArchitectureError, family_of, possible_cuts
from skippy.models.tiny import tiny_architecture, tiny_models, write_tiny_model
from tests.support.families import VARIANTS, Variant, load, run_variant
from tests.support.family_mutants import QUIET, notice, rules

DEEP = 10  # layers; deeper models, and those with a tied head, are left to `make families`


def test_the_table_and_the_small_models_are_of_the_same_families() -> None:
    made = {tiny_architecture(name) for name in tiny_models()}
    assert made - set(FAMILIES) == {"hrm_text"}
    assert set(FAMILIES) <= made


@pytest.mark.parametrize(
    "variant", [found for found in VARIANTS if (found.layers or 0) <= DEEP and not found.tied], ids=str
)
def test_a_chain_gives_the_bits_of_the_unsplit_model(variant: Variant, tmp_path: Path) -> None:
    model = variant.write(tmp_path / "model.gguf")
    header = GGUFHeader.read(model)
    cuts = possible_cuts(header)[:-1]
    assert cuts
    cut = cuts[zlib.crc32(str(variant).encode()) % len(cuts)]
    after = min(other for other in possible_cuts(header) if other > cut)
    (tmp_path / "slices").mkdir()
    comparison = Comparison(model, tmp_path / "slices", load)
    try:
        for place in ((cut,), (cut, after)):
            result = comparison.compare(*place)
            assert (result.difference, result.agreed) == (0.0, result.tokens), place
            assert result.tokens == 3 + 1 + 2 + 3 * 3
    finally:
        comparison.close()


def test_where_layers_share_an_indexer(tmp_path: Path) -> None:
    results = run_variant(Variant("hy_v4"), tmp_path, [(1,), (2,), (2, 4)])
    assert [result.difference for result in results] == [None, 0.0, 0.0]
    assert "layer 1 uses the positions that an earlier layer has found" in results[0].refused


@pytest.mark.parametrize(("architecture", "rule"), [("gemma", "entry"), ("cohere2", "window_period")])
def test_a_rule_that_is_missing_shows(architecture: str, rule: str) -> None:
    """`make rules` tries all of them."""
    assert set(QUIET) < set(rules())
    found = notice(architecture, rule)
    assert found is not None
    assert re.search(r"cut at \(1,\): differs \d", found)


def test_a_looped_model_is_refused(tmp_path: Path) -> None:
    header = GGUFHeader.read(write_tiny_model(tmp_path / "model.gguf", "hrm_text"))
    with pytest.raises(UnsupportedArchitectureError, match="one pass through a pipeline cannot give"):
        family_of(header)
    assert possible_cuts(header) == ()

"""The documentation says what the code does."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from skippy.cli.config_docs import render
from skippy.cli.run import run
from skippy.config import StageConfig, from_json_value

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(path: Path, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def stages(path: Path) -> list[dict[str, Any]]:
    return [value for value in map(json.loads, blocks(path, "json")) if "stage_id" in value]


def test_the_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == render(), "run make docs"


def test_the_two_machine_example_is_valid() -> None:
    first, last = (from_json_value(value, StageConfig) for value in stages(ROOT / "README.md"))
    assert (first.layer_start, first.layer_end) == (0, last.layer_start)
    assert first.downstream is not None
    assert last.upstream is not None
    assert first.downstream.address == last.bind_endpoint
    assert last.upstream.address == first.bind_endpoint
    assert (first.downstream.stage_id, last.upstream.stage_id) == (last.stage_id, first.stage_id)
    assert (first.topology_id, first.model_id) == (last.topology_id, last.model_id)


def test_python_examples_compile() -> None:
    examples = [(path, code) for path in PAGES for code in blocks(path, "python")]
    assert examples
    for path, code in examples:
        compile(code, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def anchors(path: Path) -> set[str]:
    """What a link into a page may name: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text("utf-8")):
        if "://" in target:
            continue
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(page), f"{path.name} links to {target}#{anchor}"


def test_every_option_of_run_is_in_its_section() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    section = page.partition("## One machine\n")[2].partition("\n## Two machines\n")[0]
    told = set(re.findall(r"`(--?[a-z0-9-]+)", section))
    names = {name for option in run.params if not getattr(option, "hidden", False) for name in option.opts}
    assert names - {"--help", "-h"} <= told
    assert told - names <= {"--layers"}, "not an option of skippy run"

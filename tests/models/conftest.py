from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied llama of six layers. Shared: do not change it."""
    return write_tiny(tmp_path_factory.mktemp("models") / "tied.gguf")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied qwen2 of six layers, Q8_0. Shared: do not change it."""
    return write_tiny(tmp_path_factory.mktemp("models") / "untied.gguf", "qwen2", tied=False, weights="Q8_0")

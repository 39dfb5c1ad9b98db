from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import Served, serve


@pytest.fixture(scope="module")
def chain(bundled_model: Path) -> Iterator[Served]:
    """The bundled model over three processes."""
    with serve(bundled_model, 3) as served:
        yield served

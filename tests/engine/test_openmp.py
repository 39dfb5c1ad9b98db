"""OpenMP's threads, which must not take the cores of whatever else runs on the machine while they wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp")

IMPORT = "import os, skippy.engine.llama.native; print({n: os.environ.get(n) for n in ('GOMP_SPINCOUNT',)})"


@pytest.mark.parametrize(
    ("asked", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")],
)
def test_threads_that_wait_fall_asleep_soon_unless_the_environment_says_how(
    asked: dict[str, str], spins: str
) -> None:
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=inherited | asked | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("llama.cpp was not built with libgomp")
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [spins]
    # What this process starts is not told.
    assert done.stdout.strip() == str({"GOMP_SPINCOUNT": asked.get("GOMP_SPINCOUNT")})

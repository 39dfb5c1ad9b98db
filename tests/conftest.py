"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from skippy.cli.demo import find_model
from skippy.cli.errors import SettingError
from skippy.stage.clock import measured_on
from tests.support.certificates import Certificates

# In a script's background SIGINT is ignored, behind nohup SIGHUP, which processes inherit; tests send both.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    """The real 135M model: ``$SKIPPY_BUNDLED_MODEL``, else the installed one. Missing is a failure."""
    configured = os.environ.get("SKIPPY_BUNDLED_MODEL")
    try:
        return find_model(Path(configured) if configured else None)
    except SettingError as error:
        pytest.fail(f"{error.format_message()}; tests also look at SKIPPY_BUNDLED_MODEL")


@pytest.fixture
def no_compute_time() -> Iterator[None]:
    """Stages measure that nothing takes any time: what they decide by that does not depend on the machine."""
    with measured_on(lambda: 0.0):
        yield

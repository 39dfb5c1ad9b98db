"""Options on how a model is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

verify_option = click.option(
    "--no-verify",
    "verify_package",
    flag_value=False,
    default=True,
    help="Do not check the SHA-256 of a layer package's parts.",
)
precheck_option = click.option(
    "--no-precheck",
    "precheck",
    flag_value=False,
    default=True,
    help="Cut a model of a kind that was not tried out without trying it out on a small one.",
)


def loading_options(function: F) -> F:
    """Both, for commands that load a stage."""
    return verify_option(precheck_option(function))

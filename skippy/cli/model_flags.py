"""Options on how a model is read."""

from __future__ import annotations

import click

verify_option = click.option(
    "--no-verify",
    "verify_package",
    flag_value=False,
    default=True,
    help="Do not check the SHA-256 of a layer package's parts.",
)

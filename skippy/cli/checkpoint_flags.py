"""Options on what a checkpoint becomes."""

from __future__ import annotations

from pathlib import Path

import click

from .flags import combine

checkpoint_options = combine(
    click.option(
        "--checkpoint-quantization",
        metavar="NAME",
        help="What the tensors of a SafeTensors checkpoint become, such as Q4_K_M; default: what they are.",
    ),
    click.option(
        "--checkpoint-imatrix",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="An importance matrix for the quantisation.",
    ),
)

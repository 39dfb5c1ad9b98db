"""Names of quantisations that a checkpoint can be given while it is loaded."""

from __future__ import annotations

from typing import Final

from .errors import ConfigError

PRESERVE: Final = "preserve"
QUANTIZATIONS: Final = (
    PRESERVE,
    *("F32", "F16", "BF16"),
    *("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M"),
    *("IQ4_XS", "IQ4_NL", "TQ1_0", "TQ2_0"),
    *("Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"),
    "MXFP4_MOE",
)
"""``preserve`` keeps the checkpoint's types; the others are llama.cpp's file types."""
NEEDS_IMATRIX: Final = frozenset(
    {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"}
)
"""Those that llama.cpp does not make without knowing which weights matter."""

_ALIASES: Final = {"direct": PRESERVE, "none": PRESERVE}


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


_NAMES: Final = {_plain(name): name for name in QUANTIZATIONS} | _ALIASES


def parse_quantization(text: str) -> str:
    """The name in :data:`QUANTIZATIONS` that ``text`` means, whatever its case and punctuation.

    Raises:
        ConfigError: there is no such quantisation.
    """
    name = _NAMES.get(_plain(text))
    if name is None:
        raise ConfigError(
            f'checkpoint_quantization: "{text[:80]}" is unknown; known are {", ".join(QUANTIZATIONS)}'
        )
    return name


def check_imatrix(name: str, imatrix: str | None) -> None:
    """Raise ConfigError where the quantisation lacks an importance matrix, or has no use for it."""
    if name in NEEDS_IMATRIX and imatrix is None:
        raise ConfigError(
            f"checkpoint_imatrix: is missing; checkpoint_quantization {name} needs an importance matrix"
        )
    if name == PRESERVE and imatrix is not None:
        raise ConfigError(
            "checkpoint_imatrix: has no effect on checkpoint_quantization preserve; leave it out"
        )

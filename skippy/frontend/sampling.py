"""Sampling fields of a request → the sampling block of the wire.

Defaults are llama.cpp's (temperature 0.8, top_p 0.95, top_k 40, min_p 0.05), not OpenAI's: clients that
say nothing get what a local model is tuned for. Names and ranges stand in :func:`parse_sampling`.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from skippy.engine.sampling import DRY_BREAKER_BYTES
from skippy.protocol import SamplingConfig
from skippy.protocol.kinds import (
    MAX_STAGE_DRY_SEQUENCE_BREAKERS,
    MAX_STAGE_LOGIT_BIAS,
    MAX_STAGE_SAMPLERS,
    SamplingFlag,
)
from skippy.protocol.messages import DEFAULT_DRY_SEQUENCE_BREAKERS, DEFAULT_SAMPLERS

from .fields import Fields, describe

I32_MAX: Final = 2**31 - 1
U32_MAX: Final = 2**32 - 1
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

# One-letter names, as in llama.cpp's --sampling-seq.
SAMPLER_LETTERS: Final = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p",
    "p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip


def fold_seed(seed: int) -> int:
    """A 64-bit seed as the wire's 32 bits: the exclusive or of its halves; small seeds stay as they are."""
    unsigned = seed & (2**64 - 1)
    return (unsigned ^ (unsigned >> 32)) & 0xFFFF_FFFF


def parse_sampling(fields: Fields) -> SamplingConfig:
    """Read all sampling fields. An absent seed is drawn at random.

    Raises:
        ApiError: 400, a field of the wrong type or out of range.
    """
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    repeat_name = "repeat_penalty"
    if fields.is_given("repetition_penalty"):
        if fields.is_given("repeat_penalty"):
            raise fields.error("repetition_penalty", "is another name of repeat_penalty; give only one")
        repeat_name = "repetition_penalty"
    for name, off in (("mirostat_mode", (0,)), ("mirostat_entropy", ()), ("mirostat_learning_rate", ())):
        fields.accept_only(name, off, "mirostat keeps state between draws, which replay cannot restore")
    dry, xtc = _subobject(fields, "dry"), _subobject(fields, "xtc")
    ignore_eos = fields.boolean("ignore_eos")
    flags = SamplingFlag.ENABLED | (SamplingFlag.IGNORE_EOS if ignore_eos else 0)
    config = SamplingConfig(
        flags=int(flags),
        seed=secrets.randbits(32) if seed is None else fold_seed(seed),
        temperature=fields.number("temperature", 0.8, 0, 100),
        top_p=fields.number("top_p", 0.95, 0, 1),
        top_k=_integer(fields, "top_k", 40, 0, I32_MAX),
        min_p=fields.number("min_p", 0.05, 0, 1),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        # Smaller ones, applied up to 16 times, would drive logits out of the range of f32.
        repeat_penalty=fields.number(repeat_name, 1, 0.01, 100),
        penalty_last_n=_integer(fields, "repeat_last_n", -1, -1, I32_MAX),
        logit_bias=_logit_bias(fields),
        typical_p=fields.number("typical_p", 1, 0, 1),
        top_nsigma=fields.number("top_nsigma", -1, -1, 1000),
        dynatemp_range=fields.number("dynatemp_range", 0, 0, 100),
        dynatemp_exponent=fields.number("dynatemp_exponent", 1, 0, 100),
        dry_multiplier=dry.number("multiplier", 0, 0, 100),
        dry_base=dry.number("base", 1.75, 0, 100),
        dry_allowed_length=_integer(dry, "allowed_length", 2, 0, I32_MAX),
        dry_penalty_last_n=_integer(dry, "penalty_last_n", 64, -1, I32_MAX),
        dry_sequence_breakers=_breakers(dry),
        xtc_probability=xtc.number("probability", 0, 0, 1),
        xtc_threshold=xtc.number("threshold", 0.1, 0, 1),
        samplers=_samplers(fields),
        ignore_eos=ignore_eos,
    )
    dry.refuse_unknown()
    xtc.refuse_unknown()
    return config


def _integer(fields: Fields, name: str, default: int, low: int, high: int) -> int:
    value = fields.integer(name, low, high)
    return default if value is None else value


def _subobject(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    return Fields({}, name) if value is None else Fields.of(value, fields.path(name))


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    if not fields.is_given("logit_bias"):
        return ()
    biases = Fields.of(fields.get("logit_bias"), "logit_bias")
    keys = list(fields.get("logit_bias"))
    if len(keys) > MAX_STAGE_LOGIT_BIAS:
        raise fields.error(
            "logit_bias", f"has {len(keys)} entries; at most {MAX_STAGE_LOGIT_BIAS} are allowed"
        )
    for key in keys:
        if not _TOKEN_ID.fullmatch(key) or int(key) > I32_MAX:
            raise fields.error(
                "logit_bias", f"has the key {key[:40]!r}; keys must be token ids, such as '42'"
            )
    return tuple((int(key), biases.number(key, 0, -100, 100)) for key in keys)


def _strings(fields: Fields, name: str, limit: int) -> tuple[str, ...] | None:
    values = fields.array(name)
    if values is None:
        return None
    if len(values) > limit:
        raise fields.error(name, f"has {len(values)} entries; at most {limit} are allowed")
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise fields.error(f"{name}[{index}]", f"must be a string, not {describe(value)}")
    return tuple(values)


def _breakers(dry: Fields) -> tuple[str, ...]:
    values = _strings(dry, "sequence_breakers", MAX_STAGE_DRY_SEQUENCE_BREAKERS)
    if values is None:
        return DEFAULT_DRY_SEQUENCE_BREAKERS
    for index, value in enumerate(values):
        if not 1 <= len(value.encode()) <= DRY_BREAKER_BYTES or "\0" in value:
            text = f"must be 1 to {DRY_BREAKER_BYTES} bytes of UTF-8 without NUL"
            raise dry.error(f"sequence_breakers[{index}]", text)
    return values


def _samplers(fields: Fields) -> tuple[str, ...]:
    names = _strings(fields, "samplers", MAX_STAGE_SAMPLERS)
    letters = fields.text("sampler_sequence")
    if letters is not None:
        if names is not None:
            raise fields.error("sampler_sequence", "says the same as samplers; give only one")
        if len(letters) > MAX_STAGE_SAMPLERS:
            raise fields.error("sampler_sequence", f"has more than {MAX_STAGE_SAMPLERS} letters")
        for letter in letters:
            if letter not in SAMPLER_LETTERS:
                known = "".join(SAMPLER_LETTERS)
                raise fields.error("sampler_sequence", f"has the letter {letter!r}; known are {known}")
        return tuple(SAMPLER_LETTERS[letter] for letter in letters)
    if names is None:
        return DEFAULT_SAMPLERS
    for index, name in enumerate(names):
        if name not in DEFAULT_SAMPLERS:
            known = ", ".join(DEFAULT_SAMPLERS)
            raise fields.error(f"samplers[{index}]", f"is {name[:40]!r}; known are {known}")
    return names

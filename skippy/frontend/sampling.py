"""Sampling fields of a request → the sampling block of the wire.

Names are OpenAI's and those of llama.cpp's server, where it has several ways to say something, all of them.
A request that does not say gets OpenAI's temperature and top_p, 1, and llama.cpp's defaults for what OpenAI
does not have, unless the model file recommends something else (:func:`model_defaults`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from skippy.engine.mirostat import BESIDE_MIROSTAT, MIROSTAT_MODES
from skippy.engine.sampling import DRY_BREAKER_BYTES, check_settings
from skippy.protocol import SamplingConfig
from skippy.protocol.kinds import (
    MAX_STAGE_DRY_SEQUENCE_BREAKERS,
    MAX_STAGE_LOGIT_BIAS,
    MAX_STAGE_SAMPLERS,
    SamplingFlag,
)
from skippy.protocol.messages import DEFAULT_SAMPLERS
from skippy.telemetry import get_logger

from .fields import I32_MAX, Fields, describe

log = get_logger("skippy.frontend")

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
BANNED: Final = -1e30
"""The bias of a token that must not come: far below every logit, and far from the end of f32's range."""

DEFAULT_SAMPLING: Final = SamplingConfig(
    flags=int(SamplingFlag.ENABLED), temperature=1.0, top_p=1.0, top_k=40, min_p=0.05
)

# One-letter names, as in llama.cpp's --sampling-seq.
SAMPLER_LETTERS: Final = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p",
    "p": "top_p", "m": "min_p", "x": "xtc", "t": "temperature",
}  # fmt: skip
_OTHER_SAMPLER_NAMES: Final = {"typ_p": "typical_p", "typical": "typical_p", "temp": "temperature"}


@attrs.frozen
class Number:
    """A number of the sampling block, its names in requests, and its range there."""

    field: str
    names: tuple[str, ...]
    low: float
    high: float
    integer: bool = False

    def read(self, fields: Fields, names: Sequence[str] | None = None) -> int | float | None:
        given = [name for name in names or self.names if fields.is_given(name)]
        if not given:
            return None
        if len(given) > 1:
            raise fields.error(given[1], f"is another name of {given[0]}; give only one")
        if self.integer:
            return fields.integer(given[0], int(self.low), int(self.high))
        return fields.number(given[0], 0.0, self.low, self.high)


NUMBERS: Final = (
    Number("temperature", ("temperature",), 0, 100),
    Number("top_p", ("top_p",), 0, 1),
    Number("top_k", ("top_k",), -1, I32_MAX, integer=True),
    Number("min_p", ("min_p",), 0, 1),
    Number("presence_penalty", ("presence_penalty",), -2, 2),
    Number("frequency_penalty", ("frequency_penalty",), -2, 2),
    # Smaller ones, applied up to 16 times, would drive logits out of the range of f32.
    Number("repeat_penalty", ("repeat_penalty", "repetition_penalty"), 0.01, 100),
    Number("penalty_last_n", ("repeat_last_n",), -1, I32_MAX, integer=True),
    Number("typical_p", ("typical_p",), 0, 1),
    Number("top_nsigma", ("top_nsigma", "top_n_sigma"), -1, 1000),
    Number("dynatemp_range", ("dynatemp_range",), 0, 100),
    Number("dynatemp_exponent", ("dynatemp_exponent",), 0, 100),
    Number("mirostat_mode", ("mirostat", "mirostat_mode"), 0, max(MIROSTAT_MODES), integer=True),
    Number("mirostat_entropy", ("mirostat_tau", "mirostat_entropy"), 0, 100),
    Number("mirostat_learning_rate", ("mirostat_eta", "mirostat_learning_rate"), 0, 1),
)
GROUPS: Final = {
    "dry": (
        Number("dry_multiplier", ("multiplier",), 0, 100),
        Number("dry_base", ("base",), 0, 100),
        Number("dry_allowed_length", ("allowed_length",), 0, I32_MAX, integer=True),
        Number("dry_penalty_last_n", ("penalty_last_n",), -1, I32_MAX, integer=True),
    ),
    "xtc": (
        Number("xtc_probability", ("probability",), 0, 1),
        Number("xtc_threshold", ("threshold",), 0, 1),
    ),
}
"""Numbers that are members of an object of that name, or fields with its name in front."""
_CUTTING: Final = {
    "top_k": ("top_k",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "typical_p": ("typical_p",),
    "top_nsigma": ("top_nsigma", "top_n_sigma"),
    "xtc_probability": ("xtc_probability", "xtc"),
}
"""What mirostat stands in for, and its names in requests."""


def fold_seed(seed: int) -> int:
    """A 64-bit seed as the wire's 32 bits: the exclusive or of its halves; small seeds stay as they are."""
    unsigned = seed & (2**64 - 1)
    return (unsigned ^ (unsigned >> 32)) & 0xFFFF_FFFF


def read_sampling(fields: Fields) -> dict[str, Any]:
    """What a request says about sampling, by the names of :class:`~skippy.protocol.SamplingConfig`.

    An absent seed is drawn at random.

    Raises:
        ApiError: 400, a field of the wrong type or out of range.
    """
    said: dict[str, Any] = {}
    for number in NUMBERS:
        said[number.field] = number.read(fields)
    for name, numbers in GROUPS.items():
        group = _subobject(fields, name)
        for number in numbers:
            said[number.field] = _grouped(fields, group, name, number)
        if name == "dry":
            said["dry_sequence_breakers"] = _breakers(fields, group)
        group.refuse_unknown()
    said["samplers"] = _samplers(fields)
    said = {field: value for field, value in said.items() if value is not None}
    _check_mirostat(fields, said)
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    ignore_eos = fields.boolean("ignore_eos")
    flags = SamplingFlag.ENABLED | (SamplingFlag.IGNORE_EOS if ignore_eos else 0)
    return {
        **said,
        "flags": int(flags),
        "seed": secrets.randbits(32) if seed is None else fold_seed(seed),
        "ignore_eos": ignore_eos,
        "logit_bias": _logit_bias(fields),
    }


def parse_sampling(fields: Fields) -> SamplingConfig:
    """What a request says about sampling, and the defaults for the rest. Raises as :func:`read_sampling`."""
    return attrs.evolve(DEFAULT_SAMPLING, **read_sampling(fields))


def model_defaults(metadata: Mapping[str, str], vocabulary_size: int) -> SamplingConfig:
    """The defaults where a model file recommends some: its ``general.sampling.*``, as llama.cpp reads them.

    What is out of range there is left out, with a warning.
    """
    defaults = DEFAULT_SAMPLING
    for key, text in metadata.items():
        try:
            field, value = _recommended(key, text)
            changed = attrs.evolve(defaults, **{field: value})
            check_settings(changed, vocabulary_size)
        except (KeyError, ValueError) as error:
            log.warning("a sampling setting of the model file is left out", key=key, reason=str(error))
        else:
            defaults = changed
    return defaults


_RECOMMENDED: Final[dict[str, tuple[str, type]]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "penalty_last_n": ("penalty_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat_mode", int),
    "mirostat_tau": ("mirostat_entropy", float),
    "mirostat_eta": ("mirostat_learning_rate", float),
}


def _recommended(key: str, text: str) -> tuple[str, Any]:
    if key == "sequence":
        return "samplers", tuple(_sampler_name(name) for name in text.split(";"))
    field, kind = _RECOMMENDED[key]
    return field, kind(text)


def _sampler_name(name: str) -> str:
    plain = name.replace("-", "_")
    return _OTHER_SAMPLER_NAMES.get(plain, plain)


def _subobject(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    return Fields({}, name) if value is None else Fields.of(value, fields.path(name))


def _grouped(fields: Fields, group: Fields, name: str, number: Number) -> int | float | None:
    inside, flat = number.read(group), number.read(fields, (f"{name}_{number.names[0]}",))
    if inside is not None and flat is not None:
        text = f"is the same as {name}_{number.names[0]}; give only one"
        raise group.error(number.names[0], text)
    return flat if inside is None else inside


def _check_mirostat(fields: Fields, said: Mapping[str, Any]) -> None:
    if not said.get("mirostat_mode"):
        return
    for field, names in _CUTTING.items():
        value = said.get(field)
        if value is not None and (value < 1 if field in ("top_p", "typical_p") else value > 0):
            name = next(filter(fields.is_given, names))
            raise fields.error(name, "does nothing beside mirostat, which stands in for it; leave it out")
    for name in said.get("samplers", ()):
        if name not in BESIDE_MIROSTAT:
            text = f"has {name!r}, which does nothing beside mirostat, which stands in for it"
            raise fields.error("samplers", text)


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """As OpenAI has it, an object, or as llama.cpp's server, an array of pairs; false there bans a token."""
    value = fields.get("logit_bias")
    if value is None:
        return ()
    if isinstance(value, list):
        return _bias_pairs(fields, value)
    biases = Fields.of(value, "logit_bias")
    _check_count(fields, "logit_bias", value, MAX_STAGE_LOGIT_BIAS)
    for key in value:
        if not _TOKEN_ID.fullmatch(key) or int(key) > I32_MAX:
            raise fields.error(
                "logit_bias", f"has the key {key[:40]!r}; keys must be token ids, such as '42'"
            )
    return tuple((int(key), biases.number(key, 0, -100, 100)) for key in value)


def _bias_pairs(fields: Fields, pairs: list[Any]) -> tuple[tuple[int, float], ...]:
    _check_count(fields, "logit_bias", pairs, MAX_STAGE_LOGIT_BIAS)
    found = []
    for index, pair in enumerate(pairs):
        name = f"logit_bias[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.error(
                name, "must be an array of a token id and a number, or of a token id and false"
            )
        entry = Fields({"token": pair[0], "bias": pair[1]}, name)
        token = entry.integer("token", 0, I32_MAX)
        if token is None or pair[1] is None:
            raise fields.error(name, "must have a token id and a bias, which cannot be null")
        found.append((token, BANNED if pair[1] is False else entry.number("bias", 0, -100, 100)))
    return tuple(found)


def _check_count(fields: Fields, name: str, values: Any, limit: int) -> None:
    if len(values) > limit:
        raise fields.error(name, f"has {len(values)} entries; at most {limit} are allowed")


def _strings(fields: Fields, name: str, limit: int) -> tuple[str, ...] | None:
    values = fields.array(name)
    if values is None:
        return None
    _check_count(fields, name, values, limit)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise fields.error(f"{name}[{index}]", f"must be a string, not {describe(value)}")
    return tuple(values)


def _breakers(fields: Fields, dry: Fields) -> tuple[str, ...] | None:
    where, name = dry, "sequence_breakers"
    if fields.is_given("dry_sequence_breakers"):
        if dry.is_given(name):
            raise dry.error(name, "is the same as dry_sequence_breakers; give only one")
        where, name = fields, "dry_sequence_breakers"
    values = _strings(where, name, MAX_STAGE_DRY_SEQUENCE_BREAKERS)
    for index, value in enumerate(values or ()):
        if not 1 <= len(value.encode()) <= DRY_BREAKER_BYTES or "\0" in value:
            text = f"must be 1 to {DRY_BREAKER_BYTES} bytes of UTF-8 without NUL"
            raise where.error(f"{name}[{index}]", text)
    return values


def _samplers(fields: Fields) -> tuple[str, ...] | None:
    """``samplers``, names or their letters in one string, or ``sampler_sequence``, their letters."""
    name = "samplers"
    if fields.is_given("sampler_sequence"):
        if fields.is_given("samplers"):
            raise fields.error("sampler_sequence", "says the same as samplers; give only one")
        name = "sampler_sequence"
    value = fields.get(name)
    if isinstance(value, str):
        _check_count(fields, name, value, MAX_STAGE_SAMPLERS)
        for letter in value:
            if letter not in SAMPLER_LETTERS:
                known = "".join(SAMPLER_LETTERS)
                raise fields.error(name, f"has the letter {letter!r}; known are {known}")
        return tuple(SAMPLER_LETTERS[letter] for letter in value)
    if name == "sampler_sequence":
        raise fields.error(name, f"must be a string, not {describe(value)}")
    given = _strings(fields, name, MAX_STAGE_SAMPLERS)
    if given is None:
        return None
    names = tuple(map(_sampler_name, given))
    for index, known_name in enumerate(names):
        if known_name not in DEFAULT_SAMPLERS:
            known = ", ".join(DEFAULT_SAMPLERS)
            raise fields.error(f"samplers[{index}]", f"is {given[index][:40]!r}; known are {known}")
    return names

"""The sampling block: bytes ↔ :class:`SamplingConfig`.

Layout and limits: ``docs/protocol.md``, section "Sampling block".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from .errors import ErrorKind, LocalProtocolError, RemoteProtocolError
from .float32 import pack_f32, restore_nans
from .incremental import Intake, Step, decode_utf8
from .kinds import (
    MAX_STAGE_DRY_SEQUENCE_BREAKERS,
    MAX_STAGE_LOGIT_BIAS,
    MAX_STAGE_SAMPLERS,
    MAX_STAGE_SAMPLING_STRING_BYTES,
    STAGE_LOGIT_BIAS_WIRE_BYTES,
    STAGE_SAMPLING_CONFIG_BASE_BYTES,
)
from .messages import SamplingConfig

_U32: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<II2fi4fiI")  # flags … penalty_last_n, bias count
_MIDDLE: Final = struct.Struct("<6fii")  # typical_p … dry_penalty_last_n
_TAIL: Final = struct.Struct("<2fi2f")  # xtc_probability … mirostat_learning_rate


def _unpack(layout: struct.Struct, data: bytearray, offset: int) -> tuple[float, ...]:
    """Unpack a run of 4-byte words; NaNs keep their bits."""
    values: tuple[float, ...] = layout.unpack_from(data, offset)
    total = sum(values)
    return values if total == total else restore_nans(values, memoryview(data)[offset:])


def decode_sampling(intake: Intake) -> Step[SamplingConfig]:
    """Parse one block, failing at the first bad field, as soon as that field is complete.

    Raises:
        RemoteProtocolError: (InvalidData) a count or a length over its limit, or a string not UTF-8.
    """
    buffer = intake.buffer
    head = _unpack(_HEAD, buffer, (yield from intake.need(_HEAD.size)))
    bias_count = int(head[10])
    if bias_count > MAX_STAGE_LOGIT_BIAS:
        raise RemoteProtocolError(
            f"{bias_count} logit bias entries; at most {MAX_STAGE_LOGIT_BIAS} are allowed"
        )
    biases: tuple[tuple[int, float], ...] = ()
    if bias_count:
        size = bias_count * STAGE_LOGIT_BIAS_WIRE_BYTES
        words = _unpack(struct.Struct("<" + "if" * bias_count), buffer, (yield from intake.need(size)))
        biases = tuple((int(words[i]), words[i + 1]) for i in range(0, len(words), 2))
    middle = _unpack(_MIDDLE, buffer, (yield from intake.need(_MIDDLE.size)))
    breakers = yield from _decode_strings(intake, MAX_STAGE_DRY_SEQUENCE_BREAKERS, "DRY sequence breaker")
    tail = _unpack(_TAIL, buffer, (yield from intake.need(_TAIL.size)))
    samplers = yield from _decode_strings(intake, MAX_STAGE_SAMPLERS, "sampler")
    (ignore_eos,) = _U32.unpack_from(buffer, (yield from intake.need(4)))
    flags, seed, temperature, top_p, top_k, min_p, presence, frequency, repeat, last_n, _ = head
    typical_p, top_nsigma, dynatemp_range, dynatemp_exponent, dry_multiplier, dry_base = middle[:6]
    return SamplingConfig(
        int(flags), int(seed), temperature, top_p, int(top_k), min_p, presence, frequency, repeat,
        int(last_n), biases, typical_p, top_nsigma, dynatemp_range, dynatemp_exponent, dry_multiplier,
        dry_base, int(middle[6]), int(middle[7]), breakers,
        tail[0], tail[1], int(tail[2]), tail[3], tail[4], samplers, ignore_eos != 0,
    )  # fmt: skip


def _decode_strings(intake: Intake, limit: int, what: str) -> Step[tuple[str, ...]]:
    (count,) = _U32.unpack_from(intake.buffer, (yield from intake.need(4)))
    if count > limit:
        raise RemoteProtocolError(f"{count} {what} strings; at most {limit} are allowed")
    strings = []
    for _ in range(count):
        (length,) = _U32.unpack_from(intake.buffer, (yield from intake.need(4)))
        if length > MAX_STAGE_SAMPLING_STRING_BYTES:
            raise RemoteProtocolError(
                f"{what} string of {length} bytes; at most {MAX_STAGE_SAMPLING_STRING_BYTES} are allowed"
            )
        strings.append(decode_utf8((yield from intake.take(length)), f"{what} string"))
    return tuple(strings)


def sampling_bytes(config: SamplingConfig) -> int:
    """Encoded size of the block, as the writer emits it (surplus list entries are dropped)."""
    strings = (
        *config.dry_sequence_breakers[:MAX_STAGE_DRY_SEQUENCE_BREAKERS],
        *config.samplers[:MAX_STAGE_SAMPLERS],
    )
    return (
        STAGE_SAMPLING_CONFIG_BASE_BYTES
        + STAGE_LOGIT_BIAS_WIRE_BYTES * min(len(config.logit_bias), MAX_STAGE_LOGIT_BIAS)
        + sum(4 + len(s.encode(errors="surrogatepass")) for s in strings)
    )


def check_no_surplus(config: SamplingConfig) -> None:
    """LocalProtocolError when the writer would drop list entries silently."""
    for name, length, limit in (
        ("logit_bias", len(config.logit_bias), MAX_STAGE_LOGIT_BIAS),
        ("dry_sequence_breakers", len(config.dry_sequence_breakers), MAX_STAGE_DRY_SEQUENCE_BREAKERS),
        ("samplers", len(config.samplers), MAX_STAGE_SAMPLERS),
    ):
        if length > limit:
            raise LocalProtocolError(f"sampling {name} has {length} entries; at most {limit} can travel")


_ENCODED_KEPT: Final = 64
_encoded: dict[int, tuple[SamplingConfig, bytes]] = {}


def encode_sampling(config: SamplingConfig) -> bytes:
    """The block's bytes. Entries beyond the list limits are dropped, as the format's writer does.

    Raises:
        LocalProtocolError: a string over 64 bytes (InvalidData), not encodable as UTF-8, or a number that
            does not fit its field (InvalidInput).
    """
    # A request sends the same (frozen) object with every token: keep recent encodings. By identity, because
    # equal floats may differ in bits (0.0 and -0.0); the entry keeps its object alive, so ids are not reused.
    known = _encoded.get(id(config))
    if known is not None and known[0] is config:
        return known[1]
    data = _encode(config)
    if len(_encoded) >= _ENCODED_KEPT:
        _encoded.clear()
    _encoded[id(config)] = (config, data)
    return data


def _encode(c: SamplingConfig) -> bytes:
    biases = c.logit_bias[:MAX_STAGE_LOGIT_BIAS]
    parts = [
        _words("<II", ("flags", "seed"), (c.flags, c.seed)),
        pack_f32(("temperature", "top_p"), (c.temperature, c.top_p)),
        _words("<i", ("top_k",), (c.top_k,)),
        pack_f32(
            ("min_p", "presence_penalty", "frequency_penalty", "repeat_penalty"),
            (c.min_p, c.presence_penalty, c.frequency_penalty, c.repeat_penalty),
        ),
        _words("<iI", ("penalty_last_n", "logit bias count"), (c.penalty_last_n, len(biases))),
    ]
    for token, bias in biases:
        parts += [_words("<i", ("logit bias token",), (token,)), pack_f32(("logit bias",), (bias,))]
    parts += [
        pack_f32(
            ("typical_p", "top_nsigma", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base"),
            (c.typical_p, c.top_nsigma, c.dynatemp_range, c.dynatemp_exponent, c.dry_multiplier, c.dry_base),
        ),
        _words(
            "<ii",
            ("dry_allowed_length", "dry_penalty_last_n"),
            (c.dry_allowed_length, c.dry_penalty_last_n),
        ),
        _strings("dry_sequence_breakers", c.dry_sequence_breakers[:MAX_STAGE_DRY_SEQUENCE_BREAKERS]),
        pack_f32(("xtc_probability", "xtc_threshold"), (c.xtc_probability, c.xtc_threshold)),
        _words("<i", ("mirostat_mode",), (c.mirostat_mode,)),
        pack_f32(
            ("mirostat_entropy", "mirostat_learning_rate"), (c.mirostat_entropy, c.mirostat_learning_rate)
        ),
        _strings("samplers", c.samplers[:MAX_STAGE_SAMPLERS]),
        _U32.pack(bool(c.ignore_eos)),
    ]
    return b"".join(parts)


def _words(layout: str, names: Sequence[str], values: Sequence[int]) -> bytes:
    try:
        return struct.pack(layout, *values)
    except struct.error:
        pairs = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise LocalProtocolError(f"sampling {pairs}: not within the 32 bits of the field") from None


def _strings(name: str, strings: Sequence[str]) -> bytes:
    parts = [_U32.pack(len(strings))]
    for string in strings:
        try:
            data = string.encode()
        except UnicodeEncodeError:
            raise LocalProtocolError(f"sampling {name}: {string!r} cannot be encoded as UTF-8") from None
        if len(data) > MAX_STAGE_SAMPLING_STRING_BYTES:
            raise LocalProtocolError(
                f"sampling {name}: a string of {len(data)} bytes; at most "
                f"{MAX_STAGE_SAMPLING_STRING_BYTES} are allowed",
                ErrorKind.INVALID_DATA,
            )
        parts += [_U32.pack(len(data)), data]
    return b"".join(parts)

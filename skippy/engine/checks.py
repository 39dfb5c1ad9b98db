"""What every engine checks before it computes: the rules of ``decode`` and of the sequence calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .base import ContextFullError, EngineInfo, Segment

TokenArray = npt.NDArray[np.int32]


def token_array(tokens: Sequence[int], vocab_size: int) -> TokenArray:
    """``tokens`` as int32, shape ``[n]``. Raises ValueError for an id outside ``0 … vocab_size-1``."""
    if len(tokens) == 1 and type(tokens[0]) is int and 0 <= tokens[0] < vocab_size:
        return np.array(tokens, dtype=np.int32)  # a decode step: no need for the general checks
    try:
        array = np.asarray(tokens, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"token ids are not integers: {error}") from None
    if array.ndim != 1:
        raise ValueError("token ids must be a flat sequence")
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        bad = int(array[(array < 0) | (array >= vocab_size)][0])
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    return array.astype(np.int32)


def check_sequence(info: EngineInfo, sequence: int) -> None:
    """Raises ValueError unless ``sequence`` is an id of this engine."""
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        raise ValueError(f"sequence id must be an integer, not {sequence!r}")
    if not 0 <= sequence < info.max_sequences:
        raise ValueError(f"sequence {sequence} is outside 0 … {info.max_sequences - 1}")


def check_trim(info: EngineInfo, sequence: int, present: int, length: int) -> None:
    """Raises ValueError unless a sequence of ``present`` positions can be shortened to ``length``."""
    check_sequence(info, sequence)
    if not 0 <= length <= present:
        raise ValueError(f"sequence {sequence} holds {present} positions, cannot be trimmed to {length}")


def check_copy(
    info: EngineInfo, source: int, target: int, held: int, target_held: int, length: int | None
) -> int:
    """The number of positions to copy. Raises ValueError where :meth:`StageEngine.copy` must not run."""
    check_sequence(info, source)
    check_sequence(info, target)
    if source == target:
        raise ValueError(f"sequence {source} cannot be copied to itself")
    if target_held:
        raise ValueError(f"sequence {target} is not empty")
    wanted = held if length is None else length
    if not 0 <= wanted <= held:
        raise ValueError(f"sequence {source} holds {held} positions, {wanted} cannot be copied")
    return wanted


def check_part(info: EngineInfo, sequence: int, held: int, length: int | None) -> int:
    """The positions to export. Raises ValueError unless ``sequence`` holds as many."""
    check_sequence(info, sequence)
    wanted = held if length is None else length
    if not 0 <= wanted <= held:
        raise ValueError(f"sequence {sequence} holds {held} positions, {wanted} cannot be exported")
    return wanted


def check_difference(
    info: EngineInfo, first: int, second: int, held: int, second_held: int, length: int
) -> None:
    """Raises ValueError where :meth:`StageEngine.difference` must not run."""
    check_sequence(info, first)
    check_sequence(info, second)
    for sequence, positions in ((first, held), (second, second_held)):
        if not 0 <= length <= positions:
            raise ValueError(f"sequence {sequence} holds {positions} positions, {length} cannot be compared")
        if positions != length and not info.can_trim:
            raise ValueError(
                f"sequence {sequence} holds {positions} positions, and this model's state is compared whole"
            )


def check_batch(
    info: EngineInfo, lengths: Sequence[int], segments: Sequence[Segment], output: memoryview | None
) -> list[TokenArray | None]:
    """Check a whole batch before anything runs.

    Args:
        info: the engine's description.
        lengths: positions held now, by sequence id.
        segments, output: the arguments of ``decode``.

    Returns:
        One int32 token array per segment where token ids are taken, else None per segment.

    Raises:
        ValueError, ContextFullError: as :meth:`StageEngine.decode` promises.
    """
    if not segments:
        raise ValueError("a batch needs at least one segment")
    rows = 0
    seen: set[int] = set()
    tokens: list[TokenArray | None] = []
    for segment in segments:
        sequence = segment.sequence
        check_sequence(info, sequence)
        if sequence in seen:
            raise ValueError(f"sequence {sequence} is in the batch twice")
        seen.add(sequence)
        try:
            tokens.append(_check_segment(info, lengths[sequence], segment))
        except ValueError as error:
            raise ValueError(f"sequence {sequence}: {error}") from None
        rows += segment.count
    if rows > info.max_batch:
        raise ValueError(f"batch of {rows} rows, at most {info.max_batch} fit")
    _check_output(info, rows, output)
    for segment in segments:
        if segment.position + segment.count > info.context_length:
            raise ContextFullError(
                f"sequence {segment.sequence}: {segment.position} + {segment.count} positions exceed the "
                f"context of {info.context_length}"
            )
    return tokens


def check_finite(segments: Sequence[Segment]) -> None:
    """Raises ValueError for an activation with NaN or infinity.

    Attention masks the cells of others, and those that nobody holds any more, by adding minus infinity, which
    a NaN survives. Dropping a sequence leaves what was in its cells, so one such row would spoil whoever has
    them next, and in a unified cache everybody.
    """
    for segment in segments:
        if segment.activation is None:
            continue
        if not np.isfinite(np.frombuffer(segment.activation, np.float32)).all():
            raise ValueError(
                f"sequence {segment.sequence}: the activation holds NaN or infinity, which the cache would "
                "pass on to other requests"
            )


def _check_segment(info: EngineInfo, length: int, segment: Segment) -> TokenArray | None:
    if segment.count < 1:
        raise ValueError(f"segment of {segment.count} rows")
    if segment.position != length:
        raise ValueError(f"position {segment.position}, but the sequence holds {length} positions")
    if not 0 <= segment.logits <= segment.count:
        raise ValueError(f"{segment.logits} rows of logits asked of {segment.count} rows")
    if segment.logits and not info.is_last:
        raise ValueError("logits asked of a stage that is not the last")
    takes = (info.is_first or info.takes_tokens, not info.is_first)
    if takes != (segment.tokens is not None, segment.activation is not None):
        raise ValueError(f"a stage at layer {info.layer_start} takes " + _input_name(info))
    tokens = None
    if segment.tokens is not None:
        if len(segment.tokens) != segment.count:
            raise ValueError(f"{len(segment.tokens)} tokens for {segment.count} rows")
        tokens = token_array(segment.tokens, info.vocab_size)
    if segment.activation is None:
        return tokens
    expected = segment.count * info.input_width * 4
    if segment.activation.nbytes != expected or not segment.activation.c_contiguous:
        raise ValueError(
            f"activation of {segment.activation.nbytes} bytes, expected {expected} contiguous "
            f"({segment.count} rows of {info.input_width} f32)"
        )
    return tokens


def _input_name(info: EngineInfo) -> str:
    if info.is_first:
        return "token ids alone"
    return "activations and token ids" if info.takes_tokens else "activations alone"


def _check_output(info: EngineInfo, rows: int, output: memoryview | None) -> None:
    if info.is_last:
        if output is not None:
            raise ValueError("the last stage has no boundary output")
        return
    expected = rows * info.output_width * 4
    if output is None:
        raise ValueError(f"a boundary output of {expected} bytes is needed")
    if output.readonly or not output.c_contiguous:
        raise ValueError("the boundary output must be writable and contiguous")
    if output.nbytes != expected:
        raise ValueError(
            f"boundary output of {output.nbytes} bytes, expected {expected} ({rows} rows of "
            f"{info.output_width} f32)"
        )

"""An exact engine without a model, for tests and simulation.

All values are integers below 65521, kept in f32, so every operation is exact: a chain gives the same logits
as the unsplit engine for any split, any chunking and any batching. Each layer keeps a running sum over its
sequence whose terms depend on row and position, so a row that is lost, repeated, moved or put into another
sequence changes every later logit. Nothing here is random and nothing waits.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from skippy.protocol.messages import SamplingConfig

from .base import (
    ContextFullError,
    EngineError,
    EngineInfo,
    FloatArray,
    Sampler,
    Segment,
    StageEngine,
    StateBytes,
    Vocabulary,
)
from .checks import (
    TokenArray,
    check_batch,
    check_copy,
    check_difference,
    check_part,
    check_sequence,
    check_trim,
)
from .running import RunningDecode
from .toy_sampler import ToySampler
from .toy_vocabulary import TOY_TOKENS, ToyVocabulary

IntArray = npt.NDArray[np.int64]

_PRIME: Final = 65521  # products of two values stay below 2**32, far from the limits of int64
_LOGIT_STEPS: Final = 1021
_STATE_HEADER: Final = struct.Struct("<8s6I16s")
_STATE_MAGIC: Final = b"SKTOY\x00\x00\x01"


@attrs.frozen(slots=True)
class _Weights:
    """Constants of one toy model; the same for every split of it."""

    token: IntArray  # [vocab_size, width]
    head: IntArray  # [width, vocab_size]
    raised: IntArray  # [vocab_size], added to the logits in steps

    @classmethod
    @functools.cache
    def of(cls, vocab_size: int, width: int) -> _Weights:
        ids = np.arange(vocab_size, dtype=np.int64)[:, None]
        columns = np.arange(width, dtype=np.int64)[None, :]
        token = (ids * 40503 + columns * 9176 + (ids * ids * (columns + 3)) % 8191 + 17) % _PRIME
        head = ((ids * 31 + 7) * (columns * columns + 11) + ids * ids) % 997 + 1
        raised = np.zeros(vocab_size, dtype=np.int64)
        raised[32:127] = _LOGIT_STEPS  # printable ASCII wins, so that greedy output is readable text
        weights = cls(token, np.ascontiguousarray(head.T), raised)
        for array in attrs.astuple(weights, recurse=False):
            array.setflags(write=False)  # many engines share them
        return weights


class ToyEngine(StageEngine):
    """Layers ``[layer_start, layer_end)`` of a toy model of ``layer_count`` layers.

    Args:
        layer_start, layer_end, layer_count: the stage's range and the model's depth.
        width: f32 values per boundary row.
        vocab_size: rows of the logits, at least 260 (bytes and special tokens).
        context_length, max_sequences, max_batch: as in :class:`~skippy.engine.EngineInfo`.
        end_at: position from which the end-of-sequence token has the highest logit; None: never, so
            greedy generation ends by length only. The same for all stages.

    Attributes:
        fail_next: an exception the next ``decode`` raises instead of computing (for tests); the sequences
            are then as they were before. Reset when raised.
        decodes: how many ``decode`` calls succeeded.
    """

    def __init__(
        self,
        layer_start: int = 0,
        layer_end: int = 4,
        layer_count: int = 4,
        *,
        width: int = 8,
        vocab_size: int = TOY_TOKENS,
        context_length: int = 512,
        max_sequences: int = 4,
        max_batch: int = 512,
        end_at: int | None = None,
    ) -> None:
        if not 0 <= layer_start < layer_end <= layer_count:
            raise ValueError(f"layers {layer_start}:{layer_end} are not within 0:{layer_count}")
        if vocab_size < TOY_TOKENS:
            raise ValueError(f"vocab_size must be at least {TOY_TOKENS}, not {vocab_size}")
        first, last = layer_start == 0, layer_end == layer_count
        self._info = EngineInfo(
            layer_start=layer_start,
            layer_end=layer_end,
            layer_count=layer_count,
            input_width=0 if first else width,
            output_width=0 if last else width,
            hidden_size=width,
            vocab_size=vocab_size if first or last else 0,
            context_length=context_length,
            max_batch=max_batch,
            max_sequences=max_sequences,
            pooling="last" if first and last else None,
            kv_bytes=(layer_end - layer_start) * max_sequences * context_length * width * 4,
            position_bytes=(layer_end - layer_start) * width * 4,
        )
        self._weights = _Weights.of(vocab_size, width)
        self._vocabulary = ToyVocabulary(vocab_size) if first or last else None
        self._end_at = end_at
        self._offsets = np.arange(context_length, dtype=np.int64)[:, None] * 2654435 + 12289
        self._left = np.arange(-1, width - 1)
        """Of each column the one to its left, and of the first the last."""
        self._lengths = [0] * max_sequences
        self._sums: dict[int, npt.NDArray[np.int32]] = {}  # by sequence: [layers, context_length, width]
        self._logits: list[FloatArray] = []
        self._running = RunningDecode()
        self.fail_next: Exception | None = None
        self.decodes = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self._vocabulary

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        tokens = check_batch(self._info, self._lengths, segments, output)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._logits = []
        self._running.begin(segments)
        try:
            logits = self._run_all(segments, tokens, output)
        finally:
            self._running.end()
        self._logits = logits
        for segment in segments:  # what lies beyond a sequence's length is not looked at
            self._lengths[segment.sequence] += segment.count
        self.decodes += 1

    def embed(self, segment: Segment) -> FloatArray:
        if self._info.pooling is None:
            raise EngineError("only a stage that has all layers gives embeddings")
        (ids,) = check_batch(self._info, self._lengths, [segment], None)
        rows = self._run(segment, ids)
        self._lengths[segment.sequence] += segment.count
        return (rows / _PRIME).astype(np.float32)

    def abort(self, segments: Sequence[Segment] | None = None) -> bool:
        return self._running.abort(segments)

    def _run_all(
        self, segments: Sequence[Segment], tokens: Sequence[TokenArray | None], output: memoryview | None
    ) -> list[FloatArray]:
        boundary = None if output is None else np.frombuffer(output, dtype=np.float32)
        logits: list[FloatArray] = []
        start = 0
        for segment, ids in zip(segments, tokens, strict=True):
            if self._running.aborted:
                break
            rows = self._run(segment, ids)
            if boundary is not None:
                stop = start + rows.size
                boundary[start:stop] = rows.ravel()
                start = stop
            if segment.logits:
                logits.extend(self._head(rows[-segment.logits :], segment))
        return logits

    def _run(self, segment: Segment, ids: TokenArray | None) -> IntArray:
        """The segment's rows after the last layer, shape ``[count, width]``."""
        first, stop = segment.position, segment.position + segment.count
        if ids is not None:
            rows = self._weights.token[ids]
        else:
            assert segment.activation is not None
            with np.errstate(invalid="ignore"):  # a peer may send NaN; that is garbage out, not an error
                rows = np.frombuffer(segment.activation, dtype="<f4").astype(np.int64) % _PRIME
            rows = rows.reshape(segment.count, self._info.hidden_size)
        sums = self._storage(segment.sequence)
        if segment.count == 1:
            return self._run_row(rows[0].tolist(), first, sums)
        positions = self._offsets[first:stop]
        for index, layer in enumerate(range(self._info.layer_start, self._info.layer_end)):
            terms = (rows * (rows + positions * (layer + 1)) + positions) % _PRIME
            if first:
                terms[0] += sums[index, first - 1]
            running = terms.cumsum(axis=0) % _PRIME
            sums[index, first:stop] = running
            turned = running.take(self._left, axis=1)
            rows = (rows * (2 * layer + 3) + running * turned + layer) % _PRIME
        return rows

    def _run_row(self, row: list[int], position: int, sums: npt.NDArray[np.int32]) -> IntArray:
        """The same as above for one row: Python integers are faster than numpy on eight values."""
        offset = position * 2654435 + 12289
        for index, layer in enumerate(range(self._info.layer_start, self._info.layer_end)):
            before = sums[index, position - 1].tolist() if position else [0] * len(row)
            shift, scale = offset * (layer + 1), 2 * layer + 3
            running = [
                ((x * (x + shift) + offset) % _PRIME + s) % _PRIME for x, s in zip(row, before, strict=True)
            ]
            sums[index, position] = running
            row = [(x * scale + running[i] * running[i - 1] + layer) % _PRIME for i, x in enumerate(row)]
        return np.array([row], dtype=np.int64)

    def _storage(self, sequence: int) -> npt.NDArray[np.int32]:
        sums = self._sums.get(sequence)
        if sums is None:
            info = self._info
            shape = (info.layer_end - info.layer_start, info.context_length, info.hidden_size)
            sums = self._sums[sequence] = np.empty(shape, dtype=np.int32)
        return sums

    def _head(self, rows: IntArray, segment: Segment) -> FloatArray:
        """Logits, shape ``[rows, vocab_size]``: multiples of 1/64, so exact and with few ties."""
        steps = (rows @ self._weights.head) % _LOGIT_STEPS + self._weights.raised
        if self._end_at is not None:
            end = segment.position + segment.count
            positions = np.arange(end - len(rows), end)
            steps[positions >= self._end_at, ToyVocabulary.EOS] += 4 * _LOGIT_STEPS
        return (steps / 64.0).astype(np.float32)

    def logits(self, index: int) -> FloatArray:
        if not 0 <= index < len(self._logits):
            raise ValueError(f"logits row {index} was not asked for, there are {len(self._logits)}")
        return self._logits[index]

    def new_sampler(self, settings: SamplingConfig | None, chat_metadata: str | None = None) -> Sampler:
        if not self._info.is_last:
            raise ValueError("only the last stage samples")
        return ToySampler(self._info.vocab_size, self._info.context_length, settings, chat_metadata)

    def length(self, sequence: int) -> int:
        check_sequence(self._info, sequence)
        return self._lengths[sequence]

    def trim(self, sequence: int, length: int) -> None:
        check_sequence(self._info, sequence)
        check_trim(self._info, sequence, self._lengths[sequence], length)
        self._lengths[sequence] = length

    def drop(self, sequence: int) -> None:
        check_sequence(self._info, sequence)
        self._lengths[sequence] = 0
        self._sums.pop(sequence, None)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        held, target_held = self.length(source), self.length(target)
        count = check_copy(self._info, source, target, held, target_held, length)
        if count:
            self._storage(target)[:, :count] = self._storage(source)[:, :count]
        self._lengths[target] = count

    def export_state(self, sequence: int, length: int | None = None) -> memoryview:
        length = check_part(self._info, sequence, self.length(sequence), length)
        body = self._storage(sequence)[:, :length].tobytes() if length else b""
        return memoryview(self._state_header(length, body) + body)

    def free_positions(self) -> int | None:
        return None

    def _state_header(self, length: int, body: bytes | memoryview) -> bytes:
        info = self._info
        digest = hashlib.blake2b(body, digest_size=16).digest()
        sizes = (
            info.layer_start,
            info.layer_end,
            info.layer_count,
            info.hidden_size,
            info.vocab_size,
            length,
        )
        return _STATE_HEADER.pack(_STATE_MAGIC, *sizes, digest)

    def import_state(self, sequence: int, state: StateBytes) -> None:
        if self.length(sequence):
            raise ValueError(f"sequence {sequence} is not empty")
        if not isinstance(state, bytes | bytearray | memoryview):
            state = b"".join(state)
        view = memoryview(state).cast("B")
        if len(view) < _STATE_HEADER.size:
            raise EngineError(f"sequence state of {len(view)} bytes is shorter than its header")
        body = view[_STATE_HEADER.size :]
        length = int.from_bytes(view[28:32], "little")
        info = self._info
        shape = (info.layer_end - info.layer_start, length, info.hidden_size)
        fits = len(body) == shape[0] * shape[1] * shape[2] * 4
        if not fits or bytes(view[: _STATE_HEADER.size]) != self._state_header(length, body):
            raise EngineError("sequence state is damaged or of another stage")
        if length > info.context_length:
            raise ContextFullError(f"state of {length} positions, the context holds {info.context_length}")
        if length:
            self._storage(sequence)[:, :length] = np.frombuffer(body, dtype=np.int32).reshape(shape)
        self._lengths[sequence] = length

    def difference(self, first: int, second: int, length: int) -> float:
        check_difference(self._info, first, second, self.length(first), self.length(second), length)
        if not length:
            return 0.0
        one, other = (self._storage(sequence)[:, :length].astype(np.int64) for sequence in (first, second))
        return float(np.abs(one - other).max())

    def close(self) -> None:
        self._sums.clear()
        self._logits = []

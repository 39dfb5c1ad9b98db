"""One stage on llama.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from skippy.engine.base import (
    ContextFullError,
    EngineError,
    EngineInfo,
    FloatArray,
    ModelLoadError,
    Sampler,
    Segment,
    StageEngine,
    StateBytes,
    Vocabulary,
)
from skippy.engine.checks import (
    TokenArray,
    check_batch,
    check_copy,
    check_difference,
    check_finite,
    check_part,
    check_sequence,
    check_trim,
    token_array,
)
from skippy.engine.options import EngineOptions
from skippy.engine.running import RunningDecode
from skippy.engine.tap import Tap, create_tap
from skippy.models import SliceInfo
from skippy.protocol.messages import SamplingConfig

from .adapter import load_adapter, set_adapters
from .batch import NativeBatch
from .boundary import BoundaryRows, InputRows, tap_points
from .description import describe, has_vocabulary, position_sections, row_order
from .loading import LoadProgress, create_context, load_model, set_abort_flag, takes_embeddings
from .memory import CacheSizes, MemoryKind, SequenceMemory
from .native import api, ggml_functions, initialise, silenced
from .order import NativeCall, plan_calls
from .sampler import LlamaSampler
from .state import StateFormat
from .vocabulary import LlamaVocabulary

_NO_SLOT = 1  # llama_decode: the cache has no room for the batch; nothing was changed
_ABORTED = 2


class LlamaEngine(StageEngine):
    """Layers of a GGUF on stock llama.cpp. Made by :meth:`load`.

    The segments of a batch share one native decode where :class:`RowOrder` says that their rows can be told
    apart afterwards; what shares it moves a row's numbers a little, as another chunk size does. The engine
    keeps the length of every sequence itself and checks every call against it, because llama.cpp ends the
    process on ids, positions and sizes that do not fit.
    """

    def __init__(
        self, model: int, context: int, slice_info: SliceInfo, options: EngineOptions, tap: Tap | None
    ):
        self._model = model
        self._context = context
        self._tap = tap
        self._inputs, self._outputs = slice_info.inputs, slice_info.outputs
        kind = MemoryKind.of(model, options)
        self._memory = SequenceMemory(context, kind, StateFormat.of(slice_info, options))
        self._vocabulary = LlamaVocabulary(model) if has_vocabulary(model, slice_info) else None
        self._order = row_order(kind)
        self._ubatch = int(api.llama_n_ubatch(context))
        self._info = describe(model, context, slice_info, options, tap, kind)
        self._batch = NativeBatch(
            rows=self._info.max_batch,
            width=slice_info.hidden_size if takes_embeddings(slice_info) else 0,
            position_sections=position_sections(model),
            all_outputs=not slice_info.is_last and slice_info.spare_layers == 0,
        )
        self._logits: list[FloatArray] = []
        self._ran = False  # some rows of the last decode were computed
        self._running = RunningDecode()
        self._aborts = set_abort_flag(context, self._running.flag)
        self._info = self._measure(kind)

    @classmethod
    def load(
        cls,
        slice_info: SliceInfo,
        options: EngineOptions | None = None,
        progress: LoadProgress | None = None,
    ) -> LlamaEngine:
        """Load a slice. Blocks for as long as reading the file takes.

        ``progress`` is called with the loaded part, 0.0 to 1.0, on this thread; an exception in it ends the
        loading and is raised here.

        Raises:
            ModelLoadError: the file cannot be loaded or used, or the settings do not fit it.
        """
        options = options or EngineOptions()
        initialise()
        model = load_model(slice_info, options, progress)
        context = 0
        try:
            if not slice_info.is_last and not slice_info.outputs:
                raise ModelLoadError(f"{slice_info.path} names no boundary node")
            points = tap_points(slice_info)
            tap = create_tap(ggml_functions(), points, options.tap) if points else None
            # llama.cpp frees adapters with their model, and wants to know of them before there is a context.
            adapters = [load_adapter(model, path) for path, _ in options.adapters]
            context = create_context(model, slice_info, options, tap)
            if adapters:
                set_adapters(context, adapters, [scale for _, scale in options.adapters])
            return cls(model, context, slice_info, options, tap)
        except BaseException:
            if context:
                api.llama_free(context)
            api.llama_model_free(model)
            raise

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def vocabulary(self) -> Vocabulary | None:
        return self._vocabulary

    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        self._check_usable()
        tokens = check_batch(self._info, self._memory.lengths, segments, output)
        check_finite(segments)
        self._logits = []
        calls = plan_calls(segments, self._order, self._ubatch)
        if len(calls) > 1:  # one call is refused as a whole by llama.cpp
            self._memory.check_room(sum(segment.count for segment in segments))
        self._ran = False
        logits: list[Sequence[FloatArray]] = [()] * len(segments)
        self._running.begin(segments)
        try:
            try:
                for call in calls:
                    self._run(call, segments, tokens, output)
                    if self._info.is_last:
                        # The next native decode overwrites llama.cpp's buffer.
                        self._take_logits(call, segments, logits, copy=len(calls) > 1)
            finally:
                self._running.end()
        except BaseException:
            self._memory.rewind([segment.sequence for segment in segments], ran=self._ran)
            raise
        self._logits = list(itertools.chain.from_iterable(logits))
        for segment in segments:
            self._memory.lengths[segment.sequence] += segment.count

    def embed(self, segment: Segment) -> FloatArray:
        self._check_usable()
        if self._info.pooling is None:
            raise EngineError("this model part gives no embeddings")
        api.llama_set_embeddings(self._context, True)
        try:
            self.decode([attrs.evolve(segment, logits=segment.count)])
            pointer = api.llama_get_embeddings(self._context)
            if not pointer:
                raise EngineError("llama.cpp gave no embeddings")
            size = self._info.hidden_size
            buffer = (ctypes.c_float * (segment.count * size)).from_address(
                ctypes.addressof(pointer.contents)
            )
            return np.frombuffer(memoryview(buffer), dtype=np.float32).reshape(-1, size).copy()
        finally:
            self._logits = []
            api.llama_set_embeddings(self._context, False)

    def abort(self, segments: Sequence[Segment] | None = None) -> bool:
        return self._aborts and self._running.abort(segments)

    def _run(
        self,
        call: NativeCall,
        segments: Sequence[Segment],
        tokens: Sequence[TokenArray | None],
        output: memoryview | None,
    ) -> None:
        part = [segments[index] for index in call.segments]
        if self._info.is_first or self._inputs:
            ids = [found for index in call.segments if (found := tokens[index]) is not None]
            batch = self._batch.of_tokens(part, ids)
        else:
            batch = self._batch.of_activations(part)
        kept, boundary = self._arm(call, segments, output)
        code = api.llama_decode(self._context, batch)
        if code == _NO_SLOT:
            names = ", ".join(str(segment.sequence) for segment in part)
            raise ContextFullError(f"the cache has no room for {batch.n_tokens} more rows (sequence {names})")
        self._ran = True
        if code != 0:
            raise EngineError(f"llama.cpp could not decode {batch.n_tokens} rows (code {code})")
        if self._tap is not None:
            self._tap.finish()
        del kept  # the rows that went in
        if boundary is not None:
            boundary.deliver()

    def _arm(
        self, call: NativeCall, segments: Sequence[Segment], output: memoryview | None
    ) -> tuple[InputRows | None, BoundaryRows | None]:
        """Tell the tap where the rows of a native decode are, and where they go."""
        if self._tap is None:
            return None, None
        inputs = InputRows(call, segments, self._inputs) if self._inputs else None
        boundary = BoundaryRows(call.runs, output, self._outputs) if output is not None else None
        index = 0
        for address, size in inputs.sources if inputs is not None else ():
            self._tap.arm(index, address, size)
            index += 1
        for address, size in boundary.targets() if boundary is not None else ():
            self._tap.arm(index, address, size)
            index += 1
        return inputs, boundary

    def _take_logits(
        self,
        call: NativeCall,
        segments: Sequence[Segment],
        logits: list[Sequence[FloatArray]],
        *,
        copy: bool,
    ) -> None:
        """Give each segment of a call its rows of llama.cpp's logits, which are in the order of the batch."""
        total = sum(segments[index].logits for index in call.segments)
        if not total:
            return
        rows = self._native_logits(total)
        start = 0
        for index in call.segments:
            stop = start + segments[index].logits
            logits[index] = list(rows[start:stop].copy() if copy else rows[start:stop])
            start = stop

    def _native_logits(self, rows: int) -> FloatArray:
        # Only the rows that were asked for are flagged as outputs, so they are the whole buffer.
        pointer = api.llama_get_logits(self._context)
        if not pointer:
            raise EngineError("llama.cpp gave no logits")
        size = self._info.vocab_size
        buffer = (ctypes.c_float * (rows * size)).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(buffer), dtype=np.float32).reshape(rows, size)

    def logits(self, index: int) -> FloatArray:
        if not 0 <= index < len(self._logits):
            raise ValueError(f"logits row {index} was not asked for, there are {len(self._logits)}")
        return self._logits[index]

    def new_sampler(self, settings: SamplingConfig | None, chat_metadata: str | None = None) -> Sampler:
        self._check_usable()
        if not self._info.is_last or self._vocabulary is None:
            raise ValueError("only the last stage samples")
        return LlamaSampler(self._vocabulary, self._info.context_length, settings, chat_metadata)

    def length(self, sequence: int) -> int:
        check_sequence(self._info, sequence)
        return self._memory.lengths[sequence]

    def trim(self, sequence: int, length: int) -> None:
        self._check_usable()
        check_trim(self._info, sequence, self.length(sequence), length)
        self._memory.trim(sequence, length)

    def drop(self, sequence: int) -> None:
        check_sequence(self._info, sequence)
        if self._context:
            self._memory.drop(sequence)

    def copy(self, source: int, target: int, length: int | None = None) -> None:
        self._check_usable()
        held, target_held = self.length(source), self.length(target)
        count = check_copy(self._info, source, target, held, target_held, length)
        if not self._info.can_copy:
            raise EngineError("this model's sequences cannot be copied")
        if self._memory.copy(source, target, count):
            self._begin_decode(target)

    def export_state(self, sequence: int, length: int | None = None) -> memoryview:
        self._check_usable()
        count = check_part(self._info, sequence, self.length(sequence), length)
        if not self._info.can_export:
            raise EngineError("this model's state has a format that is not known here")
        return self._memory.export(sequence, count)

    def import_state(self, sequence: int, state: StateBytes) -> None:
        self._check_usable()
        if self.length(sequence):
            raise ValueError(f"sequence {sequence} is not empty")
        self._memory.import_(sequence, state, self._info.context_length)

    def free_positions(self) -> int | None:
        return self._memory.free_cells

    def difference(self, first: int, second: int, length: int) -> float:
        self._check_usable()
        check_difference(self._info, first, second, self.length(first), self.length(second), length)
        return self._memory.difference(first, second, length) if length else 0.0

    def _begin_decode(self, sequence: int) -> None:
        """Let llama.cpp do what it does before it decodes: a row of ``sequence`` that is aborted at once."""
        row, output = self._blank_call(sequence)
        kept = self._arm(NativeCall([0], [(0, 1)]), row, output)
        tokens = row[0].tokens
        if self._info.is_first or self._inputs:
            batch = self._batch.of_tokens(row, [] if tokens is None else [token_array(tokens, 1)])
        else:
            batch = self._batch.of_activations(row)
        self._running.begin(row)
        self._running.abort(row)
        with silenced():
            code = api.llama_decode(self._context, batch)
        with contextlib.suppress(EngineError):
            self._running.end()
        del kept
        self._memory.rewind([sequence], ran=False)
        if code not in (0, _NO_SLOT, _ABORTED):
            self._memory.drop(sequence)
            raise EngineError(f"llama.cpp could not copy to sequence {sequence} (code {code})")

    def _blank_call(self, sequence: int) -> tuple[list[Segment], memoryview | None]:
        """Arguments of ``decode`` for one more row."""
        info, length = self._info, self._memory.lengths[sequence]
        output = None if info.is_last else memoryview(bytearray(info.output_width * 4))
        tokens = [0] if info.is_first or info.takes_tokens else None
        activation = None if info.is_first else memoryview(bytes(info.input_width * 4))
        return [Segment(sequence, length, 1, tokens=tokens, activation=activation)], output

    def _measure(self, kind: MemoryKind) -> EngineInfo:
        """What running a row or two tells about the cache."""
        try:
            self.decode(*self._blank_call(0))
            layout = self._memory.layout(0)
            if layout is None:
                first = self._memory.state_bytes(0)
                self.decode(*self._blank_call(0))
                sizes = CacheSizes.estimated(first, self._memory.state_bytes(0), self._context)
            else:
                sizes = CacheSizes.of(layout, self._context, kind)
        except EngineError as error:
            raise ModelLoadError(f"the model cannot run a row: {error}") from error
        self._memory.drop(0)
        known = layout is not None
        return attrs.evolve(
            self._info,
            can_copy=known or kind.shares_cells,
            can_export=known,
            can_trim_state=known and self._info.can_trim_state,
            position_bytes=sizes.position_bytes,
            sequence_bytes=sizes.sequence_bytes,
            kv_bytes=sizes.kv_bytes,
        )

    def _check_usable(self) -> None:
        if not self._context:
            raise EngineError("this engine is closed")
        if self._memory.failed:
            raise EngineError(f"this engine has failed: {self._memory.failed}")

    def close(self) -> None:
        if self._context:
            context, self._context = self._context, 0
            self._logits = []
            if self._vocabulary is not None:
                self._vocabulary.close()
            api.llama_free(context)
            api.llama_model_free(self._model)

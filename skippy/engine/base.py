"""The interface every engine implements, and the values it takes and gives.

An engine is synchronous and owned by one thread: every method below is called from that
thread only, one call at a time, unless it says otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from skippy.protocol.messages import SamplingConfig

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Pooling = Literal["first", "last", "mean"]
StateBytes = bytes | bytearray | memoryview | Sequence[bytes | memoryview]
"""Exported state: a buffer, or the pieces of one in order."""


class EngineError(Exception):
    """The engine could not do what was asked. Only the rows of that call are affected."""


class ModelLoadError(EngineError):
    """The model file could not be loaded, or does not fit the asked settings."""


class ContextFullError(EngineError):
    """A sequence would grow beyond the context length, or the cache has no free cells."""


@attrs.frozen(slots=True, kw_only=True)
class EngineInfo:
    """What a loaded stage is and can do.

    Attributes:
        layer_start, layer_end: the stage's layers, ``[start, end)``, of the whole model.
        layer_count: layers of the whole model.
        input_width: f32 values per token at the input boundary; 0 where token ids enter (layer_start 0).
        output_width: f32 values per token at the output boundary; 0 on the last stage.
        takes_tokens: a later stage that reads token ids beside the activation.
        hidden_size: the model's embedding length.
        vocab_size: rows of the logits on the last stage; on stage 0, and where token ids are taken, the
            tokenizer's size; else 0.
        context_length: positions one sequence may hold.
        max_batch: rows one ``decode`` may carry.
        max_sequences: native sequences, ids ``0 … max_sequences-1``.
        can_trim: a sequence can be shortened to any length (not so for recurrent state).
        can_trim_state: so can one whose state was imported (not so with windowed layers).
        can_copy: a sequence can be copied to another id, in part if ``can_trim``.
        can_export: sequence state can be exported and imported.
        can_mix: segments of several rows share a native call with each other and with single rows. Where
            they cannot (recurrent and hybrid models, windowed caches without ``swa_full``), single rows of
            several sequences still share one, and each longer segment takes a call of its own.
        pooling: which of a text's rows make its embedding, on a stage that has all layers: the ``first``, the
            ``last``, or the ``mean`` of all, as the model says, and where it says nothing the last, which
            alone has seen the whole text. None: there are no embeddings.
        tap: how the boundary is read: ``"c"``, ``"python"`` or None (last stage, toy).
        weights_bytes, kv_bytes: resident sizes, in bytes.
        position_bytes: what one position of one sequence takes of the cache, in bytes.
        sequence_bytes: what one sequence takes however long it is (recurrent state), in bytes.
    """

    layer_start: int
    layer_end: int
    layer_count: int
    input_width: int
    output_width: int
    hidden_size: int
    vocab_size: int
    context_length: int
    max_batch: int
    max_sequences: int
    takes_tokens: bool = False
    can_trim: bool = True
    can_trim_state: bool = True
    can_copy: bool = True
    can_export: bool = True
    can_mix: bool = True
    pooling: Pooling | None = None
    tap: str | None = None
    weights_bytes: int = 0
    kv_bytes: int = 0
    position_bytes: int = 0
    sequence_bytes: int = 0

    @property
    def is_first(self) -> bool:
        return self.layer_start == 0

    @property
    def is_last(self) -> bool:
        return self.layer_end == self.layer_count


@attrs.frozen(slots=True, eq=False)
class Segment:
    """Consecutive rows of one sequence in a batch.

    ``tokens`` is given on a first stage, ``activation`` on later ones; both where it ``takes_tokens``.

    Attributes:
        sequence: native sequence id.
        position: position of the first row; must equal ``length(sequence)``.
        count: rows, at least 1.
        tokens: ``count`` token ids.
        activation: ``count * input_width`` little-endian f32 (bytes-like, C-contiguous). Read, never
            written; it must stay unchanged until ``decode`` returns.
        logits: 0, or how many rows, counted from the end, get logits (last stage only).
    """

    sequence: int
    position: int
    count: int
    tokens: Sequence[int] | None = None
    activation: memoryview | None = None
    logits: int = 0


class Sampler(abc.ABC):
    """Sampling state of one session on the last stage: settings and token history."""

    @abc.abstractmethod
    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens (prompt or generated) to the history that penalties look at."""

    @abc.abstractmethod
    def sample(self, logits: FloatArray, step: int, allowed: BoolArray | None = None) -> int:
        """Draw the next token from ``logits`` (shape ``[vocab_size]``, not modified).

        ``step`` is the counter of the request's draws: the same (settings, history, logits, step) always
        gives the same token. The token is not accepted; the caller does that. ``allowed``, shape
        ``[vocab_size]``: the tokens to choose from; None: all. EngineError where there is none to choose.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free native state. Safe to call twice."""


class Vocabulary(abc.ABC):
    """Tokenizer of a first or last stage. Safe to use from a thread other than the engine's."""

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @property
    @abc.abstractmethod
    def bos(self) -> int | None: ...

    @property
    @abc.abstractmethod
    def eos(self) -> int | None: ...

    @property
    def sampling_metadata(self) -> Mapping[str, str]:
        """Sampling settings that the model file recommends: its ``general.sampling.*``, without that."""
        return {}

    @property
    @abc.abstractmethod
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template, or None."""

    @property
    @abc.abstractmethod
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of all control and user-defined tokens (what ``parse_special`` would recognise)."""

    @property
    @abc.abstractmethod
    def adds_bos(self) -> bool:
        """Whether ``tokenize(add_special=True)`` puts the BOS token in front."""

    @abc.abstractmethod
    def is_end_of_generation(self, token: int) -> bool: ...

    @abc.abstractmethod
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds BOS/EOS as the model wants; ``parse_special`` turns texts of special tokens
        into those tokens instead of plain text.
        """

    @abc.abstractmethod
    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; b"" for a control token unless ``special``. May split UTF-8."""

    def pieces(self, *, special: bool = False) -> list[bytes]:
        """:meth:`piece` of every token, which takes a tenth of a second and more with a real vocabulary."""
        return [self.piece(token, special=special) for token in range(self.size)]


class StageEngine(abc.ABC):
    """The layers of one stage, with a KV cache of ``max_sequences`` sequences."""

    @property
    @abc.abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    @abc.abstractmethod
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer; None on middle stages, whose slices carry no vocabulary."""

    @abc.abstractmethod
    def decode(self, segments: Sequence[Segment], output: memoryview | None = None) -> None:
        """Run rows through the stage's layers and append them to their sequences.

        ``output`` (non-last stages) receives ``sum(count) * output_width`` f32 in batch order; the boundary
        is written straight into it, and it must have exactly that many bytes.

        Raises:
            ValueError: rows, widths or positions do not fit (nothing was run).
            ContextFullError: no room; every sequence is as it was before.
            EngineError: the native call failed; every sequence was trimmed to where it was, or, where
                that is impossible (recurrent state), dropped.
        """

    @abc.abstractmethod
    def embed(self, segment: Segment) -> FloatArray:
        """As ``decode`` of one segment, but gives the rows behind the last norm: ``[count, hidden_size]``.

        On memory of its own. Takes memory for the logits of all its rows meanwhile, so they should be few.

        Raises:
            EngineError: this engine gives no embeddings (``pooling`` is None); else as ``decode`` does.
        """

    @abc.abstractmethod
    def abort(self, segments: Sequence[Segment] | None = None) -> bool:
        """Make the ``decode`` that runs now fail with EngineError. From any thread; never waits.

        An abort never reaches a later decode: it concerns the one that runs at the time of the call, and with
        ``segments`` only if that was given this very object. So a caller that names its batch needs to know
        neither whether the batch has begun nor whether it is over.

        Returns:
            True: that decode fails, after which its sequences are as ``decode`` promises. False: there is
            none to abort, or this engine cannot abort (no compiled tap library; on a GPU llama.cpp looks at
            the request between parts of the graph only, so it may take until the end of one).
        """

    @abc.abstractmethod
    def logits(self, index: int) -> FloatArray:
        """The ``index``-th requested logits row of the last ``decode``, shape ``[vocab_size]``.

        A view into engine memory, valid until the next ``decode``.
        """

    @abc.abstractmethod
    def new_sampler(self, settings: SamplingConfig | None, chat_metadata: str | None = None) -> Sampler:
        """A sampler for one session; greedy when ``settings`` is None or not enabled (last stage only).

        Raises:
            ValueError: a setting that is not supported or out of range, by name.
        """

    @abc.abstractmethod
    def length(self, sequence: int) -> int:
        """Positions the sequence holds."""

    @abc.abstractmethod
    def trim(self, sequence: int, length: int) -> None:
        """Shorten to ``length`` positions (at most the present length)."""

    @abc.abstractmethod
    def drop(self, sequence: int) -> None:
        """Forget the sequence. Always works."""

    @abc.abstractmethod
    def copy(self, source: int, target: int, length: int | None = None) -> None:
        """Make ``target`` (must be empty) hold the first ``length`` positions of ``source`` (default all).

        Where sequences share a pool of cells, a copy shares those of its source and takes none.

        Raises:
            EngineError: it could not be copied (``target`` is empty), or only part of a state was asked for
                that is one whole (not ``can_trim``; what was imported, where not ``can_trim_state``).
            ContextFullError: a copy that shares nothing has no room.
        """

    @abc.abstractmethod
    def export_state(self, sequence: int, length: int | None = None) -> memoryview:
        """Serialised state of the first ``length`` positions (default all), read-only, on memory of its own.

        Readable only by the same slice with the same settings, though with any number of sequences and any
        context that is long enough. Equal states are equal bytes if sequences have room of their own and
        ``can_trim_state``.

        Raises:
            EngineError: part of a state that is one whole (not ``can_trim_state``).
        """

    @abc.abstractmethod
    def import_state(self, sequence: int, state: StateBytes) -> None:
        """Replace an empty sequence's state. ``state`` is not copied if it is one buffer.

        Raises:
            EngineError: it is damaged, of another slice, or could not be restored; the sequence is empty.
            ContextFullError: it has more positions than the context, or than are free; likewise.
        """

    @abc.abstractmethod
    def free_positions(self) -> int | None:
        """Positions that all sequences together can still take, where they share one pool of cells.

        A batch of more rows than that raises ContextFullError. None where each sequence has room of its own.
        """

    @abc.abstractmethod
    def difference(self, first: int, second: int, length: int) -> float:
        """Largest absolute difference of what two sequences hold for their first ``length`` positions.

        0.0 where all bytes are equal. Values are compared as attention reads them, those of quantised caches
        dequantised; infinite where one side is not a number. Recurrent state is compared as a whole. Of
        windowed layers, what both sides still hold is compared.

        Raises:
            ValueError: a sequence holds fewer positions, or more where the state is one whole (not
                ``can_trim``).
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free the model. Safe to call twice."""

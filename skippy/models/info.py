"""What a model file or a slice says about itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import attrs

from skippy.models.boundary import BoundaryPart, format_parts, parse_parts, total_width
from skippy.models.errors import GGUFError, show
from skippy.models.gguf import GGUFHeader, LazyArray
from skippy.models.parts import read_gguf

SLICE_PREFIX = "skippy.slice."
_INT32 = (1 << 31) - 1  # llama.cpp counts tokens in 32 bits
_MAX_WIDTH = 1 << 20  # the widest real models have some 20 000
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


def split_layer_name(name: str) -> tuple[int, str] | None:
    """``blk.7.attn_q.weight`` as ``(7, "attn_q.weight")``; None for tensors outside the layers."""
    match = _LAYER_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def layer_count(header: GGUFHeader) -> int:
    """Layers of the file, spare ones included, without those for multi-token prediction.

    Raises:
        GGUFError: the count is missing, zero, or larger than the tensors in the file allow.
    """
    architecture = header.text("general.architecture")
    blocks = header.count(f"{architecture}.block_count")
    count = blocks - header.count(f"{architecture}.nextn_predict_layers", 0)
    if not 0 < count <= blocks <= len(header.tensors):
        raise GGUFError(header.path, f"{blocks} layers do not fit a file with {len(header.tensors)} tensors")
    return count


def refuse_shards(header: GGUFHeader) -> None:
    """Raise GGUFError for one file of several, read by itself."""
    shards = header.count("split.count", 1)
    if shards > 1:
        raise GGUFError(header.path, f"one of {shards} files of a model, which have to be read together")


def vocabulary_size(header: GGUFHeader) -> int:
    """Entries of the tokenizer, else the metadata's ``vocab_size``, else 0."""
    tokens = header.value("tokenizer.ggml.tokens")
    if isinstance(tokens, LazyArray):
        return len(tokens)
    size = header.count(f"{header.text('general.architecture')}.vocab_size", 0)
    if size > _INT32:
        raise GGUFError(header.path, f"damaged: a vocabulary of {size} tokens")
    return size


def hidden_size(header: GGUFHeader) -> int:
    """Values per token between layers; GGUFError unless it is a sensible number."""
    size = header.count(f"{header.text('general.architecture')}.embedding_length")
    if not 0 < size <= _MAX_WIDTH:
        raise GGUFError(header.path, f"damaged: an embedding length of {size}")
    return size


def is_tied(header: GGUFHeader) -> bool:
    """Whether the head uses the token embedding's weights (there is no ``output.weight``)."""
    return "output.weight" not in header.tensors


@attrs.frozen(slots=True, kw_only=True)
class SliceInfo:
    """A file that one stage can load: a whole model, or a slice of one.

    Attributes:
        path: the file.
        architecture: ``general.architecture``.
        layer_start, layer_end: real layers ``[start, end)`` in the whole model's numbering.
        layer_count: layers of the whole model.
        front_layers, spare_layers: all-zero layers before the real ones, and behind them, the latter never to
            be computed.
        hidden_size: f32 values per row at a boundary.
        context_length: positions the model was trained for; 0 when the file does not say.
        vocab_size: tokens of the whole model, also for slices without a vocabulary.
        inputs: graph nodes that the input boundary overwrites, numbered as in this file; empty where tokens
            enter, or the boundary is fed as embeddings.
        outputs: graph nodes of the output boundary; empty on a last slice.
        takes_tokens: a later slice that reads token ids beside the boundary.
        tied: the whole model's head shares the token embedding's weights.
        source_sha256: hash of the file a slice was cut from; None for a whole model.
        file_bytes: the file's length; a sparse file takes less on disk.
        content_sha256: digest of what of a layer package or a checkpoint is in it; None of anything else.
    """

    path: Path
    architecture: str
    layer_start: int
    layer_end: int
    layer_count: int
    front_layers: int
    spare_layers: int
    hidden_size: int
    context_length: int
    vocab_size: int
    inputs: tuple[BoundaryPart, ...]
    outputs: tuple[BoundaryPart, ...]
    takes_tokens: bool
    tied: bool
    source_sha256: str | None
    file_bytes: int
    content_sha256: str | None = None

    @property
    def own_layers(self) -> int:
        """Real layers in the file."""
        return self.layer_end - self.layer_start

    @property
    def file_layers(self) -> int:
        """Layers in the file, spare ones included."""
        return self.front_layers + self.own_layers + self.spare_layers

    @property
    def input_width(self) -> int:
        """f32 values per row at the input boundary; 0 where tokens enter."""
        return 0 if self.is_first else total_width(self.inputs) or self.hidden_size

    @property
    def output_width(self) -> int:
        """f32 values per row at the output boundary; 0 on a last slice."""
        return total_width(self.outputs)

    @property
    def is_first(self) -> bool:
        return self.layer_start == 0

    @property
    def is_last(self) -> bool:
        return self.layer_end == self.layer_count

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> SliceInfo:
        """Read what ``path`` is.

        Raises:
            GGUFError: not a readable GGUF, one of several files missing, or contradicting slice keys.
        """
        return cls.from_header(read_gguf(path))

    @classmethod
    def from_header(cls, header: GGUFHeader) -> SliceInfo:
        """As :meth:`from_file`, for a header already read."""
        refuse_shards(header)
        architecture = header.text("general.architecture")
        count = layer_count(header)
        start, end, total, front, spare, sha256 = 0, count, count, 0, 0, None
        vocab, tied, takes_tokens = vocabulary_size(header), is_tied(header), False
        inputs: tuple[BoundaryPart, ...] = ()
        outputs: tuple[BoundaryPart, ...] = ()
        if is_slice(header):
            start, end, total, front, spare = (
                header.count(SLICE_PREFIX + key)
                for key in ("layer_start", "layer_end", "layer_count", "front_layers", "spare_layers")
            )
            vocab = header.count(SLICE_PREFIX + "vocab_size")
            tied = bool(header.value(SLICE_PREFIX + "tied"))
            takes_tokens = bool(header.value(SLICE_PREFIX + "takes_tokens"))
            inputs, outputs = (_parts(header, SLICE_PREFIX + key) for key in ("input", "boundary"))
            sha256 = header.text(SLICE_PREFIX + "source_sha256")
            if (
                not 0 <= start < end <= total
                or front + end - start + spare != count
                or (end == total) != (not outputs)
                or (start == 0 and (inputs or takes_tokens))
            ):
                raise GGUFError(
                    header.path,
                    f"damaged: says it is a slice {start}:{end} of {total} layers with {front} spare layers "
                    f"in front, {spare} behind and boundary {show(format_parts(outputs))}, "
                    f"but has {count} layers",
                )
        return cls(
            path=header.path,
            architecture=architecture,
            layer_start=start,
            layer_end=end,
            layer_count=total,
            front_layers=front,
            spare_layers=spare,
            hidden_size=hidden_size(header),
            context_length=header.count(f"{architecture}.context_length", 0),
            vocab_size=vocab,
            inputs=inputs,
            outputs=outputs,
            takes_tokens=takes_tokens,
            tied=tied,
            source_sha256=sha256,
            file_bytes=header.file_size,
        )


def _parts(header: GGUFHeader, key: str) -> tuple[BoundaryPart, ...]:
    try:
        return parse_parts(header.text(key))
    except ValueError as error:
        raise GGUFError(header.path, f"damaged: {key}: {error}") from error


def is_slice(header: GGUFHeader) -> bool:
    """Whether the file was written by skippy's slicer."""
    return SLICE_PREFIX + "layer_start" in header.metadata

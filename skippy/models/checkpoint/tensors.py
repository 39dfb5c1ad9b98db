"""Which tensors a checkpoint becomes, and their values, a bounded piece at a time.

Names come from gguf's table, shapes from ``config.json``: a checkpoint whose tensors are not exactly those
its configuration calls for is refused before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, TensorNameMap, get_tensor_name_map

from skippy.models.errors import CheckpointError, show

from .folder import Checkpoint, Reader
from .safetensors import StoredTensor
from .settings import Config, Shape, rotary_factors

F32: Final = GGMLQuantizationType.F32
_TYPES: Final = {"F32": F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
_PIECE: Final = 8 << 20  # values held at once as F32
_NOT_USED: Final = (".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq")
_EXPERT: Final = re.compile(
    r"(model\.layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\.(\d{1,4})\.(\w+)\.weight"
)
_EXPERT_PARTS: Final = {
    "w1": "gate", "w2": "down", "w3": "up",
    "gate_proj": "gate", "down_proj": "down", "up_proj": "up",
}  # fmt: skip

Floats = npt.NDArray[np.float32]


@attrs.frozen(slots=True)
class ConvertedTensor:
    """A tensor of the whole model, before quantisation.

    Attributes:
        name: GGUF's.
        dims: ggml's order, the contiguous size first.
        type: F32, F16 or BF16, as llama.cpp's converter would keep it.
        parts: the stored tensors, stacked where there are several; none for computed ones.
        heads: the rows are those of so many heads and are reordered (0: no).
        shift: added to every value.
        values: of a computed tensor.
    """

    name: str
    dims: tuple[int, ...]
    type: GGMLQuantizationType
    parts: tuple[StoredTensor, ...] = ()
    heads: int = 0
    shift: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def rows_per_part(self) -> int:
        return self.dims[1] if len(self.dims) > 1 else 1

    def raw_type(self, part: StoredTensor) -> GGMLQuantizationType | None:
        """ggml's type of what is stored, where the stored bytes are the values to be had."""
        return None if self.shift else _TYPES[part.dtype]


def convert_tensors(checkpoint: Checkpoint, config: Config, shape: Shape) -> dict[str, ConvertedTensor]:
    """The whole model's tensors by name, in file order.

    Raises:
        CheckpointError: one is missing, unknown, of another shape, or of a type that is not converted.
    """
    stored = _named(checkpoint, config, shape)
    out: dict[str, ConvertedTensor] = {}
    for name, dims in _expected(shape):
        parts = stored.pop(name, {})
        if not parts:
            if name == "output.weight" and (
                shape.architecture.tied or config.get("tie_word_embeddings") is not False
            ):
                continue
            if _required(name, shape):
                raise CheckpointError(checkpoint.folder, f"has no tensor for {show(name)}")
            continue
        out[name] = _converted(name, dims, parts, shape)
    if stored:
        extra = next(iter(next(iter(stored.values())).values()))
        extra.fail("has no place in a model of this architecture and size")
    factors = rotary_factors(config, shape)
    if factors:
        out["rope_freqs.weight"] = ConvertedTensor("rope_freqs.weight", (len(factors),), F32, values=factors)
    return out


def _named(checkpoint: Checkpoint, config: Config, shape: Shape) -> dict[str, dict[int, StoredTensor]]:
    """The stored tensors by GGUF name and place in the stack."""
    names = get_tensor_name_map(shape.architecture.arch, shape.layers)
    out: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(_NOT_USED) or (name == "lm_head.weight" and shape.architecture.tied):
            continue
        expert = _EXPERT.fullmatch(name) if shape.experts else None
        if expert is not None and expert[3] in _EXPERT_PARTS:
            place = int(expert[2])
            new = _gguf_name(names, f"{expert[1]}.mlp.experts.{_EXPERT_PARTS[expert[3]]}_proj.weight", tensor)
        else:
            place, new = 0, _gguf_name(names, name, tensor)
        if place in out.setdefault(new, {}):
            tensor.fail(f"is the same as {show(out[new][place].name)}")
        out[new][place] = tensor
    return out


def _gguf_name(names: TensorNameMap, name: str, tensor: StoredTensor) -> str:
    new = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if new is None:
        tensor.fail("is not known for this architecture, or of a layer that config.json does not count")
    return str(new)


def _expected(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and dimensions of every tensor that may be there, in file order."""
    width, query, key = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (width, shape.vocabulary)
    yield "output_norm.weight", (width,)
    yield "output.weight", (width, shape.vocabulary)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (width, query),
        "attn_k.weight": (width, key),
        "attn_v.weight": (width, key),
        "attn_output.weight": (query, width),
        "attn_q.bias": (query,),
        "attn_k.bias": (key,),
        "attn_v.bias": (key,),
        "attn_q_norm.weight": (shape.head_dim,),
        "attn_k_norm.weight": (shape.head_dim,),
        "ffn_norm.weight": (width,),
    }
    if shape.architecture.more_biases:
        layer["attn_output.bias"] = (width,)
    if shape.architecture.post_norms:
        layer |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    if shape.experts:
        inner, count = shape.expert_feed_forward, shape.experts
        layer |= {
            "ffn_gate_inp.weight": (width, count),
            "ffn_gate_exps.weight": (width, inner, count),
            "ffn_down_exps.weight": (inner, width, count),
            "ffn_up_exps.weight": (width, inner, count),
        }
    else:
        inner = shape.feed_forward
        layer |= {
            "ffn_gate.weight": (width, inner),
            "ffn_down.weight": (inner, width),
            "ffn_up.weight": (width, inner),
        }
        if shape.architecture.more_biases:
            layer |= {"ffn_gate.bias": (inner,), "ffn_down.bias": (width,), "ffn_up.bias": (inner,)}
    for index in range(shape.layers):
        for name, dims in layer.items():
            yield f"blk.{index}.{name}", dims


def _required(name: str, shape: Shape) -> bool:
    rest = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if rest in shape.architecture.required:
        return True
    return rest.endswith(".weight") and not rest.endswith(("_q_norm.weight", "_k_norm.weight"))


def _converted(
    name: str, dims: tuple[int, ...], parts: Mapping[int, StoredTensor], shape: Shape
) -> ConvertedTensor:
    count = dims[2] if len(dims) == 3 else 1
    stored = tuple(parts[place] for place in sorted(parts))
    if sorted(parts) != list(range(count)):
        stored[0].fail(f"is one of {len(parts)} experts, expected {count}")
    for part in stored:
        if part.dtype not in _TYPES:
            part.fail(f"is of type {part.dtype}; only F32, F16 and BF16 are converted")
        if part.shape != dims[1::-1]:
            part.fail(f"has the shape {list(part.shape)}, config.json makes it {list(dims[1::-1])}")
        if part.dtype != stored[0].dtype:
            part.fail("is of another type than the other experts of its layer")
    kind = _TYPES[stored[0].dtype]
    if len(dims) == 1 or name.endswith(("_norm.weight", "ffn_gate_inp.weight")):
        kind = F32
    heads = 0
    if shape.architecture.permuted:
        rest = name.split(".", 2)[-1]
        heads = {"attn_q.": shape.heads, "attn_k.": shape.kv_heads}.get(rest[:7], 0)
    shift = shape.architecture.norm_shift if name.endswith("norm.weight") else 0.0
    return ConvertedTensor(name, dims, kind, stored, heads, shift)


def raw_rows(
    tensor: ConvertedTensor, reader: Reader
) -> Iterator[tuple[int, npt.NDArray[np.uint8], StoredTensor]]:
    """Pieces of a tensor in file order: place in the stack, bytes of whole rows, and where they are from.

    A piece has some 8 million values, or one row of a tensor whose rows are longer, or one head of one that
    is reordered. A computed tensor has none.
    """
    width, rows = tensor.dims[0], tensor.rows_per_part
    if tensor.heads and len(tensor.dims) == 1:  # a bias: its values are reordered like rows
        width, rows = 1, tensor.dims[0]
    step = max(1, _PIECE // width)
    if tensor.heads:
        height = rows // tensor.heads  # rows of one head
        step = max(height, step // height * height)
    for place, part in enumerate(tensor.parts):
        row_bytes = part.nbytes // rows
        for start in range(0, rows, step):
            count = min(step, rows - start)
            piece = np.frombuffer(reader.read(part, start * row_bytes, count * row_bytes), np.uint8)
            piece = piece.reshape(count, row_bytes)
            yield place, _paired(piece, height) if tensor.heads else piece, part


def _paired(rows: npt.NDArray[np.uint8], height: int) -> npt.NDArray[np.uint8]:
    """Rows of whole heads, reordered from two halves to pairs (``permute`` of llama.cpp's converter)."""
    heads = rows.reshape(-1, 2, height // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def as_floats(raw: npt.NDArray[np.uint8], dtype: str) -> Floats:
    """Stored bytes as F32 values: exact for each of the three types."""
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

"""Small random SafeTensors checkpoints, as Hugging Face's libraries write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.support.tiny_models import BOS, CHAT_TEMPLATE, IM_END, IM_START, MERGES, byte_characters

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GEMMAS = ("gemma", "gemma2", "gemma3")
WINDOW = 5
"""Tokens that some layers of Gemma 2 and 3 look at."""
EXPERTS = {"mixtral": 8, "qwen3moe": 4}

Array = npt.NDArray[np.float32]


def write_safetensors(path: Path, tensors: Mapping[str, Array], dtype: str = "F32") -> None:
    """A SafeTensors file of these tensors, stored as F32, F16 or BF16 (the upper halves of F32)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, position = [], 0
    for name, values in tensors.items():
        blob = encoded(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [position, position + len(blob)],
        }
        blobs.append(blob)
        position += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def encoded(values: Array, dtype: str) -> bytes:
    if dtype == "F32":
        return values.astype("<f4").tobytes()
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    layers: int = 3,
    width: int = 256,
    heads: int = 4,
    kv_heads: int = 1,
    head_dim: int | None = None,
    feed_forward: int = 256,
    tied: bool = True,
    dtype: str = "BF16",
    shards: int = 1,
    seed: int = 0,
    scale: float = 0.1,
    sparse: int = 1,
    biases: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint with a byte-level tokenizer; the same arguments give the same files.

    Of ``sparse`` rows of a matrix only the first is not zero, which are quickly quantised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    dim = head_dim or width // heads
    settings: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    if head_dim is not None or family in (*GEMMAS, "qwen3", "qwen3moe"):
        settings["head_dim"] = dim
    if family == "mixtral":
        settings |= {"num_local_experts": EXPERTS[family], "num_experts_per_tok": 2}
    if family == "qwen3moe":
        settings |= {"num_experts": EXPERTS[family], "num_experts_per_tok": 2}
        settings |= {"moe_intermediate_size": feed_forward, "norm_topk_prob": True}
    if family in ("gemma2", "gemma3"):
        settings |= {"query_pre_attn_scalar": dim, "sliding_window": WINDOW}
    if family == "gemma3":
        settings |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    settings |= config or {}
    (folder / "config.json").write_text(json.dumps(settings))
    generator = np.random.default_rng([seed, *family.encode()])
    tensors = {
        name: generator.normal(0.0, scale, shape).astype(np.float32)
        + np.float32(1.0 if name.endswith("norm.weight") and family not in GEMMAS else 0.0)
        for name, shape in _shapes(
            family, layers, width, heads, kv_heads, dim, feed_forward, vocabulary, tied, biases
        )
    }
    for values in tensors.values():
        if values.ndim > 1 and sparse > 1:
            values[np.arange(len(values)) % sparse > 0] = 0
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    places: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[index::shards])
        write_safetensors(folder / file, part, dtype)
        places |= dict.fromkeys(part, file)
    index_text = json.dumps({"metadata": {"total_size": 0}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index_text)
    return folder


def _shapes(
    family: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    dim: int,
    feed_forward: int,
    vocabulary: int,
    tied: bool,
    biases: bool,
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in PyTorch's order (contiguous size last)."""
    out: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocabulary, width))]
    for index in range(layers):
        layer = f"model.layers.{index}."
        projections = {"q": (heads * dim, width), "k": (kv_heads * dim, width), "v": (kv_heads * dim, width)}
        for name, shape in projections.items():
            out.append((f"{layer}self_attn.{name}_proj.weight", shape))
            if family == "qwen2" or biases:
                out.append((f"{layer}self_attn.{name}_proj.bias", shape[:1]))
        out.append((f"{layer}self_attn.o_proj.weight", (width, heads * dim)))
        if family.startswith("qwen3") or family == "gemma3":
            out += [(f"{layer}self_attn.{name}_norm.weight", (dim,)) for name in "qk"]
        out += _feed_forward(family, layer, width, feed_forward)
        norms = ["input", "post_attention"]
        if family in ("gemma2", "gemma3"):
            norms += ["pre_feedforward", "post_feedforward"]
        out += [(f"{layer}{name}_layernorm.weight", (width,)) for name in norms]
    out.append(("model.norm.weight", (width,)))
    if not tied:
        out.append(("lm_head.weight", (vocabulary, width)))
    return out


def _feed_forward(family: str, layer: str, width: int, inner: int) -> list[tuple[str, tuple[int, ...]]]:
    parts = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    if family not in EXPERTS:
        return [(f"{layer}mlp.{name}_proj.weight", shape) for name, shape in parts.items()]
    mixtral = family == "mixtral"
    block = f"{layer}block_sparse_moe." if mixtral else f"{layer}mlp."
    names = {"gate": "w1", "up": "w3", "down": "w2"} if mixtral else {n: f"{n}_proj" for n in parts}
    out: list[tuple[str, tuple[int, ...]]] = [(f"{block}gate.weight", (EXPERTS[family], width))]
    for expert in range(EXPERTS[family]):
        out += [(f"{block}experts.{expert}.{names[n]}.weight", shape) for n, shape in parts.items()]
    return out


def write_tokenizer(folder: Path, words: str | None = QWEN2_WORDS) -> int:
    """``tokenizer.json`` and ``tokenizer_config.json`` of a byte-level BPE; its number of tokens."""
    texts: Sequence[str] = [*byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
    special = [BOS, IM_START, IM_END]
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    tokenizer = {
        "added_tokens": [
            {"id": len(texts) + index, "content": text, "special": True, "normalized": False}
            for index, text in enumerate(special)
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "model": {
            "type": "BPE",
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": list(MERGES),
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": BOS, "eos_token": IM_END, "add_bos_token": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(texts) + len(special)


def write_imatrix(path: Path, importance: Mapping[str, Array], counts: int = 8) -> Path:
    """An importance matrix in the newer format: sums over ``counts`` rows for each expert."""
    out = GGUFWriter(path, "")
    out.add_string("general.type", "imatrix")
    out.add_array("imatrix.datasets", ["random"])
    out.add_uint32("imatrix.chunk_count", 1)
    out.add_uint32("imatrix.chunk_size", counts)
    for name, values in importance.items():
        experts = max(1, values.size // 256) if "exps" in name else 1
        out.add_tensor(f"{name}.in_sum2", (values * np.float32(counts)).reshape(experts, -1))
        out.add_tensor(f"{name}.counts", np.full((experts, 1), counts, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def write_listed_imatrix(path: Path, importance: Mapping[str, Array], calls: int = 4) -> Path:
    """An importance matrix in the older format."""
    out = struct.pack("<i", len(importance))
    for name, values in importance.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
        out += (values * np.float32(calls)).astype("<f4").tobytes()
    path.write_bytes(out + struct.pack("<ii", 1, 6) + b"random")
    return path


PIECES = ("▁", "a", "b", "c", "ab", "bc", "▁ab", "abc", "▁abc")


def sentencepieces() -> list[tuple[str, float, int]]:
    """Text, score and kind of a small SentencePiece vocabulary; the longer pieces score less."""
    special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    return [
        *special,
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((piece, -float(index), 1) for index, piece in enumerate(PIECES)),
    ]


def write_sentencepiece(folder: Path, *, as_json: bool = False) -> None:
    """A SentencePiece tokenizer: its model file, or what Hugging Face's libraries make of it."""
    for name in ("tokenizer.json", "tokenizer.model"):
        (folder / name).unlink(missing_ok=True)
    pieces = sentencepieces()
    if not as_json:
        out = b""
        for text, score, kind in pieces:
            piece = b"\x0a" + bytes([len(text.encode())]) + text.encode()
            piece += b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
            out += b"\x0a" + bytes([len(piece)]) + piece
        (folder / "tokenizer.model").write_bytes(out)
    else:
        known = {text for text, _, kind in pieces if kind == 1}
        merges = [
            [text[:cut], text[cut:]]
            for text in PIECES
            for cut in range(1, len(text))
            if {text[:cut], text[cut:]} <= known
        ]
        tokenizer = {
            "added_tokens": [
                {"id": index, "content": text, "special": True}
                for index, (text, _, _) in enumerate(pieces[:3])
            ],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "pre_tokenizer": None,
            "model": {
                "type": "BPE",
                "byte_fallback": True,
                "vocab": {text: index for index, (text, _, _) in enumerate(pieces)},
                "merges": merges,
            },
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

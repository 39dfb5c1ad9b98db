"""Small random models for tests: real GGUF files that llama.cpp loads, a few hundred KiB each.

The weights are noise, so the text is noise too; what such a model is for is comparing runs. The tokenizer is
a real one of the gpt2 kind: one token per byte and a few merges, so every text tokenises and comes back.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

BOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (BOS, IM_START, IM_END)
MERGES = ("t h", "th e", "Ġ a", "Ġ the", "i n", "e r", "o n", "Ġ t", "r e", "in g")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Biases and norms beyond the llama layout, by architecture.
_BIASES: Mapping[str, tuple[str, ...]] = dict.fromkeys(("qwen2", "qwen2vl"), ("attn_q", "attn_k", "attn_v"))
_QK_NORMS = ("qwen3",)
_UNTIED_ONLY = ("internlm2",)
_ONE_NORM = ("cohere2",)


def byte_characters() -> list[str]:
    """The character that stands for each byte 0…255 in a gpt2 vocabulary.

    Printable Latin-1 stands for itself, the rest moves behind U+0100 in order (GPT-2's ``bytes_to_unicode``).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(byte if byte in plain else next(moved)) for byte in range(256)]


def vocabulary() -> list[str]:
    """Token texts: 256 bytes, the merged pairs, three control tokens."""
    return [*byte_characters(), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


def write_tiny(
    path: str | os.PathLike[str],
    arch: str = "llama",
    layers: int = 6,
    tied: bool = True,
    seed: int = 0,
    *,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int = 128,
    context: int = 512,
    weights: str = "F32",
    extra: Mapping[str, tuple[GGUFValueType, object]] | None = None,
    tokens: Sequence[str] | None = None,
) -> Path:
    """Write a random model; the same arguments give the same file.

    ``arch`` is llama, mistral3, qwen2, qwen2vl, qwen3, cohere2 or internlm2 (untied only); others get llama's
    layout, good for reading the header only. ``weights`` is the ggml type of the matrices (norms, biases
    stay F32). ``extra`` adds or replaces metadata: key → (type, value), where a list is an array of that
    type. ``tokens`` replaces the vocabulary.
    """
    if tied and arch in _UNTIED_ONLY:
        raise ValueError(f"{arch} models have an output matrix, use tied=False")
    out = GGUFWriter(os.fspath(path), arch)
    texts = list(tokens) if tokens is not None else vocabulary()
    metadata = _metadata(arch, layers, width, heads, kv_heads, feed_forward, context, texts)
    metadata.update(extra or {})
    _add_metadata(out, metadata)
    if "general.alignment" in metadata:
        out.data_alignment = cast(int, metadata["general.alignment"][1])
    generator = np.random.default_rng([seed, *arch.encode()])
    quantised = GGMLQuantizationType[weights]
    for name, shape in _shapes(arch, layers, tied, width, heads, kv_heads, feed_forward, len(texts)):
        data = generator.normal(0.0, 0.1, shape[::-1]).astype(np.float32)
        if name.endswith("norm.weight"):
            data += 1.0
        if len(shape) == 2 and quantised is not GGMLQuantizationType.F32:
            out.add_tensor(name, quants.quantize(data, quantised), raw_dtype=quantised)
        else:
            out.add_tensor(name, data)
    _write(out)
    return Path(path)


def write_tiny_windowed(path: str | os.PathLike[str], layers: int = 8, window: int = 16) -> Path:
    """A random cohere2 model, whose layers look at the last ``window`` positions, except each fourth."""
    extra = {
        "cohere2.attention.sliding_window": (GGUFValueType.UINT32, window),
        "cohere2.attention.layer_norm_epsilon": (GGUFValueType.FLOAT32, 1e-5),
        "cohere2.logit_scale": (GGUFValueType.FLOAT32, 1.0),
    }
    return write_tiny(path, "cohere2", layers, extra=extra)


def write_tiny_sections(path: str | os.PathLike[str], layers: int = 3) -> Path:
    """A random qwen2vl model, whose positions have several sections (M-RoPE)."""
    extra = {"qwen2vl.rope.dimension_sections": (GGUFValueType.INT32, [2, 3, 3, 0])}
    return write_tiny(path, "qwen2vl", layers, extra=extra)


def write_tiny_mamba(path: str | os.PathLike[str], layers: int = 3, *, width: int = 64) -> Path:
    """A random model with recurrent state instead of a cache of positions, and the same tokenizer."""
    return _write_recurrent(path, "mamba", layers, width, attending=())


def write_tiny_jamba(path: str | os.PathLike[str], layers: int = 4, *, width: int = 64) -> Path:
    """A random hybrid model: recurrent state in even layers, a cache of positions in odd ones."""
    return _write_recurrent(path, "jamba", layers, width, attending=range(1, layers, 2))


def _write_recurrent(
    path: str | os.PathLike[str], arch: str, layers: int, width: int, attending: Collection[int]
) -> Path:
    inner, state, rank, feed_forward = 2 * width, 16, 4, 2 * width if attending else 0
    out = GGUFWriter(os.fspath(path), arch)
    metadata = _metadata(arch, layers, width, 4 if attending else 1, 1, feed_forward, 512, vocabulary())
    if attending:
        heads = [2 if layer in attending else 0 for layer in range(layers)]
        metadata[f"{arch}.attention.head_count_kv"] = (GGUFValueType.INT32, heads)
    for name, number in (("conv_kernel", 4), ("inner_size", inner), ("state_size", state)):
        metadata[f"{arch}.ssm.{name}"] = (GGUFValueType.UINT32, number)
    metadata[f"{arch}.ssm.time_step_rank"] = (GGUFValueType.UINT32, rank)
    _add_metadata(out, metadata)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int, mean: float = 0.0, scale: float = 0.2) -> None:
        out.add_tensor(name, generator.normal(mean, scale, shape[::-1]).astype(np.float32))

    add("token_embd.weight", width, len(vocabulary()), scale=1.0)
    add("output_norm.weight", width, mean=1.0)
    for layer in range(layers):
        block = f"blk.{layer}."
        add(f"{block}attn_norm.weight", width, mean=1.0)
        if layer in attending:
            for name, values in (("q", width), ("k", width // 2), ("v", width // 2), ("output", width)):
                add(f"{block}attn_{name}.weight", width, values)
        else:
            add(f"{block}ssm_in.weight", width, 2 * inner)
            add(f"{block}ssm_conv1d.weight", 4, inner)
            add(f"{block}ssm_conv1d.bias", inner)
            add(f"{block}ssm_x.weight", inner, rank + 2 * state)
            add(f"{block}ssm_dt.weight", rank, inner)
            add(f"{block}ssm_dt.bias", inner)
            add(f"{block}ssm_a", state, inner, mean=-1.0)
            add(f"{block}ssm_d", inner, mean=1.0)
            add(f"{block}ssm_out.weight", inner, width)
        if attending:
            if layer not in attending:
                for name, values in (("dt", rank), ("b", state), ("c", state)):
                    add(f"{block}ssm_{name}_norm.weight", values, mean=1.0)
            add(f"{block}ffn_norm.weight", width, mean=1.0)
            add(f"{block}ffn_gate.weight", width, feed_forward)
            add(f"{block}ffn_up.weight", width, feed_forward)
            add(f"{block}ffn_down.weight", feed_forward, width)
    _write(out)
    return Path(path)


def _add_metadata(out: GGUFWriter, metadata: Mapping[str, tuple[GGUFValueType, object]]) -> None:
    for key, (kind, value) in metadata.items():
        if isinstance(value, list):
            out.add_key_value(key, value, GGUFValueType.ARRAY, kind)
        else:
            out.add_key_value(key, value, kind)


def _write(out: GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _metadata(
    arch: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    context: int,
    texts: list[str],
) -> dict[str, tuple[GGUFValueType, object]]:
    kinds = [3 if text in SPECIAL else 1 for text in texts]  # 3 is a control token, 1 a normal one
    number, real, text, flag = (
        GGUFValueType.UINT32,
        GGUFValueType.FLOAT32,
        GGUFValueType.STRING,
        GGUFValueType.BOOL,
    )
    metadata: dict[str, tuple[GGUFValueType, object]] = {
        "general.name": (text, f"tiny {arch}"),
        f"{arch}.vocab_size": (number, len(texts)),
        f"{arch}.context_length": (number, context),
        f"{arch}.embedding_length": (number, width),
        f"{arch}.block_count": (number, layers),
        f"{arch}.feed_forward_length": (number, feed_forward),
        f"{arch}.attention.head_count": (number, heads),
        f"{arch}.attention.head_count_kv": (number, kv_heads),
        f"{arch}.attention.key_length": (number, width // heads),
        f"{arch}.attention.value_length": (number, width // heads),
        f"{arch}.attention.layer_norm_rms_epsilon": (real, 1e-5),
        f"{arch}.rope.dimension_count": (number, width // heads),
        f"{arch}.rope.freq_base": (real, 10000.0),
        "tokenizer.ggml.model": (text, "gpt2"),
        "tokenizer.ggml.pre": (text, "gpt-2"),
        "tokenizer.ggml.tokens": (text, texts),
        "tokenizer.ggml.token_type": (GGUFValueType.INT32, kinds),
        "tokenizer.ggml.merges": (text, list(MERGES)),
        "tokenizer.ggml.add_bos_token": (flag, False),
        "tokenizer.chat_template": (text, CHAT_TEMPLATE),
    }
    if BOS in texts:
        metadata["tokenizer.ggml.bos_token_id"] = (number, texts.index(BOS))
        metadata["tokenizer.ggml.eos_token_id"] = (number, texts.index(IM_END))
    return metadata


def _shapes(
    arch: str, layers: int, tied: bool, width: int, heads: int, kv_heads: int, feed_forward: int, vocab: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in ggml's order (contiguous size first)."""
    head = width // heads
    matrices = {
        "attn_q": (width, heads * head),
        "attn_k": (width, kv_heads * head),
        "attn_v": (width, kv_heads * head),
        "attn_output": (heads * head, width),
        "ffn_gate": (width, feed_forward),
        "ffn_up": (width, feed_forward),
        "ffn_down": (feed_forward, width),
    }
    out: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (width, vocab)),
        ("output_norm.weight", (width,)),
    ]
    if not tied:
        out.append(("output.weight", (width, vocab)))
    for layer in range(layers):
        out.append((f"blk.{layer}.attn_norm.weight", (width,)))
        if arch in _QK_NORMS:
            out += [(f"blk.{layer}.{name}.weight", (head,)) for name in ("attn_q_norm", "attn_k_norm")]
        for name, shape in matrices.items():
            if name == "ffn_gate" and arch not in _ONE_NORM:
                out.append((f"blk.{layer}.ffn_norm.weight", (width,)))
            out.append((f"blk.{layer}.{name}.weight", shape))
            if name in _BIASES.get(arch, ()):
                out.append((f"blk.{layer}.{name}.bias", (shape[1],)))
    return out

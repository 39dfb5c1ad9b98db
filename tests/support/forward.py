"""A transformer's forward pass in numpy, with Hugging Face's conventions: reads a checkpoint's own tensors.

Source: transformers' modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py, modeling_gemma.py,
modeling_gemma2.py, modeling_gemma3.py, modeling_mixtral.py, modeling_qwen3_moe.py and modeling_rope_utils.py.
Nothing of the product is used.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                assert entry["dtype"] == "F32"
                tensors[name] = np.frombuffer(data[start:end], "<f4").reshape(entry["shape"]).astype(float)
    return config, tensors


def logits(folder: Path, tokens: list[int]) -> Array:
    """Logits of the last token."""
    config, w = load(folder)
    family = config["architectures"][0]
    gemma = family.startswith("Gemma")
    embedding = w["model.embed_tokens.weight"]
    x = embedding[tokens] * (math.sqrt(config["hidden_size"]) if gemma else 1.0)

    def norm(values: Array, weight: Array) -> Array:
        scaled = values / np.sqrt((values**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return scaled * (weight + 1.0 if gemma else weight)

    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        part = {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}
        local = _looks_at_a_window(config, family, index)
        y = _attention(config, part, norm(x, part["input_layernorm.weight"]), norm, local)
        if "pre_feedforward_layernorm.weight" in part:
            x = x + norm(y, part["post_attention_layernorm.weight"])
            y = _feed_forward(config, part, norm(x, part["pre_feedforward_layernorm.weight"]), gemma)
            x = x + norm(y, part["post_feedforward_layernorm.weight"])
        else:
            x = x + y
            x = x + _feed_forward(config, part, norm(x, part["post_attention_layernorm.weight"]), gemma)
    out = norm(x, w["model.norm.weight"])[-1] @ w.get("lm_head.weight", embedding).T
    return _capped(out, config.get("final_logit_softcapping", 30.0 if "Gemma2" in family else None))


def _looks_at_a_window(config: dict[str, Any], family: str, index: int) -> bool:
    if "layer_types" in config:
        return bool(config["layer_types"][index] == "sliding_attention")
    period = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": config.get("sliding_window_pattern", 6)}
    return family in period and (index + 1) % period[family] != 0


def _capped(values: Array, cap: float | None) -> Array:
    return values if cap is None else np.tanh(values / cap) * cap


def _attention(config: dict[str, Any], w: dict[str, Array], x: Array, norm: Any, local: bool) -> Array:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim, count = config.get("head_dim") or config["hidden_size"] // heads, len(x)
    rotary = _rotary(config, local)

    def project(name: str, parts: int) -> Array:
        y = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", np.zeros(1))
        y = y.reshape(count, parts, dim)
        return norm(y, w[f"self_attn.{name}_norm.weight"]) if f"self_attn.{name}_norm.weight" in w else y

    query, key, value = (
        _rotate(rotary, project("q", heads), dim),
        _rotate(rotary, project("k", groups), dim),
        project("v", groups),
    )
    key, value = (np.repeat(t, heads // groups, axis=1) for t in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(config.get("query_pre_attn_scalar", dim))
    cap = 50.0 if config["architectures"] == ["Gemma2ForCausalLM"] else None
    scores = _capped(scores, config.get("attn_logit_softcapping", cap))
    distance = np.arange(count)[:, None] - np.arange(count)
    hidden = (distance < 0) | (local & (distance >= config.get("sliding_window", count)))
    scores[:, hidden] = -np.inf
    return (
        np.einsum("hqk,khd->qhd", _softmax(scores), value).reshape(count, -1) @ w["self_attn.o_proj.weight"].T
    )


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _rotary(config: dict[str, Any], local: bool) -> dict[str, Any]:
    """Base and scaling of a layer. Gemma 3's layers with a window have their own base, and no scaling."""
    given = config.get("rope_parameters")
    if given and "full_attention" in given:
        return dict(given["sliding_attention" if local else "full_attention"])
    if local and "rope_local_base_freq" in config:
        return {"rope_theta": config["rope_local_base_freq"]}
    return {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}


def _rotate(rotary: dict[str, Any], x: Array, dim: int) -> Array:
    frequencies = 1.0 / rotary["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    kind = rotary.get("rope_type", rotary.get("type"))
    if kind == "linear":
        frequencies = frequencies / rotary["factor"]
    if kind == "llama3":
        frequencies = np.array([_llama3(rotary, frequency) for frequency in frequencies])
    angles = np.arange(len(x))[:, None] * frequencies
    cos, sin = (np.concatenate([f(angles), f(angles)], -1)[:, None] for f in (np.cos, np.sin))
    halves = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)  # rotate_half
    return x * cos + halves * sin


def _llama3(scaling: dict[str, Any], frequency: float) -> float:
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return float((1 - smooth) * frequency / factor + smooth * frequency)


def _feed_forward(config: dict[str, Any], w: dict[str, Array], x: Array, gemma: bool) -> Array:
    if "mlp.gate_proj.weight" in w:
        return _gated(x, [w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")], gemma)
    mixtral = "block_sparse_moe.gate.weight" in w
    block = "block_sparse_moe" if mixtral else "mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    chances = _softmax(x @ w[f"{block}.gate.weight"].T)
    out = np.zeros_like(x)
    for row, chance in enumerate(chances):
        best = np.argsort(-chance)[: config["num_experts_per_tok"]]
        for expert in best:
            matrices = [w[f"{block}.experts.{expert}.{name}.weight"] for name in names]
            out[row] += chance[expert] / chance[best].sum() * _gated(x[row], matrices, gemma)
    return out


def _gated(x: Array, matrices: list[Array], gemma: bool) -> Array:
    gate, up, down = matrices
    y: Array = x @ gate.T
    if gemma:  # gelu_pytorch_tanh
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    else:
        y = y / (1 + np.exp(-y))
    out: Array = (y * (x @ up.T)) @ down.T
    return out

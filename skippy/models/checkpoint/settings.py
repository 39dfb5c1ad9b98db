"""``config.json`` as GGUF metadata: sizes checked, rotary scaling in the terms of llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
from gguf import GGUFValueType

from skippy.models.errors import CheckpointError, show

from .architectures import ARCHITECTURES, Architecture
from .folder import CONFIG, Checkpoint
from .vocabulary import Metadata

MAX_LAYERS: Final = 512  # compiled into llama.cpp
MAX_WIDTH: Final = 1 << 20
MAX_VOCABULARY: Final = 1 << 22
MAX_CONTEXT: Final = (1 << 31) - 1
MAX_HEADS: Final = 1 << 14
MAX_EXPERTS: Final = 1 << 10


class Config:
    """Typed access to ``config.json``; every complaint names the key.

    Raises:
        CheckpointError: of an architecture that is not converted.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path: Path = checkpoint.folder / CONFIG
        self._values = checkpoint.config
        names = self._values.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        found = ARCHITECTURES.get(name)
        if found is None:
            known = ", ".join(ARCHITECTURES)
            self.fail(f"checkpoints of architecture {show(name)} are not converted; those of {known} are")
        self.architecture: Architecture = found

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(self.path, message)

    def get(self, key: str) -> Any:
        """The value; of a missing key what transformers takes for it, else None."""
        return self._values[key] if key in self._values else self.architecture.defaults.get(key)

    def count(self, key: str, limit: int, default: int | None = None) -> int:
        """An integer from 1 to ``limit``; ``default`` where the key is missing or null."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            self.fail(f"{key} is {show(str(value))}, expected a count from 1 to {limit}")
        return value

    def real(self, key: str, value: Any) -> float:
        """``value``, found under ``key``, as a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self.fail(f"{key} is {show(str(value))}, expected a positive number")
        return float(value)


@attrs.frozen(slots=True, kw_only=True)
class Shape:
    """The sizes of a model, and what its architecture asks of conversion."""

    architecture: Architecture
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    experts: int
    experts_used: int
    expert_feed_forward: int


def read_shape(config: Config) -> Shape:
    """The sizes that ``config.json`` gives.

    Raises:
        CheckpointError: a quantisation that is not converted, or impossible sizes.
    """
    architecture = config.architecture
    if config.get("quantization_config"):
        config.fail("quantization_config: checkpoints that are quantised already are not converted")
    heads, width = config.count("num_attention_heads", MAX_HEADS), config.count("hidden_size", MAX_WIDTH)
    head_dim = config.count("head_dim", MAX_WIDTH, max(1, width // heads))
    if head_dim % 2:
        config.fail(f"head_dim is {head_dim}, rotary positions need an even number")
    feed_forward = config.count("intermediate_size", MAX_WIDTH)
    experts = used = expert_feed_forward = 0
    if architecture.experts:
        named = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
        experts = config.count(named, MAX_EXPERTS)
        used = config.count("num_experts_per_tok", experts)
        expert_feed_forward = config.count("moe_intermediate_size", MAX_WIDTH, feed_forward)
    return Shape(
        architecture=architecture,
        layers=config.count("num_hidden_layers", MAX_LAYERS),
        width=width,
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads, heads),
        head_dim=head_dim,
        feed_forward=feed_forward,
        vocabulary=config.count("vocab_size", MAX_VOCABULARY),
        experts=experts,
        experts_used=used,
        expert_feed_forward=expert_feed_forward,
    )


def read_settings(config: Config, shape: Shape) -> Metadata:
    """All metadata but the tokenizer's and the file's type."""
    number, real, text = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
    prefix, family = shape.architecture.name, shape.architecture
    metadata: Metadata = {
        "general.type": (text, "model"),
        f"{prefix}.block_count": (number, shape.layers),
        f"{prefix}.context_length": (number, config.count("max_position_embeddings", MAX_CONTEXT)),
        f"{prefix}.embedding_length": (number, shape.width),
        f"{prefix}.feed_forward_length": (number, shape.feed_forward),
        f"{prefix}.attention.head_count": (number, shape.heads),
        f"{prefix}.attention.head_count_kv": (number, shape.kv_heads),
        f"{prefix}.vocab_size": (number, shape.vocabulary),
        f"{prefix}.attention.layer_norm_rms_epsilon": (
            real,
            config.real("rms_norm_eps", config.get("rms_norm_eps")),
        ),
    }
    if config.get("head_dim") is not None:
        metadata[f"{prefix}.attention.key_length"] = (number, shape.head_dim)
        metadata[f"{prefix}.attention.value_length"] = (number, shape.head_dim)
    if family.rotary:
        metadata[f"{prefix}.rope.dimension_count"] = (number, shape.head_dim)
    if shape.experts:
        metadata[f"{prefix}.expert_count"] = (number, shape.experts)
        metadata[f"{prefix}.expert_used_count"] = (number, shape.experts_used)
        if config.get("moe_intermediate_size") is not None:
            metadata[f"{prefix}.expert_feed_forward_length"] = (number, shape.expert_feed_forward)
    if config.get("use_sliding_window"):
        config.fail("use_sliding_window: llama.cpp has no sliding window for this architecture")
    for key, values in family.only.items():
        value = config.get(key)
        if value is not None and value not in values:
            wanted = " or ".join(str(value) for value in values) or "null"
            config.fail(
                f"{key} is {show(str(value))}; llama.cpp computes this architecture with {wanted} only"
            )
    for key, always in family.caps.items():
        if always or config.get(key) is not None:
            metadata[f"{prefix}.{key}"] = (real, config.real(key, config.get(key)))
    _check_scalar(config, shape)
    return metadata | _windows(config, shape) | _rotary(config, prefix)


def _check_scalar(config: Config, shape: Shape) -> None:
    """Attention is scaled as llama.cpp does it, which reads no key for that."""
    pinned = shape.architecture.wide_scalar_layers
    if pinned is None:
        return
    scalar = config.get("query_pre_attn_scalar")
    computed = shape.width // shape.heads if shape.layers == pinned else shape.head_dim
    if isinstance(scalar, bool) or scalar != computed:
        config.fail(
            f"query_pre_attn_scalar is {show(str(scalar))}; llama.cpp computes this model with {computed}"
        )


_WINDOW, _FULL = "sliding_attention", "full_attention"


def _windows(config: Config, shape: Shape) -> Metadata:
    """The window, and which layers look at it where these are others than llama.cpp expects."""
    family, kinds = shape.architecture, config.get("layer_types")
    expected = _periodic(family.window_period, shape.layers)
    if kinds is None and family.window_period:
        windows = _periodic(
            config.count("sliding_window_pattern", MAX_LAYERS, family.window_period), shape.layers
        )
    elif kinds is None:
        windows = expected
    elif not isinstance(kinds, list) or not all(kind in (_WINDOW, _FULL) for kind in kinds):
        config.fail(f"layer_types may have {_FULL} and {_WINDOW} only")
    elif len(kinds) != shape.layers:
        config.fail(f"layer_types has {len(kinds)} entries, expected one for each of {shape.layers} layers")
    else:
        windows = [kind == _WINDOW for kind in kinds]
    if any(windows) and not family.window_period:
        config.fail(f"layer_types: llama.cpp has no {_WINDOW} for this architecture")
    if not any(windows):
        if family.window_period and not family.windows_optional:  # it would end the process
            config.fail(f"layer_types: llama.cpp needs {_WINDOW} in some layers of this architecture")
        return {}
    key = f"{family.name}.attention.sliding_window"
    metadata: Metadata = {key: (GGUFValueType.UINT32, config.count("sliding_window", MAX_CONTEXT))}
    if windows != expected:
        metadata[f"{key}_pattern"] = (GGUFValueType.BOOL, windows)
    return metadata


def _periodic(period: int, layers: int) -> list[bool]:
    """All layers but the last of each ``period``; with 0 none."""
    return [bool(period) and (index + 1) % period != 0 for index in range(layers)]


def rotary_parameters(config: Config) -> dict[str, Any]:
    """``rope_parameters``, or ``rope_scaling`` with ``rope_theta``, under the former's names.

    Those of layers that look at everything, where there are others.
    """
    given = _given_parameters(config)
    parameters = dict(given.get(_FULL, {} if _WINDOW in given else given))
    parameters.setdefault("rope_theta", config.get("rope_theta"))
    parameters.setdefault("rope_type", parameters.get("type"))
    if parameters.get("original_max_position_embeddings") is None:
        parameters["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    return parameters


def _given_parameters(config: Config) -> dict[str, Any]:
    """As config.json has them: parameters, or an object of them for each kind of layers."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for part in (given, *(given.get(kind, {}) for kind in (_FULL, _WINDOW) if isinstance(given, dict))):
        if not isinstance(part, dict):
            config.fail("rope_parameters is not an object")
    if not config.architecture.local_base and (_FULL in given or _WINDOW in given):
        config.fail("rope_parameters: llama.cpp has the same for all layers of this architecture")
    return dict(given)


def _local_base(config: Config) -> float | None:
    """The rotary base of layers that look at a window, where they have their own."""
    if not config.architecture.local_base:
        return None
    given = dict(_given_parameters(config).get(_WINDOW, {}))
    kind, base = given.get("rope_type"), given.get("rope_theta", config.get("rope_local_base_freq"))
    if kind not in (None, "default"):
        config.fail(f"rope_parameters.{_WINDOW}: scaling of type {show(str(kind))} is not converted")
    return config.real("rope_local_base_freq", base)


_YARN: Final = {
    "extrapolation_factor": "yarn_ext_factor",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _rotary(config: Config, prefix: str) -> Metadata:
    number, real, text = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
    given, metadata = rotary_parameters(config), Metadata()
    if given["rope_theta"] is not None:
        metadata[f"{prefix}.rope.freq_base"] = (real, config.real("rope_theta", given["rope_theta"]))
    local = _local_base(config)
    if local is not None:
        metadata[f"{prefix}.rope.freq_base_swa"] = (real, local)
    kind, known = given["rope_type"], ", ".join(config.architecture.scalings)
    if kind in (None, "default"):
        return metadata
    if kind not in config.architecture.scalings:
        config.fail(f"rotary scaling of type {show(str(kind))} is not converted here; {known} may be")
    if kind == "llama3":
        return metadata
    scaling = f"{prefix}.rope.scaling."
    metadata[f"{scaling}type"] = (text, kind)
    metadata[f"{scaling}factor"] = (real, config.real("rope_parameters.factor", given.get("factor")))
    if kind == "yarn":
        original = given["original_max_position_embeddings"]
        if type(original) is not int or not 1 <= original <= MAX_CONTEXT:
            config.fail("rope_parameters.original_max_position_embeddings is missing, which yarn needs")
        metadata[f"{scaling}original_context_length"] = (number, original)
        for key, name in _YARN.items():
            if given.get(key) is not None:
                metadata[scaling + name] = (real, config.real(f"rope_parameters.{key}", given[key]))
    return metadata


def rotary_factors(config: Config, shape: Shape) -> tuple[float, ...]:
    """Divisors of each rotary frequency, for ``llama3`` scaling; else nothing.

    Source of the formula: transformers' ``_compute_llama3_parameters``: long waves are stretched by the
    factor, short ones are left alone, those between are interpolated.
    """
    given = rotary_parameters(config)
    if given["rope_type"] != "llama3":
        return ()

    def value(key: str, default: float) -> float:
        return config.real(f"rope_parameters.{key}", default if given.get(key) is None else given[key])

    base, factor = value("rope_theta", 10000.0), value("factor", 8.0)
    low, high = value("low_freq_factor", 1.0), value("high_freq_factor", 4.0)
    context = value("original_max_position_embeddings", 8192)
    if low >= high:
        config.fail("rope_parameters.low_freq_factor must be below high_freq_factor")
    factors = []
    for index in range(0, shape.head_dim, 2):
        wavelength = 2 * math.pi * base ** (index / shape.head_dim)
        smooth = (context / wavelength - low) / (high - low)
        factors.append(1 / ((1 - min(max(smooth, 0.0), 1.0)) / factor + min(max(smooth, 0.0), 1.0)))
    return tuple(factors)

"""Which checkpoints are converted, and where their weights differ from what llama.cpp computes with.

Names, shapes and exceptions are those of llama.cpp's converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
from gguf import MODEL_ARCH


@attrs.frozen(slots=True, kw_only=True)
class Architecture:
    """How a family's checkpoints become a GGUF.

    Attributes:
        arch: gguf's number of the architecture.
        permuted: rows of the query and key matrices change from Hugging Face's order of a head's rotary
            dimensions (first halves, then second halves) to neighbouring pairs.
        norm_shift: is added to norm weights, which such checkpoints store relative to 1.
        experts: the feed-forward part is a mixture of experts.
        required: per layer, beyond what all have.
        more_biases: projections other than those to queries, keys and values may have biases.
        post_norms: what attention and the feed-forward part give is normalised, too.
        tied: the head always is the token embedding; a stored copy is left out.
        rotary: the size of rotary dimensions is written.
        scalings: types of rotary scaling that llama.cpp computes for this architecture.
        local_base: layers that look at a window have a rotary base of their own, which is not scaled.
        window_period: layers look at a window but the last of each so many, where config.json does not say
            which do; 0: none do.
        windows_optional: no layer needs to.
        caps: soft caps of logits, written where they are not null. True: llama.cpp always has this one.
        wide_scalar_layers: llama.cpp scales attention by the size of a head, but in models of so many layers
            by hidden size by heads; None: there is no ``query_pre_attn_scalar`` to compare with.
        defaults: what transformers takes for keys that config.json leaves out.
        only: keys whose value is null or among these, because llama.cpp computes nothing else.
        space_prefix: what ``tokenizer.ggml.add_space_prefix`` says; None is the tokenizer's own word.
    """

    arch: MODEL_ARCH
    permuted: bool = False
    norm_shift: float = 0.0
    experts: bool = False
    required: tuple[str, ...] = ()
    more_biases: bool = False
    post_norms: bool = False
    tied: bool = False
    rotary: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn")
    local_base: bool = False
    window_period: int = 0
    windows_optional: bool = False
    caps: Mapping[str, bool] = attrs.field(factory=dict)
    wide_scalar_layers: int | None = None
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    only: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    space_prefix: bool | None = None

    @property
    def name(self) -> str:
        """``general.architecture``."""
        from gguf import MODEL_ARCH_NAMES

        return str(MODEL_ARCH_NAMES[self.arch])


_QKV_BIAS: Final = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_QK_NORM: Final = ("attn_q_norm.weight", "attn_k_norm.weight")
_SILU: Final = {"hidden_act": ("silu", "swish")}
_LLAMA: Final = Architecture(
    arch=MODEL_ARCH.LLAMA,
    permuted=True,
    more_biases=True,
    rotary=True,
    scalings=("linear", "yarn", "llama3"),
    only=_SILU,
)
_CAUSAL: Final = {"is_causal": (True,), "use_bidirectional_attention": (False,)}
_GELU: Final = {"hidden_activation": ("gelu_pytorch_tanh",)}
_GEMMA: Final = Architecture(
    arch=MODEL_ARCH.GEMMA,
    norm_shift=1.0,
    tied=True,
    defaults={"head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
    only={**_CAUSAL, **_GELU, "hidden_act": ("gelu_pytorch_tanh", "gelu")},  # which once meant the former
    space_prefix=False,
)
_GEMMA2_DEFAULTS: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
_GEMMA2: Final = attrs.evolve(
    _GEMMA,
    arch=MODEL_ARCH.GEMMA2,
    post_norms=True,
    window_period=2,
    caps={"attn_logit_softcapping": True, "final_logit_softcapping": True},
    wide_scalar_layers=46,
    defaults=_GEMMA2_DEFAULTS
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    only={**_CAUSAL, **_GELU, "sliding_window_pattern": (2,)},
)
_GEMMA3: Final = attrs.evolve(
    _GEMMA2,
    arch=MODEL_ARCH.GEMMA3,
    required=_QK_NORM,
    tied=False,
    scalings=("linear",),
    local_base=True,
    window_period=6,
    windows_optional=True,
    caps={"final_logit_softcapping": False},
    wide_scalar_layers=62,
    defaults=_GEMMA2_DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    only={**_CAUSAL, **_GELU, "attn_logit_softcapping": ()},
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": attrs.evolve(_LLAMA, experts=True),
    "Qwen2ForCausalLM": Architecture(arch=MODEL_ARCH.QWEN2, required=_QKV_BIAS, only=_SILU),
    "Qwen3ForCausalLM": Architecture(arch=MODEL_ARCH.QWEN3, required=_QK_NORM, only=_SILU),
    "Qwen3MoeForCausalLM": Architecture(
        arch=MODEL_ARCH.QWEN3MOE,
        required=_QK_NORM,
        experts=True,
        defaults={"norm_topk_prob": False},
        only={**_SILU, "norm_topk_prob": (True,)},
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
}
"""By the first entry of ``architectures`` in config.json."""

"""Which checkpoints are converted, and where their weights differ from what llama.cpp computes with.

Names, shapes and exceptions are those of llama.cpp's converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
        tied: the head always is the token embedding; a stored copy is left out.
        head_dim: the default of ``head_dim``; None is hidden size by heads.
        rotary: the size of rotary dimensions is written.
        space_prefix: what ``tokenizer.ggml.add_space_prefix`` says; None is the tokenizer's own word.
    """

    arch: MODEL_ARCH
    permuted: bool = False
    norm_shift: float = 0.0
    experts: bool = False
    required: tuple[str, ...] = ()
    tied: bool = False
    head_dim: int | None = None
    rotary: bool = False
    space_prefix: bool | None = None

    @property
    def name(self) -> str:
        """``general.architecture``."""
        from gguf import MODEL_ARCH_NAMES

        return str(MODEL_ARCH_NAMES[self.arch])


_QKV_BIAS: Final = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_QK_NORM: Final = ("attn_q_norm.weight", "attn_k_norm.weight")
_LLAMA: Final = Architecture(arch=MODEL_ARCH.LLAMA, permuted=True, rotary=True)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": attrs.evolve(_LLAMA, experts=True),
    "Qwen2ForCausalLM": Architecture(arch=MODEL_ARCH.QWEN2, required=_QKV_BIAS),
    "Qwen3ForCausalLM": Architecture(arch=MODEL_ARCH.QWEN3, required=_QK_NORM),
    "Qwen3MoeForCausalLM": Architecture(arch=MODEL_ARCH.QWEN3MOE, required=_QK_NORM, experts=True),
    "GemmaForCausalLM": Architecture(
        arch=MODEL_ARCH.GEMMA, norm_shift=1.0, tied=True, head_dim=256, space_prefix=False
    ),
}
"""By the first entry of ``architectures`` in config.json."""

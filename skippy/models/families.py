"""Which architectures can be cut, and what each needs. One table; a new plain family is one more line.

A family is in the table when its chain of slices was seen to give the unsplit model's logits exactly, at
every boundary, with the residual stream as the only thing that crosses and nothing but the general rules of
:mod:`skippy.models.plan`. The others are named with what they would need.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from skippy.models.errors import UnsupportedArchitectureError
from skippy.models.gguf import GGUFHeader


@attrs.frozen(slots=True)
class Family:
    """Slicing rules of one architecture.

    Attributes:
        architecture: ``general.architecture``.
        boundary: graph node of a layer's output, with ``{}`` for the layer's index inside the slice.
        output_required: llama.cpp insists on ``output.weight`` in every file of this family, so slices
            without a head carry it as a file hole.
    """

    architecture: str
    boundary: str = "l_out-{}"
    output_required: bool = False


class Need(enum.Enum):
    """What a family needs beyond the general rules, in words for an error text."""

    COUNTS = "its counts of leading dense layers adjusted in every slice"
    WINDOWS = "its attention-window pattern written out layer by layer"
    KINDS = "spare layers of every kind of layer that a slice lacks"
    HEADS = "the head counts of its recurrent layers filled in"
    PHASE = "leading spare layers that keep the phase of its repeating layers"
    PINNED = "spare layers that keep the layer count its arithmetic depends on"
    ABSOLUTE = "true layer indices in every slice"
    DEFAULTS = "values that default from the layer count written out"
    INPUT = "input scaling or position tables switched off in later slices"
    INJECTION = "the boundary injected inside the graph instead of fed as embeddings"
    MROPE = "four rotary positions for every row"
    SIDE = "more than the residual stream carried across the boundary"
    ORDER = "rows put back in batch order, which its recurrent layers change"
    VOCABULARY = "its vocabulary kept in every slice"
    LOOPS = (
        "several passes over the same layers for each token, which one pass through a pipeline cannot give"
    )


_PLAIN = (
    "arcee arctic chatglm dream ernie4_5 exaone falcon grovemoe hunyuan-dense hunyuan-moe jais2 llada llama "
    "maincoder mistral3 nanbeige olmo openelm pangu-embedded phi3 pockettts qwen2 qwen3 qwen3moe refact rnd1 "
    "seed_oss starcoder2"
)
_OUTPUT_REQUIRED = (
    "codeshell dbrx gptneox internlm2 jais llada-moe minimax-m2 nemotron olmoe orion phi2 phimoe plamo qwen "
    "qwen2moe stablelm xverse"
)

FAMILIES: Mapping[str, Family] = {
    **{name: Family(name) for name in _PLAIN.split()},
    **{name: Family(name, output_required=True) for name in _OUTPUT_REQUIRED.split()},
}

NEEDS: Mapping[str, tuple[Need, ...]] = {
    "afmoe": (Need.INJECTION, Need.COUNTS, Need.WINDOWS, Need.KINDS, Need.PHASE),
    "baichuan": (Need.PINNED,),
    "bailingmoe": (Need.COUNTS,),
    "bailingmoe2": (Need.COUNTS,),
    "bailingmoe3": (Need.KINDS, Need.COUNTS, Need.HEADS, Need.MROPE),
    "bloom": (Need.INJECTION,),
    "cogvlm": (Need.INJECTION,),
    "cohere2": (Need.WINDOWS, Need.KINDS),
    "cohere2moe": (Need.WINDOWS, Need.KINDS, Need.COUNTS),
    "command-r": (Need.PINNED,),
    "deci": (Need.HEADS,),
    "deepseek": (Need.COUNTS,),
    "deepseek2": (Need.COUNTS, Need.DEFAULTS),
    "deepseek32": (Need.COUNTS,),
    "deepseek4": (Need.INJECTION, Need.COUNTS, Need.KINDS, Need.SIDE),
    "dots1": (Need.COUNTS,),
    "dots3note": (Need.COUNTS, Need.KINDS),
    "ernie4_5-moe": (Need.COUNTS, Need.PHASE),
    "exaone-moe": (Need.WINDOWS, Need.KINDS, Need.COUNTS),
    "exaone4": (Need.PINNED,),
    "falcon-h1": (Need.ORDER,),
    "gemma": (Need.INJECTION,),
    "gemma2": (Need.INJECTION, Need.WINDOWS, Need.KINDS, Need.PINNED),
    "gemma3": (Need.WINDOWS, Need.KINDS, Need.PINNED),
    "gemma3n": (Need.ABSOLUTE, Need.SIDE),
    "gemma4": (Need.KINDS, Need.SIDE),
    "glm-dsa": (Need.COUNTS, Need.DEFAULTS, Need.SIDE),
    "glm4": (Need.MROPE,),
    "glm4moe": (Need.COUNTS, Need.MROPE),
    "glm5-next": (Need.INJECTION, Need.COUNTS, Need.KINDS),
    "gpt-oss": (Need.WINDOWS, Need.KINDS),
    "gpt2": (Need.INPUT,),
    "granite": (Need.INPUT,),
    "granite_swa": (Need.KINDS, Need.INPUT),
    "granitehybrid": (Need.KINDS, Need.HEADS, Need.INPUT, Need.ORDER),
    "granitemoe": (Need.INPUT,),
    "grok": (Need.INPUT,),
    "hrm_text": (Need.LOOPS,),
    "hunyuan_vl": (Need.MROPE,),
    "hy_v3": (Need.COUNTS,),
    "hy_v4": (Need.INJECTION, Need.COUNTS, Need.SIDE),
    "jamba": (Need.KINDS, Need.HEADS, Need.ORDER),
    "kimi-k3": (Need.INJECTION, Need.COUNTS, Need.KINDS, Need.HEADS, Need.ABSOLUTE, Need.SIDE),
    "kimi-linear": (Need.KINDS, Need.COUNTS, Need.HEADS, Need.ORDER),
    "laguna": (Need.WINDOWS, Need.KINDS, Need.COUNTS),
    "lfm2": (Need.KINDS, Need.HEADS, Need.ORDER),
    "lfm2moe": (Need.KINDS, Need.COUNTS, Need.HEADS, Need.ORDER),
    "llama4": (Need.WINDOWS, Need.KINDS, Need.PHASE),
    "mamba": (Need.ORDER,),
    "mamba2": (Need.ORDER,),
    "maple": (Need.KINDS,),
    "mellum": (Need.WINDOWS, Need.KINDS),
    "mimo2": (Need.KINDS,),
    "minicpm": (Need.DEFAULTS, Need.INPUT),
    "minicpm3": (Need.INJECTION, Need.PINNED),
    "minimax-01": (Need.INJECTION, Need.HEADS, Need.ABSOLUTE),
    "minimax-m3": (Need.COUNTS, Need.KINDS),
    "mistral4": (Need.COUNTS,),
    "mpt": (Need.INPUT,),
    "muse-glimmer": (Need.INJECTION, Need.WINDOWS, Need.KINDS),
    "nemotron_h": (Need.KINDS, Need.HEADS, Need.ORDER),
    "nemotron_h_moe": (Need.KINDS, Need.HEADS, Need.ORDER),
    "olmo2": (Need.WINDOWS, Need.KINDS),
    "paddleocr": (Need.MROPE,),
    "plamo2": (Need.KINDS, Need.HEADS, Need.ORDER),
    "plamo3": (Need.WINDOWS, Need.KINDS),
    "qwen2vl": (Need.MROPE,),
    "qwen35": (Need.KINDS, Need.MROPE, Need.ORDER),
    "qwen35moe": (Need.KINDS, Need.MROPE, Need.ORDER),
    "qwen3next": (Need.KINDS, Need.ORDER),
    "qwen3tts": (Need.MROPE, Need.VOCABULARY),
    "qwen3vl": (Need.MROPE, Need.INPUT),
    "qwen3vlmoe": (Need.MROPE, Need.INPUT),
    "qwen4exp": (Need.INJECTION, Need.KINDS, Need.MROPE, Need.SIDE),
    "rwkv6": (Need.INJECTION, Need.PHASE),
    "rwkv7": (Need.INJECTION, Need.SIDE),
    "smallthinker": (Need.WINDOWS, Need.KINDS, Need.PHASE),
    "smollm3": (Need.PHASE,),
    "spark2_5": (Need.KINDS,),
    "starcoder": (Need.INPUT,),
    "talkie": (Need.INJECTION, Need.SIDE),
}

# Keys under the architecture's prefix that bring a rule with them when they are not zero, in any family.
_CONDITIONAL: Mapping[str, str] = {
    "nextn_predict_layers": "its layers for multi-token prediction taken out of the slices",
    "leading_dense_block_count": Need.COUNTS.value,
    "n_deepstack_layers": Need.INPUT.value,
    "embedding_scale": Need.INPUT.value,
}


def family_of(header: GGUFHeader) -> Family:
    """The slicing rules for this file.

    Raises:
        UnsupportedArchitectureError: the family, or a feature this file uses, needs a rule that is not there.
        GGUFError: the file does not name its architecture.
    """
    architecture = header.text("general.architecture")
    family = FAMILIES.get(architecture)
    if family is None:
        needs = NEEDS.get(architecture)
        if needs is None:
            raise UnsupportedArchitectureError(architecture, "no slicing rule for it is known")
        raise UnsupportedArchitectureError(
            architecture, "it needs " + "; ".join(need.value for need in needs)
        )
    for key, needed in _CONDITIONAL.items():
        if header.value(f"{architecture}.{key}", 0):
            raise UnsupportedArchitectureError(architecture, f"with {key} set it needs {needed}")
    loops = header.value(f"{architecture}.num_loops", 1)
    if isinstance(loops, int) and loops > 1:
        raise UnsupportedArchitectureError(
            architecture, f"with num_loops above 1 it needs {Need.LOOPS.value}"
        )
    return family

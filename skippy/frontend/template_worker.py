"""The process that renders chat templates.

``python -m skippy.frontend.template_worker CPU_SECS MEMORY_BYTES OUTPUT_BYTES``

Templates come out of model files, so they are programs of strangers. The sandbox stops them from reaching
Python objects; this process bounds what is left: an endless loop ends in SIGPROF, a huge string in a
MemoryError, a huge output in an error. Its parent kills it when it does not answer.

Frames, both ways: a 4-byte big-endian length, then ASCII JSON. The worker says ``{"ready": true}`` first. A
job is ``{"template", "context"}``; its answer is ``{"text"}`` or ``{"error", "kind"}``, where kind is
``template``, ``memory`` or ``output``. After ``memory`` the worker exits. End of input ends it.

Imports stay few, so that it starts quickly.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

HEADER_BYTES = 4


class OutputTooLarge(Exception):
    pass


class GenerationBlocks(Extension):
    """``{% generation %}…{% endgeneration %}`` marks training data; its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012  (the base class's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter: no HTML escapes, keys in their order.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment that published chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = make_environment()
_compile = lru_cache(maxsize=4)(_ENVIRONMENT.from_string)


def render(template: str, context: dict[str, Any], max_bytes: int) -> str:
    """Render, and stop as soon as the output is larger than ``max_bytes`` of UTF-8."""
    parts: list[str] = []
    size = 0
    for part in _compile(template).generate(**context):
        size += len(part.encode("utf-8", "replace"))
        if size > max_bytes:
            raise OutputTooLarge
        parts.append(part)
    return "".join(parts)


def answer(job: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """The answer to one job; never raises."""
    try:
        return {"text": render(job["template"], job["context"], max_bytes)}
    except MemoryError:
        return {"kind": "memory", "error": "the template needs too much memory"}
    except OutputTooLarge:
        return {"kind": "output", "error": f"the rendered prompt is larger than {max_bytes} bytes"}
    except RecursionError:
        return {"kind": "template", "error": "the template recurses too deeply"}
    except Exception as error:  # whatever a stranger's program raises
        return {"kind": "template", "error": (str(error) or type(error).__name__)[:2000]}


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next frame, or None at the end of input."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    value: dict[str, Any] = json.loads(body)
    return value


def pack_frame(value: dict[str, Any]) -> bytes:
    # ASCII escapes carry even lone surrogates that a template may produce.
    body = json.dumps(value).encode("ascii")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _limit_memory(size: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    except (ImportError, OSError, ValueError):
        pass  # not on this platform; the parent's deadline still holds


def _limit_time(seconds: float) -> None:
    # The default action of SIGPROF ends the process, even inside C code that never looks for signals.
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main(arguments: list[str]) -> None:
    cpu_secs, memory, max_bytes = float(arguments[0]), int(arguments[1]), int(arguments[2])
    # A terminal's Ctrl-C reaches the whole process group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(memory)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    target.write(pack_frame({"ready": True}))
    target.flush()
    while (job := read_frame(source)) is not None:
        _limit_time(cpu_secs)
        result = answer(job, max_bytes)
        _limit_time(0)
        target.write(pack_frame(result))
        target.flush()
        if result.get("kind") == "memory":
            return


if __name__ == "__main__":
    main(sys.argv[1:])

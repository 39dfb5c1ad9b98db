"""The process that renders chat templates.

``python -m skippy.frontend.template_worker CPU_SECS MEMORY_BYTES OUTPUT_BYTES``

Templates come out of model files, so they are programs of strangers. The sandbox stops them from reaching
Python objects; this process bounds what is left (:mod:`skippy.workers.child`), and an output's size.

A job is ``{"template", "context"}``; its answer is ``{"text"}`` or ``{"error", "kind"}``, where kind is
``template``, ``memory`` or ``output``.

Imports stay few, so that it starts quickly.
"""

from __future__ import annotations

import functools
import json
import sys
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skippy.workers.child import serve


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
_compile = functools.lru_cache(maxsize=4)(_ENVIRONMENT.from_string)


def render(template: str, context: dict[str, Any], max_bytes: int) -> str:
    """Render, and stop as soon as the output is larger than ``max_bytes`` of UTF-8."""
    parts: list[str] = []
    size = 0
    for part in _compile(template).generate(context):
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


def main(arguments: list[str]) -> None:
    cpu_secs, memory, max_bytes = float(arguments[0]), int(arguments[1]), int(arguments[2])
    serve(functools.partial(answer, max_bytes=max_bytes), cpu_secs, memory)


if __name__ == "__main__":
    main(sys.argv[1:])

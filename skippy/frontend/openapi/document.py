"""``/openapi.json``: the table of routes as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from typing import Any

from quart import Response
from quart_trio import QuartTrio

import skippy

from ..responses import dump
from .answers import ANSWERS
from .requests import REQUESTS
from .routes import ROUTES, Route
from .shapes import Schema, ref

_PARAMETER = re.compile(r"\{(\w+)\}")


def add_openapi_route(app: QuartTrio) -> None:
    document = dump(openapi_document())

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document, content_type="application/json")


def openapi_document() -> dict[str, Any]:
    """The document, as JSON values."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "skippy",
            "version": skippy.__version__,
            "description": "An OpenAI endpoint in front of a model that is cut into stages.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": {**REQUESTS, **ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Where the server has keys; it may have none.
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    content = {"application/json": {"schema": ref(route.answer) if route.answer else {}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": _error(route),
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "string"}, "required": False} for name in route.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        body: Schema = {"schema": ref(route.request)}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def _error(route: Route) -> dict[str, Any]:
    name = "AnthropicError" if route.path.startswith("/v1/messages") else "Error"
    return {"description": "What went wrong.", "content": {"application/json": {"schema": ref(name)}}}


def _operation_id(route: Route) -> str:
    words = re.findall(r"\w+", route.path.replace("{", "by_"))
    return "_".join([route.method.lower(), *words])

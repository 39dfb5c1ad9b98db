"""``/v1/models``: the one model, and what it can do here."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

from quart import Response
from quart_trio import QuartTrio

from .generation import Generator
from .openapi.chat import CHAT
from .openapi.routes import ROUTES
from .openapi.shapes import Schema
from .routing import json_answer
from .schemas import check_model
from .service import CompletionService


def add_model_routes(app: QuartTrio, service: CompletionService, generator: Generator) -> None:
    created = int(time.time())
    model = {
        "id": generator.model_id,
        "object": "model",
        "created": created,
        "owned_by": "skippy",
        **_capabilities(generator, service.unused_parameters),
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_answer({"object": "list", "data": [model]})

    # Model ids may contain slashes.
    @app.get("/v1/models/<path:model_id>")
    async def one_model(model_id: str) -> Response:
        check_model(model_id, generator.model_id)
        return json_answer({**model, "chat_template": await service.describe_template()})


def _capabilities(generator: Generator, unused: Set[str]) -> dict[str, Any]:
    size = generator.embedding_size
    endpoints = [
        route.path
        for route in ROUTES
        if route.request is not None
        and route.path.startswith("/v1/")
        and (route.path != "/v1/embeddings" or size is not None)
    ]
    return {
        "context_length": generator.context_length,
        "vocabulary_size": generator.vocabulary.size,
        "embedding_size": size,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "supported_parameters": sorted(
            name for name, schema in CHAT.items() if name not in unused and _matters(schema)
        ),
        "endpoints": endpoints,
    }


def _matters(schema: Schema) -> bool:
    """Whether there is a choice: of some parameters a single value is accepted, which asks for nothing."""
    return len(schema.get("enum", (1, 2))) > 1 and schema.get("maxItems") != 0

"""``/v1/apply-template``, also without the prefix: a conversation's prompt as text, as llama.cpp has it."""

from __future__ import annotations

import functools

from quart import Response
from quart_trio import QuartTrio

from .routing import Bodies, json_answer
from .schemas import ChatRequest, read_chat
from .service import CompletionService
from .strict_json import parse_object


def add_template_route(app: QuartTrio, service: CompletionService, bodies: Bodies) -> None:
    parse = functools.partial(parse_apply_template, model_id=service.model_id)

    @app.post("/apply-template")
    @app.post("/v1/apply-template")
    async def apply_template() -> Response:
        chat = await bodies.parsed(parse)
        chat = service.check(chat)
        return json_answer({"prompt": await service.chat_text(chat)})


def parse_apply_template(body: bytes, model_id: str) -> ChatRequest:
    """A chat request that need not name its model. Raises ApiError."""
    data = parse_object(body)
    if data.get("model") is None:
        data["model"] = model_id
    return read_chat(data)

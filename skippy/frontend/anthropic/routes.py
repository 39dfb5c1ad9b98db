"""The routes of the Messages API."""

from __future__ import annotations

from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from ..connection import request_id
from ..generation import GenerationRequest
from ..routing import Bodies, caller_of_request, json_answer
from ..service import CompletionService
from .requests import parse_count, parse_messages
from .shape import MessageShape

ANTHROPIC_PREFIX: Final = "/v1/messages"
"""Errors about these paths have Anthropic's envelope."""


def add_anthropic_routes(app: QuartTrio, service: CompletionService, bodies: Bodies) -> None:
    @app.after_request
    async def name_request(response: Response) -> Response:
        if request.path.startswith(ANTHROPIC_PREFIX):  # where Anthropic's client looks for it
            response.headers["request-id"] = request_id(request)
        return response

    @app.post(ANTHROPIC_PREFIX)
    async def messages() -> Response:
        chat, body = await bodies.parsed(parse_messages)
        caller = caller_of_request()
        with body.renaming():
            chat = service.check(chat)

        async def prepare() -> list[GenerationRequest]:
            with body.renaming():
                return await service.chat_prompt(chat, caller)

        return await service.answer(chat, prepare, MessageShape(service.model_id), caller)

    @app.post(f"{ANTHROPIC_PREFIX}/count_tokens")
    async def count_tokens() -> Response:
        chat, body = await bodies.parsed(parse_count)
        with body.renaming():
            chat = service.check(chat)
            tokens = await service.chat_tokens(chat)
        return json_answer({"input_tokens": len(tokens)})

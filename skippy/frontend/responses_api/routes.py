"""The routes of the Responses API."""

from __future__ import annotations

import functools
from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

from ..errors import ApiError
from ..generation import GenerationRequest
from ..logprobs import chat_logprobs
from ..namespaces import cache_namespace
from ..options import FrontendOptions
from ..routing import Bodies, caller_of_request, json_answer
from ..service import Caller, CompletionService
from .requests import ResponsesBody, parse_responses
from .shape import ResponsesShape
from .store import ResponseStore, StoredResponse


def add_responses_routes(
    app: QuartTrio, service: CompletionService, options: FrontendOptions, bodies: Bodies
) -> None:
    store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)

    @app.post("/v1/responses")
    async def responses() -> Response:
        body = await bodies.parsed(parse_responses)
        return await _respond(service, store, bodies, body, caller_of_request())

    @app.get("/v1/responses/<response_id>")
    async def stored(response_id: str) -> Response:
        if request.args.get("stream", "false") == "true":
            text = "stored responses are not streamed; leave stream out"
            raise ApiError(text, param="stream", code="unsupported_model_feature")
        return json_answer(_find(store, response_id).response)

    @app.get("/v1/responses/<response_id>/input_items")
    async def input_items(response_id: str) -> Response:
        items = _find(store, response_id).items
        ids = [item.get("id") for item in items]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return json_answer({"object": "list", "data": items, **ends, "has_more": False})

    @app.delete("/v1/responses/<response_id>")
    async def delete(response_id: str) -> Response:
        if not store.delete(_owner(caller_of_request()), response_id):
            raise _not_found(response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})


async def _respond(
    service: CompletionService, store: ResponseStore, bodies: Bodies, body: ResponsesBody, caller: Caller
) -> Response:
    owner, before = _owner(caller), None
    if body.previous is not None and (before := store.get(owner, body.previous)) is None:
        text = f"previous_response_id {body.previous[:100]!r} is not stored here, or not any more"
        raise ApiError(text, param="previous_response_id", code="previous_response_not_found")
    history, size = ((), 0) if before is None else (before.messages, before.size)
    conversation = await bodies.parse(body.size + size, functools.partial(body.chat, history))
    chat = conversation.request
    with conversation.body.renaming():
        chat = service.check(chat)

    async def prepare() -> list[GenerationRequest]:
        with conversation.body.renaming():
            return await service.chat_prompt(chat, caller)

    def keep(response: dict[str, Any], said: list[dict[str, Any]], response_size: int) -> None:
        whole = size + body.size + response_size
        store.put(owner, StoredResponse(response, body.items, (*conversation.messages, *said), whole))

    scorer = None
    if chat.top_logprobs is not None:
        scorer = functools.partial(chat_logprobs, service.vocabulary)
    shape = ResponsesShape(
        service.model_id, body.echo(chat), scorer=scorer, keep=keep if body.store else None
    )
    return await service.answer(chat, prepare, shape, caller)


def _owner(caller: Caller) -> str:
    """Whose responses a request may see: those of its API key, as with cached prompts."""
    return cache_namespace(caller.credentials, None)


def _find(store: ResponseStore, response_id: str) -> StoredResponse:
    found = store.get(_owner(caller_of_request()), response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(f"no response {response_id[:100]!r} is stored here, or not any more", status=404)

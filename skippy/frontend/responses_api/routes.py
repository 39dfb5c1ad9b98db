"""The routes of the Responses API."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from quart import Response, request
from quart_trio import QuartTrio

from ..caller import Caller
from ..errors import ApiError
from ..generation import GenerationRequest
from ..logprobs import chat_logprobs
from ..namespaces import cache_namespace
from ..options import FrontendOptions
from ..routing import Bodies, caller_of_request, json_answer
from ..service import CompletionService
from .requests import Conversation, ResponsesBody, parse_responses
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

    @app.post("/v1/responses/input_tokens")
    async def input_tokens() -> Response:
        body = await bodies.parsed(parse_responses)
        conversation = await _read(store, bodies, body, _owner(caller_of_request()))
        with conversation.body.renaming():
            tokens = await service.chat_tokens(service.check(conversation.request))
        return json_answer({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @app.get("/v1/responses/<response_id>")
    async def stored(response_id: str) -> Response:
        if request.args.get("stream", "false") == "true":
            text = "stored responses are not streamed; leave stream out"
            raise ApiError(text, param="stream", code="unsupported_model_feature")
        return Response(_find(store, response_id).response, content_type="application/json")

    @app.get("/v1/responses/<response_id>/input_items")
    async def input_items(response_id: str) -> Response:
        return json_answer(_page(_find(store, response_id).load_items()))

    @app.delete("/v1/responses/<response_id>")
    async def delete(response_id: str) -> Response:
        if not store.delete(_owner(caller_of_request()), response_id):
            raise _not_found(response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})


async def _respond(
    service: CompletionService, store: ResponseStore, bodies: Bodies, body: ResponsesBody, caller: Caller
) -> Response:
    owner = _owner(caller)
    conversation = await _read(store, bodies, body, owner)
    chat = conversation.request
    with conversation.body.renaming():
        chat = service.check(chat)

    async def prepare() -> list[GenerationRequest]:
        with conversation.body.renaming():
            return await service.chat_prompt(chat, caller)

    def keep(response: dict[str, Any], said: dict[str, Any]) -> None:
        stored = StoredResponse.of(response, body.items, [*conversation.messages, said])
        store.put(owner, response["id"], stored)

    scorer = None
    if chat.top_logprobs is not None:
        scorer = functools.partial(chat_logprobs, service.vocabulary)
    shape = ResponsesShape(
        service.model_id, body.echo(chat), scorer=scorer, keep=keep if body.store else None
    )
    return await service.answer(chat, prepare, shape, caller)


async def _read(store: ResponseStore, bodies: Bodies, body: ResponsesBody, owner: str) -> Conversation:
    """What a body asks for, behind the conversation that it goes on with."""
    before = None
    if body.previous is not None and (before := store.get(owner, body.previous)) is None:
        text = f"previous_response_id {body.previous[:100]!r} is not stored here, or not any more"
        raise ApiError(text, param="previous_response_id", code="previous_response_not_found")

    def read() -> Conversation:
        return body.chat(() if before is None else before.load_messages())

    return await bodies.parse(body.size + (0 if before is None else len(before.messages)), read)


def _page(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A part of a list, as the query asks for it: the last ones first unless ``order`` is ``asc``."""
    order, limit, after = (request.args.get(name) for name in ("order", "limit", "after"))
    if order not in (None, "asc", "desc"):
        raise ApiError(f"order is {order[:40]!r}; it must be 'asc' or 'desc'", param="order")
    if limit is not None and not re.fullmatch("[1-9][0-9]?|100", limit):
        raise ApiError(f"limit is {limit[:40]!r}; it must be from 1 to 100", param="limit")
    wanted = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in wanted]
        if after not in ids:
            raise ApiError(f"after is {after[:100]!r}, which is none of the items", param="after")
        wanted = wanted[ids.index(after) + 1 :]
    page = wanted[: int(limit or 20)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return {"object": "list", "data": page, **ends, "has_more": len(page) < len(wanted)}


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

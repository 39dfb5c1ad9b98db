"""``/v1/embeddings``.

Field names and meanings: OpenAI's API reference.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Final

import attrs
from quart import Response
from quart_trio import QuartTrio

from skippy.stage import TokenizerError

from .errors import ApiError, from_generation_error
from .fields import I32_MAX, Fields, describe
from .generation import GenerationError, Generator
from .responses import dump
from .routing import Bodies
from .schemas import check_model, required_model
from .strict_json import parse_object
from .token_ids import check_is_token_id, check_token_ids

MAX_INPUTS: Final = 2048

_Input = str | tuple[int, ...]


@attrs.frozen(slots=True, kw_only=True)
class EmbeddingsRequest:
    """Texts or token ids; ``dimensions``: how many values the client wants; None: all there are."""

    model: str
    inputs: Sequence[_Input]
    base64: bool
    dimensions: int | None


def add_embeddings_route(app: QuartTrio, generator: Generator, bodies: Bodies) -> None:
    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        request = await bodies.parsed(parse_embeddings)
        check_model(request.model, generator.model_id)
        _check(request, generator.embedding_size)
        prompts = [await _tokens(generator, text, index) for index, text in enumerate(request.inputs)]
        # Each is encoded as soon as it is there: all of them at once would hold up everybody.
        items = [await _item(generator, index, tokens, request) for index, tokens in enumerate(prompts)]
        total = sum(map(len, prompts))
        rest = {"model": generator.model_id, "usage": {"prompt_tokens": total, "total_tokens": total}}
        body = b'{"object":"list","data":[%b],%b' % (b",".join(items), dump(rest)[1:])
        return Response(body, content_type="application/json")


def _check(request: EmbeddingsRequest, size: int | None) -> None:
    if size is None:
        text = "embeddings are not supported here: they need one stage with the whole model"
        raise ApiError(text, code="unsupported_model_feature")
    if request.dimensions not in (None, size):
        text = (
            f"dimensions is {request.dimensions}, which is not supported: this model's embeddings have {size}"
        )
        raise ApiError(text, param="dimensions", code="unsupported_model_feature")


async def _item(generator: Generator, index: int, tokens: Sequence[int], request: EmbeddingsRequest) -> bytes:
    try:
        vector = await generator.embed(tokens)
    except GenerationError as error:
        raise from_generation_error(error) from error
    shown: Any = vector.tolist()
    if request.base64:
        shown = b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return dump({"object": "embedding", "index": index, "embedding": shown})


def parse_embeddings(body: bytes) -> EmbeddingsRequest:
    """The body of ``POST /v1/embeddings``.

    Raises:
        ApiError: 400, with ``param`` where one field is at fault.
    """
    fields = Fields(parse_object(body))
    model = required_model(fields)
    form = fields.text("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise fields.error("encoding_format", f"is {form[:40]!r}; it must be 'float' or 'base64'")
    fields.text("user")
    request = EmbeddingsRequest(
        model=model,
        inputs=_inputs(fields),
        base64=form == "base64",
        dimensions=fields.integer("dimensions", 1, I32_MAX),
    )
    fields.refuse_unknown()
    return request


def _inputs(fields: Fields) -> tuple[_Input, ...]:
    value = fields.get("input")
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return (_input(fields, "input", value),)
    if not isinstance(value, list) or not value:
        found = "missing" if value is None else "empty" if value == [] else describe(value)
        raise fields.error("input", f"must be a string, token ids, or an array of those; it is {found}")
    if len(value) > MAX_INPUTS:
        raise fields.error("input", f"has {len(value)} entries; at most {MAX_INPUTS} are taken")
    return tuple(_input(fields, f"input[{index}]", one) for index, one in enumerate(value))


def _input(fields: Fields, name: str, value: Any) -> _Input:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.error(name, "must be a string, or an array of at least one token id")
    for index, token in enumerate(value):
        check_is_token_id(fields, f"{name}[{index}]", token)
    return tuple(value)


async def _tokens(generator: Generator, text: _Input, index: int) -> Sequence[int]:
    param = f"input[{index}]"
    tokens: Sequence[int]
    if isinstance(text, str):
        try:
            tokens = await generator.tokenizer.tokenize(text, add_special=True, parse_special=False)
        except TokenizerError as error:
            raise ApiError(str(error), param=param, code=error.code) from error
    else:
        check_token_ids(text, generator.vocabulary.size, param)
        tokens = text
    if not tokens:
        raise ApiError(f"{param} has no tokens", param=param)
    if len(tokens) > generator.context_length:
        message = f"{param} has {len(tokens)} tokens; the context holds {generator.context_length}"
        raise ApiError(message, param=param, code="context_length_exceeded")
    return tokens

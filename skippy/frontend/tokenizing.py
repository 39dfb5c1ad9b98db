"""``/v1/tokenize`` and ``/v1/detokenize``, also without the prefix.

``/v1/tokenize`` takes two forms of body: llama.cpp's (``content``), and batches of the tokenizer capability
(``requests``), which say which tokenizer they mean. None of them takes a lane or waits for one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, TypeVarTuple

import attrs
from quart import Response
from quart_trio import QuartTrio

from skippy.stage import Tokenizer, TokenizeRequest, TokenizerError, TokenizeResult, TokenizerIdentity
from skippy.stage.tokenizer import MAX_BATCH, MAX_BATCH_BYTES, MAX_INPUT_BYTES, MAX_PIECES, MAX_TOKENS

from .errors import ApiError
from .fields import I32_MAX, Fields, describe
from .routing import Bodies, json_answer
from .schemas import check_model
from .strict_json import parse_object
from .token_ids import check_is_token_id, check_token_ids

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_STATUS: Final = {"runtime_unavailable": 503, "backend_failure": 500, "identity_unavailable": 503}


def add_tokenizer_routes(app: QuartTrio, tokenizer: Tokenizer, model_id: str, bodies: Bodies) -> None:
    @app.get("/v1/tokenize")
    async def describe_tokenizer() -> Response:
        identity = await _raising_api_errors(tokenizer.identity)
        limits = {
            "max_input_bytes": MAX_INPUT_BYTES,
            "max_batch": MAX_BATCH,
            "max_batch_bytes": MAX_BATCH_BYTES,
            "max_tokens": MAX_TOKENS,
        }
        return json_answer({"object": "tokenizer", "identity": attrs.asdict(identity), "limits": limits})

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize() -> Response:
        wanted = await bodies.parsed(parse_tokenize)
        _check(wanted.model, model_id)
        if isinstance(wanted, BatchBody):
            results = await _raising_api_errors(tokenizer.tokenize_batch, wanted.requests)
            return json_answer({"object": "tokenize.batch", "results": list(map(_result_object, results))})
        return json_answer(await _raising_api_errors(_tokenize, tokenizer, wanted))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize() -> Response:
        wanted = await bodies.parsed(parse_detokenize)
        _check(wanted.model, model_id)
        check_token_ids(wanted.tokens, tokenizer.size, "tokens")
        content = b"".join(map(tokenizer.piece, wanted.tokens)).decode("utf-8", "replace")
        return json_answer({"content": content})


async def _raising_api_errors(call: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
    try:
        return await call(*arguments)
    except TokenizerError as error:
        raise ApiError(str(error), status=_STATUS.get(error.code, 400), code=error.code) from error


@attrs.frozen(slots=True, kw_only=True)
class TokenizeBody:
    """llama.cpp's form: texts and token ids, one behind the other."""

    model: str | None
    content: Sequence[str | int]
    add_special: bool
    parse_special: bool
    with_pieces: bool


@attrs.frozen(slots=True, kw_only=True)
class BatchBody:
    model: str | None
    requests: Sequence[TokenizeRequest]


@attrs.frozen(slots=True, kw_only=True)
class DetokenizeBody:
    model: str | None
    tokens: Sequence[int]


def parse_tokenize(body: bytes) -> TokenizeBody | BatchBody:
    """The body of ``POST /v1/tokenize``. Raises ApiError."""
    data = parse_object(body)
    fields = Fields(data)
    model = fields.text("model")
    result: TokenizeBody | BatchBody
    if data.get("requests") is None:
        result = TokenizeBody(
            model=model,
            content=_content(fields),
            add_special=fields.boolean("add_special"),
            parse_special=fields.boolean("parse_special", default=True),
            with_pieces=fields.boolean("with_pieces"),
        )
    else:
        values = fields.array("requests") or []
        requests = [_request(Fields.of(value, f"requests[{index}]")) for index, value in enumerate(values)]
        result = BatchBody(model=model, requests=requests)
    fields.refuse_unknown()
    return result


def parse_detokenize(body: bytes) -> DetokenizeBody:
    """The body of ``POST /v1/detokenize``. Raises ApiError."""
    fields = Fields(parse_object(body))
    model = fields.text("model")
    tokens = fields.array("tokens")
    if tokens is None:
        raise fields.error("tokens", "is missing; an array of token ids is needed")
    if len(tokens) > MAX_TOKENS:
        raise fields.error("tokens", f"has {len(tokens)} token ids; at most {MAX_TOKENS} are taken")
    for index, token in enumerate(tokens):
        check_is_token_id(fields, f"tokens[{index}]", token)
    fields.refuse_unknown()
    return DetokenizeBody(model=model, tokens=tokens)


def _check(model: str | None, served: str) -> None:
    if model is not None:
        check_model(model, served)


async def _tokenize(tokenizer: Tokenizer, body: TokenizeBody) -> dict[str, Any]:
    check_token_ids(body.content, tokenizer.size, "content")
    tokens: list[int] = []
    for index, part in enumerate(body.content):
        if isinstance(part, str):
            # What llama.cpp adds, it adds around the first text.
            first = body.add_special and index == 0
            tokens += await tokenizer.tokenize(part, add_special=first, parse_special=body.parse_special)
        else:
            tokens.append(part)
        if len(tokens) > MAX_TOKENS:
            text = f"content has more than {MAX_TOKENS} tokens, which is as many as are given"
            raise ApiError(text, param="content", code="too_many_tokens")
    if not body.with_pieces:
        return {"tokens": tokens}
    return {"tokens": [{"id": token, "piece": _shown(tokenizer.piece(token))} for token in tokens]}


def _content(fields: Fields) -> list[str | int]:
    value = fields.get("content")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        found = "missing" if value is None else describe(value)
        raise fields.error(
            "content", f"must be a string, or an array of strings and token ids; it is {found}"
        )
    if len(value) > MAX_PIECES:
        raise fields.error("content", f"has {len(value)} parts; at most {MAX_PIECES} are taken")
    for index, part in enumerate(value):
        if not isinstance(part, str):
            check_is_token_id(fields, f"content[{index}]", part)
    return value


def _shown(piece: bytes) -> str | list[int]:
    """As text, where a token's bytes are some; llama.cpp shows the others as numbers."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _request(fields: Fields) -> TokenizeRequest:
    text = fields.text("text")
    if text is None:
        raise fields.error("text", "is missing")
    special = fields.text("special_tokens") or "omit"
    if special not in ("omit", "add"):
        raise fields.error("special_tokens", f"is {special[:40]!r}; it is 'omit' or 'add'")
    # The older name of the same, which goes before it.
    if fields.is_given("add_special"):
        special = "add" if fields.boolean("add_special") else "omit"
    identity = fields.get("identity")
    if identity is None:
        raise fields.error("identity", "is missing; GET /v1/tokenize has that of this tokenizer")
    request = TokenizeRequest(
        text=text,
        identity=_identity(Fields.of(identity, fields.path("identity"))),
        special_tokens="add" if special == "add" else "omit",
        include_token_pieces=fields.boolean("include_token_pieces"),
    )
    fields.refuse_unknown()
    return request


def _identity(fields: Fields) -> TokenizerIdentity:
    def required(name: str) -> str:
        value = fields.text(name)
        if value is None:
            raise fields.error(name, "is missing")
        return value

    index = fields.integer("stage_index", 0, I32_MAX)
    identity = TokenizerIdentity(
        model_id=required("model_id"),
        source_model_sha256=required("source_model_sha256"),
        tokenizer_id=required("tokenizer_id"),
        tokenizer_version=required("tokenizer_version"),
        stage_index=0 if index is None else index,
        serving_profile=required("serving_profile"),
    )
    fields.refuse_unknown()
    return identity


def _result_object(result: TokenizeResult) -> dict[str, Any]:
    error = result.error
    if error is not None:
        shown: dict[str, Any] = {"code": error.code, "message": str(error)}
        for name, identity in (("expected", error.expected), ("actual", error.actual)):
            if identity is not None:
                shown[name] = attrs.asdict(identity)
        return {"request_index": result.request_index, "error": shown}
    answer: dict[str, Any] = {"request_index": result.request_index, "tokens": result.tokens}
    if result.token_pieces is not None:
        answer["token_pieces"] = [list(piece) for piece in result.token_pieces]
    return answer

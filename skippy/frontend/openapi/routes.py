"""The table of routes. A test holds it against the application's."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen(slots=True)
class Route:
    """One route.

    Attributes:
        request, answer: names of schemas; None: no body, or one of any JSON.
        streams: the answer may be a stream of server-sent events.
        query: names of the parameters behind the question mark.
    """

    method: str
    path: str
    summary: str
    request: str | None = None
    answer: str | None = None
    streams: bool = False
    query: tuple[str, ...] = ()


ROUTES: Final = (
    Route("POST", "/v1/chat/completions", "Answer a conversation.", "Chat", "ChatCompletion", streams=True),
    Route("POST", "/v1/completions", "Go on with a text.", "Completion", "TextCompletion", streams=True),
    Route("POST", "/v1/responses", "OpenAI's Responses API.", "Responses", "Response", streams=True),
    Route("POST", "/v1/responses/input_tokens", "Count the tokens of a prompt.", "Responses", "TokenCount"),
    Route("GET", "/v1/responses/{response_id}", "A stored response.", None, "Response", query=("stream",)),
    Route("DELETE", "/v1/responses/{response_id}", "Forget a stored response.", None, "Deleted"),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "What it was asked with.",
        None,
        "List",
        query=("order", "limit", "after"),
    ),
    Route("POST", "/v1/messages", "Anthropic's Messages API.", "Messages", "Message", streams=True),
    Route("POST", "/v1/messages/count_tokens", "Count the tokens of a prompt.", "CountTokens", "TokenCount"),
    Route("POST", "/v1/embeddings", "Embeddings of texts.", "Embeddings", "EmbeddingList"),
    Route("POST", "/v1/tokenize", "Tokens of a text, or of a batch.", "Tokenize", "Tokens"),
    Route("POST", "/tokenize", "The same as /v1/tokenize.", "Tokenize", "Tokens"),
    Route("GET", "/v1/tokenize", "Which tokenizer this is.", None, "Tokenizer"),
    Route("POST", "/v1/detokenize", "The text of tokens.", "Detokenize", "Text"),
    Route("POST", "/detokenize", "The same as /v1/detokenize.", "Detokenize", "Text"),
    Route("POST", "/v1/apply-template", "The prompt of a conversation.", "ApplyTemplate", "Prompt"),
    Route("POST", "/apply-template", "The same as /v1/apply-template.", "ApplyTemplate", "Prompt"),
    Route("GET", "/v1/models", "The model that is served.", None, "List"),
    Route("GET", "/v1/models/{model_id}", "The model, and what it can do.", None, "Model"),
    Route("GET", "/health", "Whether the process serves.", None, "Status"),
    Route("GET", "/healthz", "Whether the process serves.", None, "Status"),
    Route("GET", "/readyz", "Whether the chain can generate.", None, "Status"),
    Route("GET", "/slots", "What each lane does."),
    Route("GET", "/metrics", "Counts and times, for Prometheus."),
    Route("DELETE", "/v1/requests/{request_id}", "End a request that runs."),
    Route("GET", "/kv", "What the prefix caches hold."),
    Route("DELETE", "/kv", "Forget cached prefixes.", query=("namespace",)),
    Route("GET", "/openapi.json", "This document."),
)

"""Schemas of request bodies.

A test holds the names in them against those that the parsers ask for, so that neither has one more. Where a
parser accepts a single value of a parameter, because any other would ask for what there is not, so does its
schema.
"""

from __future__ import annotations

from typing import Final

from . import chat, messages, responses
from .common import ANSWERING
from .shapes import FLAG, TEXT, Schema, array, either, integer, one_of, record, ref

_TOKENS: Final[Schema] = array(integer(0), least=1)
_PROMPTS: Final[Schema] = either(TEXT, _TOKENS, array(either(TEXT, _TOKENS), least=1))

REQUESTS: Final[dict[str, Schema]] = {
    **chat.SCHEMAS,
    **responses.SCHEMAS,
    **messages.SCHEMAS,
    "Completion": record(
        {
            **ANSWERING,
            "prompt": _PROMPTS,
            "echo": FLAG,
            "best_of": integer(1, 128),
            "suffix": one_of(""),
            "logprobs": either(integer(0, 20), FLAG),
        },
        required=("model", "prompt"),
    ),
    "Embeddings": record(
        {
            "model": TEXT,
            "input": _PROMPTS,
            "encoding_format": one_of("float", "base64"),
            "dimensions": integer(1),
            "user": TEXT,
        },
        required=("model", "input"),
    ),
    "Tokenize": either(ref("TokenizeText"), ref("TokenizeBatch")),
    "TokenizeText": record(
        {
            "model": TEXT,
            "content": either(TEXT, array(either(TEXT, integer(0)))),
            "add_special": FLAG,
            "parse_special": FLAG,
            "with_pieces": FLAG,
        },
        required=("content",),
    ),
    "TokenizeBatch": record(
        {
            "model": TEXT,
            "requests": array(
                record(
                    {
                        "text": TEXT,
                        "identity": ref("TokenizerIdentity"),
                        "special_tokens": one_of("omit", "add"),
                        "add_special": FLAG,
                        "include_token_pieces": FLAG,
                    },
                    required=("text", "identity"),
                ),
                most=64,
            ),
        },
        required=("requests",),
    ),
    "TokenizerIdentity": record(
        {
            "model_id": TEXT,
            "source_model_sha256": TEXT,
            "tokenizer_id": TEXT,
            "tokenizer_version": TEXT,
            "stage_index": integer(0, 2**31 - 1),
            "serving_profile": TEXT,
        },
        required=(
            "model_id", "source_model_sha256", "tokenizer_id", "tokenizer_version", "serving_profile",
        ),
    ),
    "Detokenize": record({"model": TEXT, "tokens": array(integer(0))}, required=("tokens",)),
}  # fmt: skip

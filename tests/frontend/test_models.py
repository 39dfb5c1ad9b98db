"""``/v1/models`` says what the model can do, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from .support import MODEL, ScriptedGenerator, client, say

SAMPLE: dict[str, Any] = {
    "chat_template_kwargs": {"a": 1},
    "dry": {"multiplier": 0.5},
    "dry_sequence_breakers": ["x"],
    "grammar": 'root ::= "x"',
    "json_schema": {"type": "object"},
    "logit_bias": {"97": 1},
    "metadata": {"a": "b"},
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "xtc": {"probability": 0.5},
}
NEEDS: dict[str, Any] = {
    "mirostat_tau": {"mirostat_mode": 2},
    "mirostat_eta": {"mirostat_mode": 2},
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "mirostat_entropy": {"mirostat_mode": 2},
    "mirostat_learning_rate": {"mirostat_mode": 2},
}
WORDS = {
    "samplers": "kpt",
    "prompt_cache_retention": "in_memory",
    "reasoning_format": "auto",
    "sampler_sequence": "kpt",
    "service_tier": "auto",
}


@pytest.mark.parametrize("size", [None, 8])
async def test_what_a_model_is(size: int | None) -> None:
    generator = ScriptedGenerator(say("x"))
    generator.embedding_size = size
    async with client(generator) as http:
        model = (await http.get(f"/v1/models/{MODEL}")).json()
        listed = (await http.get("/v1/models")).json()["data"]
    assert (model["context_length"], model["vocabulary_size"], model["embedding_size"]) == (512, 260, size)
    assert ("/v1/embeddings" in model["endpoints"]) == (size is not None)
    assert model["chat_template"]["system"] is True
    assert listed == [{key: value for key, value in model.items() if key != "chat_template"}]


async def test_what_is_said_to_be_supported_is_accepted() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        named = (await http.get(f"/v1/models/{MODEL}")).json()["supported_parameters"]
        assert {"tools", "seed", "response_format", "n", "max_tokens"} <= set(named)
        assert not {"store", "verbosity", "functions", "function_call", "min_keep"} & set(named)
        assert not {"chat_template", "reasoning_effort"} & set(named)  # not allowed, and no way to say so
        for name in named:
            if name in ("model", "messages"):
                continue
            body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], name: value_of(name)}
            body |= NEEDS.get(name, {})
            answer = await http.post("/v1/chat/completions", json=body)
            # Scripts have neither grammars nor log-probabilities.
            if name not in ("grammar", "json_schema", "response_format", "logprobs", "top_logprobs"):
                assert answer.status_code == 200, (name, answer.text)


def value_of(name: str) -> Any:
    if name in ("user", "prompt_cache_key", "safety_identifier"):
        return "a"
    flags = ("prefill_assistant", "stream", "ignore_eos", "parallel_tool_calls", "logprobs")
    if name in flags:
        return True
    return SAMPLE.get(name, WORDS.get(name, 1))

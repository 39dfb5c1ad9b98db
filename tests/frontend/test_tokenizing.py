"""``/v1/tokenize`` and ``/v1/detokenize`` over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from skippy.engine.toy_vocabulary import ToyVocabulary

from .support import MODEL, ScriptedGenerator, client, say


async def post(path: str, status: int = 200, **body: Any) -> Any:
    async with client(ScriptedGenerator(say("x"))) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_llama_cpps_form(prefix: str) -> None:
    bos, start = ToyVocabulary.BOS, ToyVocabulary.IM_START
    assert await post(f"{prefix}/tokenize", content="a<|im_start|>") == {"tokens": [97, start]}
    assert await post(f"{prefix}/tokenize", content="a<s>", parse_special=False) == {"tokens": [97, *b"<s>"]}
    assert await post(f"{prefix}/tokenize", content="a", add_special=True) == {"tokens": [bos, 97]}
    # Only the first of several texts gets what is added.
    mixed = ["a", 260 - 1, "b"]
    assert await post(f"{prefix}/tokenize", content=mixed, add_special=True) == {"tokens": [bos, 97, 259, 98]}
    assert await post(f"{prefix}/detokenize", tokens=[97, start, 0xE2, 0x82, 0xAC]) == {
        "content": "a<|im_start|>€"
    }


async def test_pieces_that_are_no_text_are_numbers() -> None:
    answer = await post("/v1/tokenize", content="aé", with_pieces=True, model=MODEL)
    assert answer["tokens"] == [
        {"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]},
    ]  # fmt: skip
    assert await post("/v1/detokenize", tokens=[0xC3]) == {"content": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "content"),
        ("tokenize", {"content": [1.5]}, "content[0]"),
        ("tokenize", {"content": ["a", 260]}, "content[1]"),
        ("tokenize", {"content": "a", "requests": []}, "content"),
        ("tokenize", {"requests": [{"text": "a"}]}, "requests[0].identity"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": [True]}, "tokens[0]"),
        ("detokenize", {"tokens": [], "lossy": True}, "lossy"),
    ],
)
async def test_faults_are_named(path: str, body: dict[str, Any], param: str) -> None:
    assert (await post(f"/v1/{path}", 400, **body))["error"]["param"] == param


async def test_another_model_is_not_found() -> None:
    assert (await post("/v1/tokenize", 404, content="a", model="gpt-4o"))["error"][
        "code"
    ] == "model_not_found"


async def test_a_batch_names_its_tokenizer() -> None:
    async with client(ScriptedGenerator(say("x"))) as http:
        identity = (await http.get("/v1/tokenize")).json()["identity"]
        assert identity["model_id"] == MODEL
        assert identity["tokenizer_id"] == "gguf-source-sha256:" + "ab" * 32
        other = {**identity, "model_id": "other"}
        requests = [
            {"text": "a<s>", "identity": identity, "special_tokens": "add", "include_token_pieces": True},
            {"text": "a", "identity": other},
            {"text": "b", "identity": identity, "special_tokens": "add", "add_special": False},
        ]
        answer = (await http.post("/v1/tokenize", json={"requests": requests})).json()
        one, two, three = answer["results"]
        assert one["tokens"] == [256, *b"a<s>"]
        assert one["token_pieces"] == [[*b"<s>"], *([byte] for byte in b"a<s>")]
        assert two["error"]["code"] == "identity_mismatch"
        assert (two["error"]["expected"], two["error"]["actual"]) == (other, identity)
        assert three == {"request_index": 2, "tokens": [98]}
        large = await http.post("/v1/tokenize", json={"requests": [requests[2]] * 65})
        assert (large.status_code, large.json()["error"]["code"]) == (400, "batch_too_large")


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_conversations_prompt_as_text(prefix: str) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    expected = "<|im_start|>user\na<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert await post(f"{prefix}/apply-template", messages=messages) == {"prompt": expected}
    assert await post(f"{prefix}/apply-template", messages=messages, model=MODEL) == {"prompt": expected}
    wrong = await post(f"{prefix}/apply-template", 400, messages=[{"role": "user"}])
    assert wrong["error"]["param"] == "messages[0].content"
    own = await post(f"{prefix}/apply-template", 400, messages=messages, chat_template="x")
    assert own["error"]["param"] == "chat_template"

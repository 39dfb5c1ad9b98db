"""The tokenizer capability of a stage 0."""

from __future__ import annotations

import pytest
import trio

from skippy.engine.toy_vocabulary import ToyVocabulary
from skippy.stage import ControlPiece, Tokenizer, TokenizeRequest, TokenizerError, TokenizerIdentity
from skippy.stage.tokenizer import MAX_BATCH_BYTES, MAX_INPUT_BYTES, MAX_PIECES
from tests.support.cluster import toy_cluster

SHA = "0f" * 32
IDENTITY = TokenizerIdentity.of("m", SHA)


def tokenizer() -> Tokenizer:
    return Tokenizer(ToyVocabulary(), "m", lambda: SHA)


def ask(text: str, identity: TokenizerIdentity = IDENTITY) -> TokenizeRequest:
    return TokenizeRequest(text=text, identity=identity)


async def test_results_are_in_order_and_errors_stay_with_their_text() -> None:
    other = TokenizerIdentity.of("m", "00" * 32)
    requests = [ask("a</s>"), ask("x", other), ask("x" * (MAX_INPUT_BYTES + 1)), ask("b"), ask("\ud800")]
    results = await tokenizer().tokenize_batch(requests)
    assert [result.request_index for result in results] == [0, 1, 2, 3, 4]
    assert results[0].tokens == tuple(b"a</s>")  # text is text
    assert results[3].tokens == (98,)
    codes = [result.error.code if result.error else None for result in results]
    assert codes == [None, "identity_mismatch", "input_too_large", None, "unsupported_input"]
    error = results[1].error
    assert error is not None
    assert (error.expected, error.actual) == (other, IDENTITY)


async def test_batches_are_bounded() -> None:
    for requests, code in (
        ([ask("a")] * 65, "batch_too_large"),
        ([ask("x" * (MAX_BATCH_BYTES // 9))] * 10, "batch_input_too_large"),
    ):
        with pytest.raises(TokenizerError) as caught:
            await tokenizer().tokenize_batch(requests)
        assert caught.value.code == code


async def test_too_many_tokens_are_an_error_of_that_text() -> None:
    (result,) = await tokenizer().tokenize_batch([ask("x" * 262_145)])
    assert result.error is not None
    assert result.error.code == "too_many_tokens"


async def test_structured_input_is_encoded_as_it_is() -> None:
    pieces = [ControlPiece("<|im_start|>"), "user\n<s>é".encode(), ControlPiece("<|im_end|>"), b""]
    expected = (ToyVocabulary.IM_START, *"user\n<s>é".encode(), ToyVocabulary.IM_END)
    assert await tokenizer().encode(pieces, IDENTITY) == expected


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([b"\xff"], "unsupported_input"),
        ([b"a\0"], "unsupported_input"),
        ([ControlPiece("<none>")], "unsupported_input"),
        ([ControlPiece("a")], "unsupported_input"),
        ([b"a"] * (MAX_PIECES + 1), "too_many_pieces"),
        ([b"a" * 600_000] * 2, "input_too_large"),
    ],
)
async def test_what_cannot_be_encoded(pieces: list[bytes | ControlPiece], code: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        await tokenizer().encode(pieces, IDENTITY)
    assert caught.value.code == code


async def test_text_that_a_tokenizer_changes_is_not_encoded() -> None:
    class Spaced(ToyVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            return super().tokenize(f" {text}", add_special=add_special, parse_special=parse_special)

    with pytest.raises(TokenizerError, match="changes this text") as caught:
        await Tokenizer(Spaced(), "m", lambda: SHA).encode([b"a"], IDENTITY)
    assert caught.value.code == "unsupported_input"


async def test_inventory() -> None:
    entries = await tokenizer().inventory()
    assert [entry.token for entry in entries] == list(range(260))
    assert (entries[97].piece, entries[97].control) == (b"a", False)
    assert (entries[256].piece, entries[256].control) == (b"<s>", True)


async def test_only_stage_0_has_it() -> None:
    with trio.fail_after(30):
        async with toy_cluster(3) as cluster:
            tokens = await cluster.stages[0].tokenizer.tokenize("a", add_special=True, parse_special=False)
            assert tokens == (256, 97)
            with pytest.raises(TokenizerError, match="is not stage 0") as caught:
                _ = cluster.stages[2].tokenizer
            assert caught.value.code == "stage_zero_required"
            with pytest.raises(TokenizerError) as caught:  # engines that a host brings have no file
                await cluster.stages[0].tokenizer.identity()
            assert caught.value.code == "identity_unavailable"

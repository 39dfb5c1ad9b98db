"""The tokenizer of a loaded stage 0 as a capability of its own: batches, structured input, inventory.

It uses the vocabulary that the stage has loaded anyway, in a thread beside the engine's: nothing here waits
for a lane or for decoding. Who counts tokens for a chain says which tokenizer it means
(:class:`TokenizerIdentity`), so that nobody counts with another model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, Literal

import attrs
import trio

from skippy.engine import EngineError, Vocabulary
from skippy.models import ModelError

MAX_INPUT_BYTES: Final = 1024 * 1024
MAX_BATCH: Final = 64
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
MAX_TOKENS: Final = 262_144
MAX_PIECES: Final = 4096
MAX_INVENTORY: Final = 1_000_000
TOKENIZER_VERSION: Final = "gguf-native-v1"
SERVING_PROFILE: Final = "stage-zero"

SpecialTokens = Literal["omit", "add"]
ErrorCode = Literal[
    "stage_zero_required",
    "unsupported_stage",
    "identity_unavailable",
    "runtime_unavailable",
    "identity_mismatch",
    "batch_too_large",
    "batch_input_too_large",
    "input_too_large",
    "too_many_pieces",
    "too_many_tokens",
    "unsupported_input",
    "backend_failure",
]


@attrs.frozen(slots=True, kw_only=True)
class TokenizerIdentity:
    """Which tokenizer it is; equal identities tokenise equally.

    Attributes:
        source_model_sha256: digest of the whole model's file, 64 hexadecimal digits.
        tokenizer_id: ``gguf-source-sha256:`` and that digest.
        tokenizer_version: how the file's tokenizer is read.
    """

    model_id: str
    source_model_sha256: str
    tokenizer_id: str
    tokenizer_version: str = TOKENIZER_VERSION
    stage_index: int = 0
    serving_profile: str = SERVING_PROFILE

    @classmethod
    def of(cls, model_id: str, sha256: str) -> TokenizerIdentity:
        return cls(model_id=model_id, source_model_sha256=sha256, tokenizer_id=f"gguf-source-sha256:{sha256}")


class TokenizerError(Exception):
    """Something was not tokenised.

    Attributes:
        code: which of the reasons it was.
        expected, actual: of ``identity_mismatch``: the identity that was asked for, and this tokenizer's.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        expected: TokenizerIdentity | None = None,
        actual: TokenizerIdentity | None = None,
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.expected = expected
        self.actual = actual


@attrs.frozen(slots=True, kw_only=True)
class TokenizeRequest:
    """One text.

    Attributes:
        text: taken as text, also where it reads like a special token.
        identity: of the tokenizer that is meant.
        special_tokens: ``add``: BOS and EOS as the model has them around a text.
        include_token_pieces: the result has the bytes of each token, too.
    """

    text: str
    identity: TokenizerIdentity
    special_tokens: SpecialTokens = "omit"
    include_token_pieces: bool = False


@attrs.frozen(slots=True, kw_only=True)
class TokenizeResult:
    """What became of one request of a batch: ``tokens``, or ``error``.

    Attributes:
        request_index: its place in the batch; results are in that order.
        token_pieces: the bytes of each token, those of special tokens included, where asked for.
    """

    request_index: int
    tokens: tuple[int, ...] = ()
    token_pieces: tuple[bytes, ...] | None = None
    error: TokenizerError | None = None


@attrs.frozen(slots=True)
class ControlPiece:
    """A special token in structured input, by its text, e.g. ``ControlPiece("<|im_end|>")``."""

    text: str


@attrs.frozen(slots=True)
class InventoryEntry:
    """A token of the vocabulary: its id, its bytes, and whether it is a special one."""

    token: int
    piece: bytes
    control: bool


class Tokenizer:
    """The tokenizer of one stage 0. Found at :attr:`skippy.stage.Stage.tokenizer`.

    Calls work in a thread, one at a time; a cancelled one finishes the text that it is at, and is dropped.

    Args:
        source_sha256: finds the digest of the model's file, in that thread, once; None: nobody knows it.
    """

    def __init__(
        self, vocabulary: Vocabulary, model_id: str, source_sha256: Callable[[], str] | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._model_id = model_id
        self._source_sha256 = source_sha256
        self._identity: TokenizerIdentity | None = None
        self._limiter = trio.CapacityLimiter(1)

    async def identity(self) -> TokenizerIdentity:
        """Which tokenizer this is. The first call may read the whole model file.

        Raises:
            TokenizerError: ``identity_unavailable``.
        """
        return await trio.to_thread.run_sync(self._find_identity, limiter=self._limiter)

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """Tokens of one text, by this tokenizer whichever it is: as :meth:`Vocabulary.tokenize`.

        Raises:
            TokenizerError: ``input_too_large``, ``too_many_tokens``, ``unsupported_input`` or
                ``runtime_unavailable``.
        """
        call = functools.partial(self._tokenize, text, add_special=add_special, control=parse_special)
        return await trio.to_thread.run_sync(call, limiter=self._limiter)

    def piece(self, token: int) -> bytes:
        """The bytes of a token, those of special tokens included.

        Raises:
            ValueError: the vocabulary has no such token.
            TokenizerError: ``runtime_unavailable``.
        """
        try:
            return self._vocabulary.piece(token, special=True)
        except EngineError as error:
            raise TokenizerError("runtime_unavailable", str(error)) from error

    @property
    def size(self) -> int:
        """How many tokens the vocabulary has."""
        return self._vocabulary.size

    async def tokenize_batch(self, requests: Sequence[TokenizeRequest]) -> list[TokenizeResult]:
        """Tokenise texts, one result for each. A text that cannot be has its error in its own result.

        Raises:
            TokenizerError: ``batch_too_large`` (over 64 texts) or ``batch_input_too_large`` (over 8 MiB).
        """
        if len(requests) > MAX_BATCH:
            raise TokenizerError("batch_too_large", f"{len(requests)} texts; a batch has at most {MAX_BATCH}")
        total = sum(len(request.text.encode("utf-8", "surrogatepass")) for request in requests)
        if total > MAX_BATCH_BYTES:
            raise TokenizerError(
                "batch_input_too_large", f"texts of {total} bytes; a batch has at most {MAX_BATCH_BYTES}"
            )
        results = []
        for index, request in enumerate(requests):
            # A thread call each, so that a large batch holds up no other caller for long.
            one = await trio.to_thread.run_sync(self._result, index, request, limiter=self._limiter)
            results.append(one)
        return results

    async def encode(
        self, pieces: Sequence[bytes | ControlPiece], identity: TokenizerIdentity
    ) -> tuple[int, ...]:
        """Tokens of structured input: bytes are text, control pieces are the special tokens they name.

        Nothing is inserted, and nothing is lost: the tokens stand for exactly these bytes.

        Raises:
            TokenizerError: ``too_many_pieces``, ``input_too_large``, ``too_many_tokens``, an identity error,
                or ``unsupported_input``: no UTF-8, a NUL, a control piece that the model does not have, or
                text that the tokenizer changes.
        """
        if len(pieces) > MAX_PIECES:
            raise TokenizerError("too_many_pieces", f"{len(pieces)} pieces; at most {MAX_PIECES} are taken")
        return await trio.to_thread.run_sync(self._encode, tuple(pieces), identity, limiter=self._limiter)

    async def inventory(self) -> list[InventoryEntry]:
        """Every token of the vocabulary, by id.

        Raises:
            TokenizerError: ``too_many_tokens``, over :data:`MAX_INVENTORY`.
        """
        if (size := self._vocabulary.size) > MAX_INVENTORY:
            text = f"the vocabulary has {size} tokens; an inventory has at most {MAX_INVENTORY}"
            raise TokenizerError("too_many_tokens", text)
        return await trio.to_thread.run_sync(self._inventory, limiter=self._limiter)

    def _find_identity(self) -> TokenizerIdentity:
        if self._identity is None:
            if self._source_sha256 is None:
                raise TokenizerError("identity_unavailable", "the digest of the model's file is not known")
            try:
                self._identity = TokenizerIdentity.of(self._model_id, self._source_sha256())
            except (ModelError, OSError) as error:
                text = f"the model's file could not be hashed: {error}"
                raise TokenizerError("identity_unavailable", text) from error
        return self._identity

    def _check_identity(self, expected: TokenizerIdentity) -> None:
        actual = self._find_identity()
        if expected != actual:
            raise TokenizerError(
                "identity_mismatch",
                f"asked for tokenizer {expected.tokenizer_id} of model {expected.model_id!r}, this is "
                f"{actual.tokenizer_id} of {actual.model_id!r}",
                expected=expected,
                actual=actual,
            )

    def _result(self, index: int, request: TokenizeRequest) -> TokenizeResult:
        try:
            self._check_identity(request.identity)
            tokens = self._tokenize(request.text, add_special=request.special_tokens == "add")
            pieces = None
            if request.include_token_pieces:
                pieces = tuple(map(self.piece, tokens))
        except TokenizerError as error:
            return TokenizeResult(request_index=index, error=error)
        return TokenizeResult(request_index=index, tokens=tokens, token_pieces=pieces)

    def _tokenize(self, text: str, *, add_special: bool = False, control: bool = False) -> tuple[int, ...]:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > MAX_INPUT_BYTES:
            raise TokenizerError(
                "input_too_large", f"the text has {size} bytes; at most {MAX_INPUT_BYTES} are taken"
            )
        try:
            tokens = self._vocabulary.tokenize(text, add_special=add_special, parse_special=control)
        except ValueError as error:  # also of text that is no Unicode
            raise TokenizerError("unsupported_input", str(error)) from error
        except EngineError as error:
            raise TokenizerError("runtime_unavailable", str(error)) from error
        if len(tokens) > MAX_TOKENS:
            raise TokenizerError("too_many_tokens", f"{len(tokens)} tokens; at most {MAX_TOKENS} are given")
        return tuple(tokens)

    def _encode(
        self, pieces: tuple[bytes | ControlPiece, ...], identity: TokenizerIdentity
    ) -> tuple[int, ...]:
        self._check_identity(identity)
        size = sum(len(piece) for piece in pieces if isinstance(piece, bytes))
        if size > MAX_INPUT_BYTES:
            raise TokenizerError(
                "input_too_large", f"the pieces have {size} bytes; at most {MAX_INPUT_BYTES} are taken"
            )
        tokens: list[int] = []
        for index, piece in enumerate(pieces):
            one = self._control(piece, index) if isinstance(piece, ControlPiece) else self._text(piece, index)
            tokens += one
        if len(tokens) > MAX_TOKENS:
            raise TokenizerError("too_many_tokens", f"{len(tokens)} tokens; at most {MAX_TOKENS} are given")
        return tuple(tokens)

    def _control(self, piece: ControlPiece, index: int) -> tuple[int, ...]:
        # What has many tokens is no special token, so a long text need not be looked at.
        known = piece.text in self._vocabulary.special_tokens
        tokens = self._tokenize(piece.text, control=True) if known else ()
        if len(tokens) != 1:
            text = f"piece {index}: the model has no special token {piece.text[:100]!r}"
            raise TokenizerError("unsupported_input", text)
        return tokens

    def _text(self, piece: bytes, index: int) -> tuple[int, ...]:
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(
                "unsupported_input", f"piece {index} is not valid UTF-8 at byte {error.start}"
            ) from None
        if "\0" in text:
            raise TokenizerError("unsupported_input", f"piece {index} has a NUL character")
        tokens = self._tokenize(text)
        if b"".join(map(self._vocabulary.piece, tokens)) != piece:
            text = f"piece {index}: the model's tokenizer changes this text, so no tokens stand for it"
            raise TokenizerError("unsupported_input", text)
        return tokens

    def _inventory(self) -> list[InventoryEntry]:
        vocabulary, special = self._vocabulary, frozenset(self._vocabulary.special_tokens)
        pieces = vocabulary.pieces(special=True)
        return [
            InventoryEntry(token, piece, piece.decode("utf-8", "replace") in special)
            for token, piece in enumerate(pieces)
        ]

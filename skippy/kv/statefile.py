"""The head of a file that keeps one state: what it is of, and the digest of what follows.

Little-endian::

    8   magic "SKIPPYKV"
    u32 version, 1
    u32 bytes of the whole head
    32  identity of the stage (a digest of all that changes numbers)
    32  BLAKE2b-256 of the state
    u64 bytes of the state, which is the rest of the file
    u32 flags: bit 0 says that the entry was computed alone
    u32 bytes of the namespace, at most 256
    u32 chunk sizes
    u32 tokens
    …   namespace (UTF-8), chunk sizes (u32 each), tokens (i32 each)

The file's name is the BLAKE2b-256 of the head, so it vouches for all of the file. No file is ever migrated.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from io import FileIO
from typing import Final

import attrs

from .blocks import DIGEST_BYTES, digest_of

MAGIC: Final = b"SKIPPYKV"
VERSION: Final = 1
MAX_NAMESPACE_BYTES: Final = 256
MAX_TOKENS: Final = 2**24
"""As many positions as a context can have."""
MAX_STATE_BYTES: Final = 2**40
SUFFIX: Final = ".kv"

_FIXED: Final = struct.Struct("<8sII32s32sQIIII")
FIXED_BYTES: Final = _FIXED.size
_ALONE: Final = 1


class StateFileError(ValueError):
    """These bytes are no head of a state file; says what is wrong with them."""


@attrs.frozen(slots=True, kw_only=True)
class StateHead:
    """What a state file says about its state.

    Attributes:
        identity: 32 bytes; of the stage that can read it.
        namespace, tokens: what it is the state of; an array of C ints.
        schedule: sizes of the chunks in which the tokens were computed.
        alone: no other session's rows shared a native call with these chunks.
        state_digest: BLAKE2b-256 of the state.
        state_bytes: its size.
    """

    identity: bytes
    namespace: str
    tokens: array[int] = attrs.field(repr=False)
    schedule: tuple[int, ...] = ()
    alone: bool = False
    state_digest: bytes
    state_bytes: int

    def encode(self) -> bytes:
        """The head's bytes.

        Raises:
            ValueError: something is out of range.
        """
        namespace = self.namespace.encode()
        if len(namespace) > MAX_NAMESPACE_BYTES:
            raise ValueError(
                f"a namespace of {len(namespace)} bytes; at most {MAX_NAMESPACE_BYTES} are allowed"
            )
        if not 1 <= len(self.tokens) <= MAX_TOKENS or len(self.schedule) > len(self.tokens):
            raise ValueError(f"{len(self.schedule)} chunks of {len(self.tokens)} tokens")
        if not 1 <= self.state_bytes <= MAX_STATE_BYTES:
            raise ValueError(f"a state of {self.state_bytes} bytes")
        if len(self.identity) != DIGEST_BYTES or len(self.state_digest) != DIGEST_BYTES:
            raise ValueError(f"digests have {DIGEST_BYTES} bytes")
        rest = namespace + _packed(array("I", self.schedule)) + _packed(self.tokens)
        counts = (len(namespace), len(self.schedule), len(self.tokens))
        size, flags = FIXED_BYTES + len(rest), _ALONE if self.alone else 0
        fixed = (MAGIC, VERSION, size, self.identity, self.state_digest, self.state_bytes, flags)
        return _FIXED.pack(*fixed, *counts) + rest


def parse_head(head: bytes) -> StateHead:
    """The inverse of :meth:`StateHead.encode`: what it accepts encodes to the same bytes.

    Uses memory in proportion to ``head``. Raises StateFileError.
    """
    size, namespace_bytes, chunks, _ = _sizes(head)
    if len(head) != size:
        raise StateFileError(f"a head of {len(head)} bytes that says it has {size}")
    _, _, _, identity, state_digest, state_bytes, flags, *_ = _FIXED.unpack_from(head)
    if flags & ~_ALONE:
        raise StateFileError(f"unknown flags {flags:#x}")
    if not 1 <= state_bytes <= MAX_STATE_BYTES:
        raise StateFileError(f"a state of {state_bytes} bytes")
    at = FIXED_BYTES + namespace_bytes
    try:
        namespace = head[FIXED_BYTES:at].decode()
    except UnicodeDecodeError:
        raise StateFileError("the namespace is not UTF-8") from None
    return StateHead(
        identity=identity,
        namespace=namespace,
        schedule=tuple(_unpacked("I", head[at : at + 4 * chunks])),
        tokens=_unpacked("i", head[at + 4 * chunks :]),
        alone=bool(flags & _ALONE),
        state_digest=state_digest,
        state_bytes=state_bytes,
    )


def name_of(head: bytes) -> str:
    """The name of the file that starts with ``head``."""
    return digest_of(head).hex() + SUFFIX


def path_key(namespace: str, tokens: array[int]) -> bytes:
    """32 bytes that stand for one token path in one namespace."""
    return digest_of(digest_of(namespace.encode()) + _packed(tokens))


def read_head(stream: FileIO, name: str, identity: bytes) -> tuple[StateHead, int]:
    """The head at the start of an open file, and the size of the file, if it is what its name says.

    Raises:
        StateFileError: it is not, is of another stage, or not of the size that the head says.
        OSError
    """
    size = os.fstat(stream.fileno()).st_size
    start = _read(stream, FIXED_BYTES)
    start += _read(stream, min(_sizes(start)[0], size) - FIXED_BYTES)
    if name_of(start) != name:
        raise StateFileError("its head does not fit its name")
    head = parse_head(start)
    if head.identity != identity:
        raise StateFileError("it is of another stage")
    if size != len(start) + head.state_bytes:
        raise StateFileError(f"it has {size} bytes, should have {len(start) + head.state_bytes}")
    return head, size


def read_state(stream: FileIO, name: str, identity: bytes) -> memoryview:
    """The state in an open file, verified. Raises as :func:`read_head`, also for a state that is damaged."""
    head, _ = read_head(stream, name, identity)
    state = memoryview(bytearray(head.state_bytes))
    _fill(stream, state)
    if digest_of(state) != head.state_digest:
        raise StateFileError("its state does not fit its digest")
    return state.toreadonly()


def _read(stream: FileIO, size: int) -> bytes:
    data = bytearray(size)
    _fill(stream, memoryview(data))
    return bytes(data)


def _fill(stream: FileIO, target: memoryview) -> None:
    while target:
        count = stream.readinto(target)
        if not count:
            raise StateFileError(f"it ends {len(target)} bytes too early")
        target = target[count:]


def _sizes(data: bytes) -> tuple[int, int, int, int]:
    """Sizes of head and namespace, counts of chunks and tokens. Raises StateFileError."""
    if len(data) < FIXED_BYTES:
        raise StateFileError(f"{len(data)} bytes are shorter than a head")
    magic, version, size, _, _, _, _, namespace_bytes, chunks, tokens = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise StateFileError("no state file")
    if version != VERSION:
        raise StateFileError(f"version {version}, not {VERSION}")
    if namespace_bytes > MAX_NAMESPACE_BYTES or not 1 <= tokens <= MAX_TOKENS or chunks > tokens:
        raise StateFileError(f"{chunks} chunks of {tokens} tokens, a namespace of {namespace_bytes} bytes")
    if size != FIXED_BYTES + namespace_bytes + 4 * (chunks + tokens):
        raise StateFileError(f"a head of {size} bytes does not fit what is in it")
    return size, namespace_bytes, chunks, tokens


def _packed(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _unpacked(code: str, data: bytes) -> array[int]:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values

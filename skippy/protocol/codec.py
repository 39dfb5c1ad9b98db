"""The codec: everything that turns values into bytes and bytes into values.

Encoding builds a whole frame in memory (or raises and builds nothing); decoding is incremental and never
reads, waits or allocates before a limit was checked.
"""

from .codec_messages import (
    MessageDecoder,
    encode_forwarded,
    encode_frame,
    encode_message,
    estimated_wire_bytes,
    set_seq_id,
)
from .codec_replies import ReplyDecoder, encode_reply

__all__ = [
    "MessageDecoder",
    "ReplyDecoder",
    "encode_forwarded",
    "encode_frame",
    "encode_message",
    "encode_reply",
    "estimated_wire_bytes",
    "set_seq_id",
]

"""Message kinds, flags and limits of stage protocol generation 8, state version 14.

Source of every number: ``docs/protocol.md`` (sections "Constants", "Message kinds", "Flag bits").
"""

from __future__ import annotations

import enum
from typing import Final

PROTOCOL_GENERATION: Final = 8
STAGE_STATE_VERSION: Final = 14
READY_MAGIC: Final = 0x53524459
TRANSPORT_AUTH_MAGIC: Final = 0x534B5441
MAX_TRANSPORT_AUTH_BYTES: Final = 64
ADMISSION_MAGIC: Final = 0x53545053
ADMISSION_VERSION: Final = 1
MAX_ADMISSION_BYTES: Final = 65_536
MAX_ADMISSION_EXTENSIONS: Final = 32
ANNEX_MAGIC: Final = 0x53545841
ANNEX_VERSION: Final = 1
MAX_ANNEX_BYTES: Final = 65_536
MAX_ANNEX_TOP_TOKENS: Final = 64
MAX_ANNEX_POSITIONS: Final = 64
MAX_ANNEX_REASON_BYTES: Final = 4_096
MAX_ANNEX_REPORT_BYTES: Final = 49_152
HEARTBEAT_MAGIC: Final = 0x53544842
HEARTBEAT_BYTES: Final = 8
MIN_PEER_TIMEOUT_MS: Final = 1_000
MAX_PEER_TIMEOUT_MS: Final = 3_600_000
DECODE_WAVE_NUMBERS: Final = 8_388_608
MAX_DECODE_WAVE_ROWS: Final = 255
LLAMA_TOKEN_NULL: Final = -1
MAX_STAGE_LOGIT_BIAS: Final = 256
MAX_STAGE_SAMPLERS: Final = 16
MAX_STAGE_DRY_SEQUENCE_BREAKERS: Final = 8
MAX_STAGE_SAMPLING_STRING_BYTES: Final = 64
MAX_STAGE_PREDICTED_TOKENS: Final = 262_144
MAX_STAGE_SIDEBAND_VALUES: Final = 1_048_576
MAX_STAGE_CHAT_SAMPLING_METADATA_BYTES: Final = 8_388_608
MAX_STAGE_STATE_IMPORT_BYTES: Final = 536_870_912
MAX_STAGE_ACTIVATION_BYTES: Final = 536_870_912
MAX_STAGE_DECODED_ACTIVATION_BYTES: Final = 536_870_912
STAGE_STATE_HEADER_BYTES: Final = 36
STAGE_WIRE_FIXED_HEADER_BYTES: Final = 72
STAGE_SAMPLING_CONFIG_BASE_BYTES: Final = 108
STAGE_LOGIT_BIAS_WIRE_BYTES: Final = 8
REPLY_STATS_FIELDS: Final = 27
REPLY_STATS_BYTES: Final = 216
MAX_VERIFY_WINDOW_PIPELINE_DEPTH: Final = 64


class MessageKind(enum.IntEnum):
    """First word of a message frame. Any other value is refused."""

    PREFILL_EMBD = 1
    DECODE_EMBD = 2
    STOP = 3
    PREFILL_FINAL_EMBD = 4
    DECODE_REPLAY_EMBD = 5
    DECODE_REPLAY_FINAL_EMBD = 6
    STATE_IMPORT = 7
    DECODE_READOUT = 8
    DECODE_LIGHT_CTX = 9
    STATE_EXPORT = 13
    CONFIGURE_GENERATION = 14
    PROBE_PREFILL = 15
    RESTORE_PREFILL = 16
    TRY_RESTORE_PREFILL = 17
    TRY_RESTORE_PREFILL_DECODE = 18
    TRIM_SESSION = 19
    PREDICTION_RETURN_OPEN = 20
    VERIFY_WINDOW = 21
    RETIRE_VERIFY_WINDOW = 22


class ReplyKind(enum.IntEnum):
    """First word of a reply frame."""

    ACK = 1
    PREDICTED_TOKEN = 2
    PREDICTED_TOKENS = 3


class StateFlag(enum.IntFlag):
    """Bits of the state header's ``flags`` word; unknown bits pass through."""

    FINAL_CHUNK = 1
    LIGHT_CONTEXT = 2
    SAMPLING = 8
    FULL_STATE = 16
    CHAT_SAMPLING_METADATA = 32
    RWKV7_V_FIRST_SIDEBAND = 64
    GEMMA3N_ALTUP_SIDEBAND = 128
    INKLING_MTP_EMBD_SIDEBAND = 256
    COMPUTED_TOGETHER = 512
    """An extension: see :mod:`skippy.protocol.restores`."""


class SamplingFlag(enum.IntFlag):
    """Bits of the sampling block's ``flags`` word."""

    ENABLED = 1
    IGNORE_EOS = 2

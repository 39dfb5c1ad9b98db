"""The values that travel: messages, replies, sampling settings, statistics.

Plain data. Encoding and decoding live in :mod:`skippy.protocol.codec`.
Field meaning and layout: ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .kinds import LLAMA_TOKEN_NULL, STAGE_STATE_VERSION, MessageKind, ReplyKind, SamplingFlag

DEFAULT_DRY_SEQUENCE_BREAKERS: tuple[str, ...] = ("\n", ":", '"', "*")
DEFAULT_SAMPLERS: tuple[str, ...] = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip

Buffer = bytes | bytearray | memoryview


@attrs.frozen(slots=True)
class StageState:
    """The 36-byte state header: nine i32 words."""

    version: int = STAGE_STATE_VERSION
    seq_id: int = 0
    phase: int = 1
    flags: int = 0
    checkpoint_generation: int = 0
    prompt_token_count: int = 0
    decode_step: int = -1
    current_token: int = LLAMA_TOKEN_NULL
    source_stage_index: int = -1


@attrs.frozen(slots=True)
class SamplingConfig:
    """The sampling block. Defaults are the wire's: neutral, and not enabled."""

    flags: int = 0
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    penalty_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    typical_p: float = 1.0
    top_nsigma: float = -1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_DRY_SEQUENCE_BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat_mode: int = 0
    mirostat_entropy: float = 5.0
    mirostat_learning_rate: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    ignore_eos: bool = False

    @property
    def enabled(self) -> bool:
        """Whether the block counts at all; a disabled one is treated like none (greedy)."""
        return bool(self.flags & SamplingFlag.ENABLED)

    @property
    def ignores_eos(self) -> bool:
        return self.ignore_eos or bool(self.flags & SamplingFlag.IGNORE_EOS)


@attrs.frozen(slots=True, eq=False)
class Message:
    """One message frame.

    ``tokens`` and ``positions`` are the sidebands, independent of ``token_count``.
    ``activation`` is raw little-endian f32, ``token_count * multiplier * n_embd * 4`` bytes, or empty;
    it is kept by reference, never copied. ``raw_bytes`` is the payload of StateImport only.
    """

    kind: MessageKind
    state: StageState
    pos_start: int = 0
    token_count: int = 0
    request_id: int = 0
    session_id: int = 0
    sampling: SamplingConfig | None = None
    chat_sampling_metadata: str | None = None
    tokens: Sequence[int] = ()
    positions: Sequence[int] = ()
    activation: Buffer = b""
    raw_bytes: Buffer = b""

    def forwarded(self, source_stage_index: int, activation: Buffer) -> Message:
        """This data message as a stage passes it on: its own output in place of its input.

        Kind, position, counts, ids, sidebands and sampling stay; chat metadata is not forwarded with
        activations (``docs/protocol.md``, "How messages are filled in").
        """
        state = self.state
        # Spelled out: this runs once per token and stage, and attrs.evolve takes three times as long.
        return Message(
            self.kind,
            StageState(
                state.version,
                state.seq_id,
                state.phase,
                state.flags,
                state.checkpoint_generation,
                state.prompt_token_count,
                state.decode_step,
                state.current_token,
                source_stage_index,
            ),
            self.pos_start,
            self.token_count,
            self.request_id,
            self.session_id,
            self.sampling,
            None,
            self.tokens,
            self.positions,
            activation,
        )

    def skipped(self, source_stage_index: int) -> Message:
        """This message as a stage passes it on that does not carry it out: its header, and no rows."""
        return attrs.evolve(
            self,
            state=attrs.evolve(self.state, source_stage_index=source_stage_index),
            token_count=0,
            sampling=None,
            chat_sampling_metadata=None,
            tokens=(),
            positions=(),
            activation=b"",
        )


@attrs.frozen(slots=True)
class ReplyStats:
    """The 27 statistics of a reply, all i64, in wire order."""

    kv_lookup_hits: int = 0
    kv_lookup_misses: int = 0
    kv_lookup_errors: int = 0
    kv_imported_pages: int = 0
    kv_imported_tokens: int = 0
    kv_recorded_pages: int = 0
    kv_recorded_bytes: int = 0
    kv_hit_stage_mask: int = 0
    kv_record_stage_mask: int = 0
    verify_window_compute_us: int = 0
    verify_window_forward_write_us: int = 0
    verify_window_downstream_wait_us: int = 0
    verify_window_total_us: int = 0
    verify_window_stage_count: int = 0
    verify_window_request_count: int = 0
    verify_window_token_count: int = 0
    verify_window_max_tokens: int = 0
    prefill_edge_write_us_max: int = 0
    prefill_edge_wait_us_max: int = 0
    prefill_edge_total_us_max: int = 0
    prefill_edge_stage_index: int = 0
    prefill_edge_activation_bytes_max: int = 0
    prefill_edge_observation_count: int = 0
    prefill_compute_us_at_slowest_rate: int = 0
    prefill_compute_stage_index: int = 0
    prefill_compute_token_count_at_slowest_rate: int = 0
    prefill_compute_observation_count: int = 0


@attrs.frozen(slots=True)
class NativeMtpDraft:
    """An optional draft proposal on a reply; never part of ``predicted_tokens``."""

    tokens: tuple[int, ...] = ()
    proposal_compute_us: int = 0


EMPTY_STATS = ReplyStats()


@attrs.frozen(slots=True)
class Reply:
    """One reply frame. The codec does not tie the kind to the token list."""

    kind: ReplyKind
    predicted: int = 0
    predicted_tokens: tuple[int, ...] = ()
    window_id: int = 0
    native_mtp_draft: NativeMtpDraft | None = None
    stats: ReplyStats = EMPTY_STATS

    @classmethod
    def ack(cls, stats: ReplyStats = EMPTY_STATS) -> Reply:
        return cls(ReplyKind.ACK, stats=stats)

    @classmethod
    def predicted_token(cls, token: int, stats: ReplyStats = EMPTY_STATS) -> Reply:
        return cls(ReplyKind.PREDICTED_TOKEN, predicted=token, predicted_tokens=(token,), stats=stats)

    @classmethod
    def of_predicted_tokens(
        cls, tokens: Sequence[int], window_id: int = 0, stats: ReplyStats = EMPTY_STATS
    ) -> Reply:
        return cls(
            ReplyKind.PREDICTED_TOKENS,
            predicted=tokens[0] if tokens else 0,
            predicted_tokens=tuple(tokens),
            window_id=window_id,
            stats=stats,
        )

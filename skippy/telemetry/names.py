"""Names of the trace points. Dashboards know them: a name never changes, attributes are only added."""

from __future__ import annotations

from typing import Final

# One stage as a service.
STAGE_BINARY_SERVER_START: Final = "stage.binary_server_start"
STAGE_CONNECTION_SETUP_READY: Final = "stage.connection_setup_ready"
STAGE_BINARY_CONNECTION_ERROR: Final = "stage.binary_connection_error"
STAGE_CONNECTION_WORKER_PANIC: Final = "stage.connection_worker_panic"
STAGE_EMBEDDED_RUNTIME_LOAD_START: Final = "stage.embedded_runtime_load_start"
STAGE_EMBEDDED_RUNTIME_READY: Final = "stage.embedded_runtime_ready"
STAGE_EMBEDDED_RUNTIME_STOPPED: Final = "stage.embedded_runtime_stopped"

# One message through a stage.
STAGE_BINARY_RECV: Final = "stage.binary_recv"
STAGE_BINARY_LLAMA_DECODE: Final = "stage.binary_llama_decode"
STAGE_BINARY_DOWNSTREAM_WRITE: Final = "stage.binary_downstream_write"
STAGE_BINARY_UPSTREAM_REPLY_WRITE: Final = "stage.binary_upstream_reply_write"
STAGE_BINARY_MESSAGE_TIMING: Final = "stage.binary_message_timing"
STAGE_BINARY_SESSION_AUTO_ALIGN: Final = "stage.binary_session_auto_align"
STAGE_BINARY_SESSION_STOP: Final = "stage.binary_session_stop"
STAGE_BINARY_SESSION_ORPHAN_RECLAIMED: Final = "stage.binary_session_orphan_reclaimed"

# The prefix cache.
STAGE_KV_RESTORE: Final = "stage.kv_restore"

# The scheduler.
STAGE_SCHEDULER_START: Final = "stage.scheduler_start"
STAGE_SCHEDULER_ITERATION: Final = "stage.scheduler_iteration"
STAGE_SCHEDULER_WORKER_PANIC: Final = "stage.scheduler_worker_panic"

# The OpenAI front end and its lanes.
STAGE_OPENAI_SERVER_START: Final = "stage.openai_server_start"
STAGE_OPENAI_DOWNSTREAM_PERSISTENT_CONNECT: Final = "stage.openai_downstream_persistent_connect"
STAGE_OPENAI_DOWNSTREAM_POOL_READY: Final = "stage.openai_downstream_pool_ready"
STAGE_OPENAI_DOWNSTREAM_CONNECT: Final = "stage.openai_downstream_connect"
STAGE_OPENAI_DOWNSTREAM_LANE_REPLACED: Final = "stage.openai_downstream_lane_replaced"
STAGE_OPENAI_DOWNSTREAM_LANE_REPLACE_FAILED: Final = "stage.openai_downstream_lane_replace_failed"
STAGE_OPENAI_DOWNSTREAM_LANE_RETURN_FAILED: Final = "stage.openai_downstream_lane_return_failed"
STAGE_OPENAI_PROMPT_PREPARE: Final = "stage.openai_prompt_prepare"
STAGE_OPENAI_KV_LOOKUP_DECISION: Final = "stage.openai_kv_lookup_decision"
STAGE_OPENAI_CHAT_TEMPLATE: Final = "stage.openai_chat_template"
STAGE_OPENAI_TOKENIZE: Final = "stage.openai_tokenize"
STAGE_OPENAI_GENERATION_ADMIT: Final = "stage.openai_generation_admit"
STAGE_OPENAI_GENERATION_ADMISSION_REJECTED: Final = "stage.openai_generation_admission_rejected"
STAGE_OPENAI_GENERATION_CONCURRENCY_ADAPT: Final = "stage.openai_generation_concurrency_adapt"
STAGE_OPENAI_PREFILL_CHUNK: Final = "stage.openai_prefill_chunk"
STAGE_OPENAI_PREFILL: Final = "stage.openai_prefill"
STAGE_OPENAI_PREFILL_CALIBRATION: Final = "stage.openai_prefill_calibration"
STAGE_OPENAI_STAGE0_LLAMA_DECODE: Final = "stage.openai_stage0_llama_decode"
STAGE_OPENAI_DECODE_TOKEN: Final = "stage.openai_decode_token"
STAGE_OPENAI_DECODE: Final = "stage.openai_decode"
STAGE_OPENAI_REPLAY_BEGIN: Final = "stage.openai_replay_begin"
STAGE_OPENAI_REPLAY_END: Final = "stage.openai_replay_end"
STAGE_OPENAI_REPLAY_FAILED: Final = "stage.openai_replay_failed"
STAGE_OPENAI_SESSION_AUTO_ALIGN: Final = "stage.openai_session_auto_align"
STAGE_OPENAI_SESSION_STOP: Final = "stage.openai_session_stop"
STAGE_OPENAI_RESPONSE_BUILD: Final = "stage.openai_response_build"
STAGE_OPENAI_GENERATION_SUMMARY: Final = "stage.openai_generation_summary"
STAGE_OPENAI_REQUEST_SUMMARY: Final = "stage.openai_request_summary"
STAGE_OPENAI_STREAM_LANE_FREED: Final = "stage.openai_stream_lane_freed"

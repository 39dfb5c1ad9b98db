"""Write the seed corpus: ``python -m fuzz.make_corpus``. The same sources give the same files."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import attrs

from skippy.kv.blocks import digest_of
from skippy.kv.statefile import StateHead
from skippy.models import write_package
from skippy.protocol import (
    READY_WORD,
    FailureCode,
    FinishHint,
    MessageKind,
    PositionLogProbabilities,
    Reply,
    ReplyAnnex,
    RequestFailure,
    TokenLogProbability,
    admit,
    encode_admission,
    encode_annex,
    encode_annexed_reply,
    encode_heartbeat,
    encode_reply,
    encode_transport_auth,
)
from tests.support.adapters import write_adapter
from tests.support.checkpoints import write_checkpoint, write_sentencepiece
from tests.support.tiny_models import write_tiny

from . import CORPUS
from .stages import BARE_REQUEST, LOADED, REQUEST, TOKEN
from .targets import CHECKPOINT_ENTRY, CHECKPOINT_FILES, STATE_IDENTITY, WIDTHS

ROOT: Final = Path(__file__).parents[1]
MAX_SEED: Final = 1024
BEAT: Final = encode_heartbeat(10_000)
Seeds = Iterable[tuple[str, bytes]]


def _golden() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "tests/protocol/golden/frames.json").read_bytes())
    return data


def _vectors(golden: dict[str, Any], kind: str) -> Iterable[tuple[str, int, bytes]]:
    """(name, width, bytes) of the valid frames and streams of one type that are small."""
    for entry in golden["valid"]:
        data = bytes.fromhex(entry["hex"])
        if entry["type"] == kind and len(data) <= MAX_SEED:
            yield entry["name"], entry.get("n_embd") or 0, data


def frame_seeds(golden: dict[str, Any]) -> Seeds:
    for index, (name, width, data) in enumerate(_vectors(golden, "message")):
        choice = WIDTHS.index(width)
        yield name, bytes((choice, index % 8)) + data
        if index == 1:
            yield "heartbeats", bytes((choice | 0x80, 3)) + BEAT + data + BEAT * 2


def reply_seeds(golden: dict[str, Any]) -> Seeds:
    for index, (name, _, data) in enumerate(_vectors(golden, "reply")):
        yield name, bytes((index % 8,)) + data
    yield "heartbeats", b"\x85" + BEAT + encode_reply(Reply.ack()) + BEAT * 2


def handshake_seeds() -> Seeds:
    preamble, frame = encode_transport_auth(TOKEN), b"\x01\x00\x00\x00"
    request, answer = encode_admission(REQUEST), encode_admission(admit(REQUEST, LOADED))
    yield "listener-open", b"\x00"
    yield "listener-token", b"\x01" + preamble + frame
    yield "listener-token-by-bytes", b"\x11" + preamble
    yield "listener-wrong-token", b"\x01" + encode_transport_auth(b"another token")
    yield "listener-request", b"\x04" + request + frame
    yield "listener-token-request", b"\x75" + preamble + request
    yield "listener-other-stage", b"\x04" + encode_admission(attrs.evolve(REQUEST, target_index=2))
    yield "listener-plain", b"\x0c" + frame
    yield "dialer-ready", b"\x02" + READY_WORD + frame
    yield "dialer-token-by-bytes", b"\x13" + READY_WORD
    yield "dialer-answer", b"\x06" + READY_WORD + answer + frame
    yield "dialer-token-answer", b"\x97" + READY_WORD + answer


def admission_seeds() -> Seeds:
    yield "request", encode_admission(REQUEST)[12:]
    yield "bare-request", encode_admission(BARE_REQUEST)[12:]
    yield "answer", encode_admission(admit(REQUEST, LOADED))[12:]
    yield "refusal", encode_admission(admit(attrs.evolve(REQUEST, run_id="other"), LOADED))[12:]


def annex_seeds() -> Seeds:
    likely = tuple(TokenLogProbability(token, -0.5 * token) for token in range(3))
    position = PositionLogProbabilities(likely[1], likely)
    reply = Reply.predicted_token(1)
    full = ReplyAnnex(log_probabilities=(position,), finish_hint=FinishHint.MAY_END)
    hint = ReplyAnnex(finish_hint=FinishHint.MUST_END)
    failure = RequestFailure(7, FailureCode.SETTINGS_REFUSED, "top_k é")
    yield "full", b"\x00" + encode_annexed_reply(reply, full)
    yield "two", b"\x05" + encode_annexed_reply(reply, hint) + encode_reply(reply)
    yield "heartbeats", b"\x83" + BEAT + encode_annexed_reply(reply, hint) + BEAT + encode_reply(reply)
    yield "failure", b"\x03" + encode_reply(Reply.ack()) + encode_annex(ReplyAnnex(failure=failure))


def machine_seeds() -> Seeds:
    kinds = [kind.name for kind in MessageKind]

    def step(kind: str, shape: int = 0, place: int = 2, count: int = 0x22) -> bytes:
        return bytes((0, kinds.index(kind), shape, place, count))

    prefill, decode = step("PREFILL_EMBD"), step("DECODE_EMBD", 0, 3, 0x12)
    configure, stop = step("CONFIGURE_GENERATION"), step("STOP") + bytes((128, 0, 0, 0, 0))
    yield "request", configure + prefill + decode + step("DECODE_EMBD", 0, 4, 0x12) + stop + prefill
    yield (
        "rewind",
        prefill + decode + step("TRIM_SESSION") + step("DECODE_REPLAY_EMBD", 0x10, 3, 0x12) + decode,
    )
    first, second = step("VERIFY_WINDOW", 0, 3, 0x33), step("VERIFY_WINDOW", 0, 5, 0x33)
    answered, retired = bytes((150, 1, 2, 0, 0)), step("RETIRE_VERIFY_WINDOW", 0, 3, 0x03)
    yield "verify", prefill + first + answered + retired + second + answered + stop
    # The second window is undone before its answer, and a third one comes late.
    newer, late = step("DECODE_EMBD", 0x10, 4, 0x12), step("VERIFY_WINDOW", 0, 6, 0x33)
    yield "stale", prefill + first + second + newer + late + retired + answered * 3 + newer + stop
    yield "restore", step("TRY_RESTORE_PREFILL") + step("PROBE_PREFILL") + prefill + decode
    missed = step("TRY_RESTORE_PREFILL_DECODE") + bytes((144, 0, 0, 0, 0))
    yield "missed", missed + prefill + stop
    # Calls of the lane and its return stream: choice % 16, from 160 on.
    lane = [0, 1, 2, 3, 4, 13, 11, 14, 5, 6, 7, 15, 8, 9, 10]
    opening = kinds.index("PREDICTION_RETURN_OPEN")
    decoding = kinds.index("DECODE_EMBD")
    yield (
        "lane",
        b"".join(
            bytes((160 + call, opening if call == 11 else decoding, 0, 2, 0x01 if call == 11 else 0x02))
            for call in lane
        ),
    )


def gguf_seeds() -> Seeds:
    tokens = [chr(ord("a") + i) for i in range(8)]
    with tempfile.TemporaryDirectory() as folder:
        for arch, tied in (("llama", True), ("qwen3", False)):
            path = write_tiny(
                Path(folder) / "tiny.gguf", arch, 2, tied, width=8, heads=2, kv_heads=1, feed_forward=8,
                context=16, tokens=tokens,
            )  # fmt: skip
            yield arch, path.read_bytes()
    yield "empty", b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


def checkpoint_seeds() -> Seeds:
    kinds: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
    }
    for family, shards, pieces in (
        ("llama", 1, False),
        ("gemma", 2, True),
        ("gemma3", 1, True),
        ("mixtral", 1, False),
    ):
        with tempfile.TemporaryDirectory() as name:
            folder = write_checkpoint(
                Path(name),
                family,
                layers=2 if family == "gemma3" else 1,
                width=4,
                heads=2,
                kv_heads=1,
                feed_forward=4,
                shards=shards,
                config=kinds if family == "gemma3" else None,
            )
            if pieces:
                write_sentencepiece(folder)
            files = [(index, folder / name) for index, name in enumerate(CHECKPOINT_FILES)]
            data = [(index, path.read_bytes()) for index, path in files if path.is_file()]
            yield family, b"".join(CHECKPOINT_ENTRY.pack(index, len(text)) + text for index, text in data)


def package_seeds(model: bytes) -> Seeds:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "llama"
        source.write_bytes(model)
        package = write_package(source, Path(folder) / "package").folder
        yield "manifest", b"\0" + (package / "model-package.json").read_bytes()
        yield "metadata", b"\1" + (package / "shared/metadata.gguf").read_bytes()
        yield "layer", b"\2" + (package / "layers/layer-00001.gguf").read_bytes()


def adapter_seeds(model: bytes) -> Seeds:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "llama"
        source.write_bytes(model)
        names = [f"blk.{layer}.{name}.weight" for layer in (0, 1) for name in ("attn_q", "ffn_down")]
        yield "small", write_adapter(Path(folder) / "adapter.gguf", source, names, rank=2).read_bytes()


def state_seeds() -> Seeds:
    for name, namespace, tokens, schedule, state in (
        ("small", "", [1], [], b"s"),
        ("full", "0123456789abcdef", [-1, 2**31 - 1, *range(30)], [16, 16], bytes(range(200))),
    ):
        head = StateHead(
            identity=STATE_IDENTITY,
            namespace=namespace,
            tokens=array("i", tokens),
            schedule=tuple(schedule),
            alone=name == "full",
            state_digest=digest_of(state),
            state_bytes=len(state),
        )
        yield name, head.encode() + state


_RANGES: Final = ((0, 2), (2, 4), (4, 6))
_ENDS: Final = ("127.0.0.1:9000", "host.example:9001", "[::1]:9002")


def config_seeds() -> Seeds:
    for index, (start, end) in enumerate(_RANGES):
        neighbours = {
            side: {"stage_id": f"stage-{other}", "stage_index": other, "endpoint": _ENDS[other]}
            for side, other in (("upstream", index - 1), ("downstream", index + 1))
            if 0 <= other < len(_RANGES)
        }
        own = {"stage_id": f"stage-{index}", "stage_index": index, "layer_start": start, "layer_end": end}
        names = {"run_id": "run", "topology_id": "three", "model_id": "tiny", "model_path": "tiny.gguf"}
        more = {"load_mode": "runtime-slice", "bind_addr": _ENDS[index], "ctx_size": 512, "lane_count": 2}
        yield f"stage-{index}.json", _json({**names, **own, **more, **neighbours})


def topology_seeds() -> Seeds:
    stages = [
        {
            "stage_id": f"stage-{index}", "stage_index": index, "endpoint": _ENDS[index],
            "layer_start": start, "layer_end": end, "load_mode": "runtime-slice",
        }
        for index, (start, end) in enumerate(_RANGES)
    ]  # fmt: skip
    yield "three.json", _json({"topology_id": "three", "model_id": "tiny", "stages": stages})
    yield "one.json", _json({"topology_id": "one", "model_id": "tiny", "stages": stages[:1]})


def chat_seeds() -> Seeds:
    yield "plain.json", _json({"model": "m", "messages": [{"role": "user", "content": "Hello"}]})
    parts = [{"type": "text", "text": "é"}, {"type": "text", "text": "\U0001f600"}]
    yield (
        "full.json",
        _json(
            {
                "model": "m", "stream": True, "stream_options": {"include_usage": True}, "n": 1,
                "messages": [
                    {"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts},
                    {"role": "assistant", "content": None, "tool_calls": []},
                ],
                "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 1, "max_completion_tokens": 5,
                "stop": ["\n", "END"], "logit_bias": {"5": -100, "7": 1.5}, "presence_penalty": 0.5,
                "frequency_penalty": -0.5, "response_format": {"type": "text"}, "metadata": {"a": "b"},
            }
        ),
    )  # fmt: skip


def completion_seeds() -> Seeds:
    yield "text.json", _json({"model": "m", "prompt": "Once", "max_tokens": 3, "stop": "\n", "seed": 7})
    yield "tokens.json", _json({"model": "m", "prompt": [1, 2, 3], "temperature": 0, "echo": False})


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def write(root: Path) -> None:
    """Write every seed below ``root``, one folder per target; what was there goes."""
    golden = _golden()
    everything = {
        "frames": frame_seeds(golden),
        "replies": reply_seeds(golden),
        "annex": annex_seeds(),
        "handshake": handshake_seeds(),
        "admission": admission_seeds(),
        "machines": machine_seeds(),
        "gguf": gguf_seeds(),
        "checkpoint": checkpoint_seeds(),
        "package": package_seeds(dict(gguf_seeds())["llama"]),
        "adapter": adapter_seeds(dict(gguf_seeds())["llama"]),
        "states": state_seeds(),
        "config": config_seeds(),
        "topology": topology_seeds(),
        "chat": chat_seeds(),
        "completions": completion_seeds(),
    }
    shutil.rmtree(root, ignore_errors=True)
    for target, seeds in everything.items():
        folder = root / target
        folder.mkdir(parents=True)
        for name, data in seeds:
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    write(CORPUS)

"""Run a file of golden vectors against this implementation: ``python -m skippy.protocol check FILE.json``.

Useful to anyone who writes a peer: put what the peer makes of the format into such a file. Error classes must
agree, error texts are everybody's own. Byte vectors are decoded all at once and byte by byte; an error must
come exactly when the failing field is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from . import kinds, rules, stats
from .check_bytes import (
    check_malformed,
    check_stream,
    check_truncation_sweep,
    check_valid,
    check_writer_error,
    expect_decode_error,
)
from .epochs import RequestEpoch
from .errors import ErrorKind, ProtocolError
from .kinds import MessageKind
from .messages import SamplingConfig, StageState
from .vectors import FormError, Json, canonical_sampling, message_kind, sampling_of, stats_of

FORMAT: Final = "skippy-stage-golden"
FORMAT_VERSION: Final = 1
_INFORMATION: Final = frozenset({"format", "format_version", "title", "protocol", "how_to_read"})


@attrs.define
class Section:
    """Result of one section: how many vectors it has, and what was wrong with which."""

    name: str
    count: int = 0
    mismatches: list[tuple[str, str]] = attrs.field(factory=list)


@attrs.define
class Report:
    sections: list[Section] = attrs.field(factory=list)
    unchecked: list[str] = attrs.field(factory=list)

    @property
    def ok(self) -> bool:
        return not any(section.mismatches for section in self.sections)


def check_file(path: Path) -> Report:
    """Check every section of a file.

    Raises:
        FormError: the file cannot be read, is not JSON, or is not of this form.
    """
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise FormError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormError(f"is not JSON: {error}") from None
    return check_document(document)


def check_document(document: Any) -> Report:
    """Check a parsed file. Raises FormError when it is not of this form."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormError(f'is not a file of golden vectors: it needs an object with "format": "{FORMAT}"')
    if document.get("format_version") != FORMAT_VERSION:
        raise FormError(
            f"has format_version {document.get('format_version')!r}; only {FORMAT_VERSION} is understood"
        )
    report = Report()
    for name, content in document.items():
        if name in _INFORMATION:
            continue
        if name in _LISTS:
            report.sections.append(_check_list(name, content))
        elif name in _OBJECTS:
            report.sections.append(_check_object(name, content))
        else:
            report.unchecked.append(name)
    if not report.sections:
        raise FormError("has no section of vectors")
    return report


def _check_list(name: str, content: Any) -> Section:
    section = Section(name)
    if not isinstance(content, list):
        raise FormError(f"section {name} is not a list")
    for index, vector in enumerate(content):
        if not isinstance(vector, dict):
            raise FormError(f"{name}[{index}] is not an object")
        label = vector.get("name")
        if not isinstance(label, str):
            label = f"[{index}] {vector['kind']}" if isinstance(vector.get("kind"), str) else f"[{index}]"
        section.count += 1
        _run(section, label, _LISTS[name], vector)
    return section


def _check_object(name: str, content: Any) -> Section:
    section = Section(name)
    if not isinstance(content, dict):
        raise FormError(f"section {name} is not an object")
    for label, check, vector in _OBJECTS[name](content):
        section.count += 1
        _run(section, label, check, vector)
    return section


Check = Callable[[Any], str | None]


def _run(section: Section, label: str, check: Check, vector: Any) -> None:
    try:
        problem = check(vector)
    except FormError as error:
        raise FormError(f"{section.name}: {label}: {error}") from None
    except ProtocolError as error:
        problem = f"unexpected {error.kind.value}: {error}"
    except KeyError as error:
        raise FormError(f"{section.name}: {label}: {error} is missing") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise FormError(f"{section.name}: {label}: {error}") from None
    if problem is not None:
        section.mismatches.append((label, problem))


def differs(what: str, ours: object, expected: object) -> str | None:
    """A problem text unless both are equal."""
    return None if ours == expected else f"{what}: expected {expected!r}, got {ours!r}"


# --- sections


def _check_kind(vector: Json) -> str | None:
    kind = message_kind(vector["kind"])
    facts = {
        "value": int(kind),
        "default_state": attrs.asdict(rules.default_state(kind)),
        "is_prefill": kind in rules.PREFILL_KINDS,
        "is_decode_replay": kind in rules.REPLAY_KINDS,
        "is_decode_light_context": kind is MessageKind.DECODE_LIGHT_CTX,
        "requires_predicted_reply": rules.requires_predicted_reply(kind),
        "is_session_control": kind is MessageKind.TRIM_SESSION,
        "is_verify_retirement": kind is MessageKind.RETIRE_VERIFY_WINDOW,
        "is_generation_control": kind is MessageKind.CONFIGURE_GENERATION,
        "is_prefix_cache_control": kind in rules.CACHE_CONTROL_KINDS,
        "is_activationless_prefix_cache_control": kind in rules.ACTIVATIONLESS_KINDS,
    }
    for name, ours in facts.items():
        if (problem := differs(name, ours, vector[name])) is not None:
            return problem
    return None


def _check_matches_kind(vector: Json) -> str | None:
    state = StageState(phase=vector["phase"], flags=vector["flags"])
    ours = rules.state_matches_kind(message_kind(vector["kind"]), state)
    return differs(f"phase {state.phase} flags {state.flags}", ours, vector["matches"])


def _check_activation_size(vector: Json) -> str | None:
    flags = vector["state_flags"]
    if (
        problem := differs("multiplier", rules.activation_multiplier(flags), vector["multiplier"])
    ) is not None:
        return problem
    try:
        ours = rules.activation_bytes(vector["token_count"], vector["n_embd"], flags)
    except ProtocolError as error:
        return None if "error" in vector and error.kind is ErrorKind.INVALID_DATA else f"refused: {error}"
    return "accepted" if "error" in vector else differs("bytes", ours, vector["bytes"])


def _check_flag_mapping(vector: Json) -> str | None:
    frame = rules.frame_flags_of(vector["state_flags"])
    return differs("frame_flags", frame, vector["frame_flags"]) or differs(
        "back_to_state_flags", rules.state_flags_of(frame), vector["back_to_state_flags"]
    )


def _check_stats_merge(vector: Json) -> str | None:
    merged = stats.merge(stats_of(vector["a"]), stats_of(vector["b"]))
    return differs("merged", merged, stats_of(vector["merged"])) or differs(
        "merged_is_empty", stats.is_empty(merged), vector["merged_is_empty"]
    )


def _check_stats_observe(vector: Json) -> str | None:
    current = stats_of(vector["start"])
    for call in vector["calls"]:
        stage = call["stage_index"]
        if call["call"] == "prefill_edge_transport":
            current = stats.observe_edge_transport(
                current, stage, call["write_us"], call["wait_us"], call["activation_bytes"]
            )
        elif call["call"] == "prefill_compute":
            current = stats.observe_compute(current, stage, call["compute_us"], call["token_count"])
        else:
            raise FormError(f"unknown call {call['call']!r}")
    return differs("result", current, stats_of(vector["result"])) or differs(
        "is_empty", stats.is_empty(current), vector["is_empty"]
    )


def _check_epoch(vector: Json) -> str | None:
    a, b = RequestEpoch(**vector["a"]), RequestEpoch(**vector["b"])
    return (
        differs("same_flow", a.same_flow(b), vector["same_flow"])
        or differs("a_is_stale_for_b", a.is_stale_for(b), vector["a_is_stale_for_b"])
        or differs("b_is_stale_for_a", b.is_stale_for(a), vector["b_is_stale_for_a"])
    )


Items = list[tuple[str, Check, Any]]


def _constants(content: Json) -> Items:
    def check(item: tuple[str, Any]) -> str | None:
        return differs("value", getattr(kinds, item[0], None), item[1])

    return [(name, check, (name, value)) for name, value in content.items()]


def _default_sampling(content: Json) -> Items:
    def check(data: Json) -> str | None:
        ours = SamplingConfig()
        return differs("block", canonical_sampling(ours), canonical_sampling(sampling_of(data))) or differs(
            "enabled", ours.enabled, data["enabled"]
        )

    return [("default_sampling", check, content)]


def _other_generations(content: Json) -> Items:
    def check(vector: Json) -> str | None:
        return expect_decode_error("message", vector["hex"], ErrorKind.INVALID_DATA, 4, n_embd=1)

    return [
        (f"{name}[{index}]", check, vector)
        for name, group in content.items()
        if isinstance(group, list)
        for index, vector in enumerate(group)
    ]


_LISTS: Final[dict[str, Check]] = {
    "kinds": _check_kind,
    "valid": check_valid,
    "malformed": check_malformed,
    "writer_errors": check_writer_error,
    "streams": check_stream,
    "truncation_sweeps": check_truncation_sweep,
    "stats_merge": _check_stats_merge,
    "stats_observe": _check_stats_observe,
    "epochs": _check_epoch,
    "matches_kind": _check_matches_kind,
    "activation_sizes": _check_activation_size,
    "flag_mapping": _check_flag_mapping,
}
_OBJECTS: Final[dict[str, Callable[[Json], Items]]] = {
    "constants": _constants,
    "default_sampling": _default_sampling,
    "not_in_target_generation": _other_generations,
}

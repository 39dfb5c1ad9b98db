from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from skippy.protocol import (
    AdmissionAnswer,
    AdmissionRequest,
    ErrorKind,
    LoadedStage,
    LocalProtocolError,
    Refusal,
    RemoteProtocolError,
    admit,
    check_answer,
    encode_admission,
    with_descriptor,
)
from skippy.protocol.admission import admission_length, decode_answer, decode_request, fits

from .admissions import BARE, DESCRIPTOR, FIRST, LOADED, PROFILE, REQUEST, RETURN, requests

OTHER_PLAN, OTHER_PACKAGE = "skippy-plan:v1:" + "00" * 32, "sha256:" + "00" * 32
OTHER_PROFILE = attrs.evolve(PROFILE, backend_id="cuda")


def test_a_neighbour_that_fits_gets_an_exact_echo() -> None:
    answer = admit(attrs.evolve(REQUEST, extensions=("annex", "new")), LOADED)
    assert answer == AdmissionAnswer(
        descriptor=DESCRIPTOR, descriptor_sha256=DESCRIPTOR.digest, extensions=("annex",)
    )
    assert answer.accepted
    check_answer(attrs.evolve(REQUEST, extensions=("annex", "new")), answer)


@pytest.mark.parametrize(
    ("request_", "loaded"),
    [
        (BARE, LOADED),
        (REQUEST, LOADED),
        (attrs.evolve(BARE, descriptor_sha256=DESCRIPTOR.digest), LOADED),
        (RETURN, FIRST),
        (attrs.evolve(RETURN, sender_index=1), FIRST),
        (RETURN, attrs.evolve(FIRST, input_width=576)),  # only a lane carries activations
        (attrs.evolve(BARE, extensions=tuple(f"{i:02}" for i in range(32))), LOADED),
        (attrs.evolve(BARE, batch_rows=1), LOADED),
        # What a dialer cannot know is not compared.
        (
            attrs.evolve(
                BARE,
                target_id=None,
                layer_end=None,
                layer_count=None,
                package_id=None,
                cache_type_k=None,
                cache_type_v=None,
            ),
            LOADED,
        ),
        # A driver in front of stage 0 is no stage.
        (attrs.evolve(RETURN, role=BARE.role, sender_index=-1), FIRST),
    ],
)
def test_admitted(request_: AdmissionRequest, loaded: LoadedStage) -> None:
    answer = admit(request_, loaded)
    assert answer.refusal is None
    check_answer(request_, answer)
    check_answer(request_, decode_answer(encode_admission(answer)[12:]))
    assert decode_request(encode_admission(request_)[12:]) == request_


def test_who_sends_the_digest_alone_gets_the_digest_alone() -> None:
    digest = DESCRIPTOR.digest
    assert admit(attrs.evolve(BARE, descriptor_sha256=digest), LOADED) == AdmissionAnswer(
        descriptor_sha256=digest
    )
    for asked in (BARE, REQUEST):
        assert admit(asked, LOADED) == AdmissionAnswer(descriptor=DESCRIPTOR, descriptor_sha256=digest)


@pytest.mark.parametrize(
    ("changes", "expected", "found"),
    [
        ({"topology_id": "x"}, "topology", "x"),
        ({"run_id": "x"}, "run", "x"),
        ({"model_id": "x"}, "model", "x"),
        ({"target_index": 2}, "1", "2"),
        ({"target_id": "x"}, "middle", "x"),
        ({"sender_index": 1}, "0", "1"),
        ({"sender_index": -1}, "0", "-1"),
        ({"layer_start": 1}, "2", "1"),
        ({"layer_start": 3}, "2", "3"),
        ({"layer_end": 3}, "4", "3"),
        ({"layer_end": 5}, "4", "5"),
        ({"layer_count": 7}, "6", "7"),
        ({"package_id": "sha256:" + "00" * 32}, DESCRIPTOR.package_id, "sha256:" + "00" * 32),
        ({"activation_width": 577}, "576", "577"),
        ({"activation_width": 0}, "576", "0"),
        ({"cache_type_k": "q8_0"}, "f16", "q8_0"),
        ({"cache_type_v": "q8_0"}, "f16", "q8_0"),
        ({"context_length": 4095}, "4096", "4095"),
        ({"context_length": 4097}, "4096", "4097"),
        ({"batch_rows": 513}, "at most 512", "513"),
        ({"descriptor_sha256": "00"}, DESCRIPTOR.digest, "00"),
    ],
)
def test_each_field_is_compared(changes: dict[str, Any], expected: str, found: str) -> None:
    (field,) = changes
    answer = admit(attrs.evolve(BARE, **changes), LOADED)
    assert answer == AdmissionAnswer(refusal=Refusal(field, expected, found))
    assert not answer.accepted
    with pytest.raises(RemoteProtocolError) as caught:
        check_answer(BARE, answer)
    assert str(caught.value) == f"it refuses this stage: {field}: expected {expected}, found {found}"


@pytest.mark.parametrize(
    ("changes", "field", "expected", "found"),
    [
        ({"plan_id": OTHER_PLAN}, "plan_id", DESCRIPTOR.plan_id, OTHER_PLAN),
        ({"package_id": OTHER_PACKAGE}, "package_id", DESCRIPTOR.package_id, OTHER_PACKAGE),
        ({"layer_end": 5}, "layer_end", "4", "5"),
        (
            {"resident_tensor_ids": ("x",)},
            "resident_tensor_ids",
            "2 entries, among them blk.2.attn_q.weight",
            "1 entries, among them x",
        ),
        ({"profiles": (OTHER_PROFILE,)}, "profiles.default.backend_id", "toy", "cuda"),
    ],
)
def test_the_descriptor_is_compared(changes: dict[str, Any], field: str, expected: str, found: str) -> None:
    request = with_descriptor(BARE, attrs.evolve(DESCRIPTOR, **changes))
    answer = admit(request, LOADED)
    assert answer == AdmissionAnswer(refusal=Refusal(f"descriptor.{field}", expected, found))


@pytest.mark.parametrize(
    ("request_", "loaded", "field"),
    [
        (RETURN, LOADED, "role"),
        (RETURN, attrs.evolve(FIRST, layer_count=2), "role"),  # a chain of one has no return streams
        (attrs.evolve(RETURN, sender_index=0), FIRST, "sender_index"),
        (attrs.evolve(RETURN, sender_index=-1), FIRST, "sender_index"),
        (attrs.evolve(RETURN, activation_width=576), FIRST, "activation_width"),
        (attrs.evolve(RETURN, role=BARE.role), FIRST, "sender_index"),
    ],
)
def test_roles(request_: AdmissionRequest, loaded: LoadedStage, field: str) -> None:
    answer = admit(request_, loaded)
    assert answer.refusal is not None
    assert answer.refusal.field == field
    if field == "role":
        assert answer.refusal == Refusal("role", "lane", "return")


def test_a_long_value_is_cut_in_the_reason() -> None:
    answer = admit(attrs.evolve(BARE, run_id="x" * 60_000), LOADED)
    assert answer.refusal == Refusal("run_id", "run", "x" * 399 + "…")
    assert admit(attrs.evolve(BARE, run_id="x" * 400), LOADED).refusal == Refusal("run_id", "run", "x" * 400)


def test_a_descriptor_that_does_not_fit_travels_as_its_digest() -> None:
    many = attrs.evolve(DESCRIPTOR, resident_tensor_ids=tuple(f"{i:064}" for i in range(2000)))
    request = with_descriptor(BARE, many)
    assert (request.descriptor, request.descriptor_sha256) == (None, many.digest)
    assert with_descriptor(REQUEST, many) == request
    loaded = attrs.evolve(LOADED, descriptor=many)
    for asked in (request, BARE):
        answer = admit(asked, loaded)
        assert (answer.descriptor, answer.descriptor_sha256) == (None, many.digest)
        check_answer(asked, decode_answer(encode_admission(answer)[12:]))
    refused = admit(request, LOADED).refusal
    assert refused == Refusal("descriptor_sha256", DESCRIPTOR.digest, many.digest)


def test_the_limit_is_on_the_json() -> None:
    def size(count: int) -> AdmissionRequest:
        return attrs.evolve(BARE, run_id="x" * count)

    free = 65_536 - (len(encode_admission(size(0))) - 12)
    assert len(encode_admission(size(free))) == 12 + 65_536
    assert fits(size(free))
    assert not fits(size(free + 1))
    with pytest.raises(LocalProtocolError, match="65537 bytes; at most 65536") as caught:
        encode_admission(size(free + 1))
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize(
    "packet",
    [
        attrs.evolve(BARE, extensions=("b", "a")),
        attrs.evolve(BARE, sender_index=-2),
        attrs.evolve(BARE, descriptor=DESCRIPTOR),
        attrs.evolve(BARE, run_id="\ud800"),
        AdmissionAnswer(),
        with_descriptor(BARE, attrs.evolve(DESCRIPTOR, version=2)),
    ],
)
def test_what_a_peer_would_refuse_is_not_sent(packet: AdmissionRequest | AdmissionAnswer) -> None:
    with pytest.raises(LocalProtocolError):
        encode_admission(packet)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            AdmissionAnswer(
                descriptor=DESCRIPTOR, descriptor_sha256=DESCRIPTOR.digest, extensions=("annex",)
            ),
            "'annex', which was not offered",
        ),
        (AdmissionAnswer(extensions=("n" * 81,)), f"agrees to '{'n' * 80}', which was not offered"),
        (AdmissionAnswer(descriptor_sha256="else"), "another descriptor than the one sent"),
    ],
)
def test_an_echo_that_differs_is_refused(answer: AdmissionAnswer, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        check_answer(REQUEST, answer)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layer_start": 1}, "layer_start 1, not 2"),
        ({"layer_end": 5}, "layer_end 5, not 4"),
        ({"package_id": "sha256:" + "00" * 32}, "package_id sha256:0000"),
    ],
)
def test_a_dialer_that_sent_no_descriptor_looks_at_the_one_it_gets(
    changes: dict[str, Any], text: str
) -> None:
    held = attrs.evolve(DESCRIPTOR, **changes)
    with pytest.raises(RemoteProtocolError, match=text):
        check_answer(BARE, AdmissionAnswer(descriptor=held, descriptor_sha256=held.digest))


def test_head() -> None:
    data = encode_admission(BARE)
    assert data[:8] == bytes.fromhex("5350545301000000")
    assert int.from_bytes(data[8:12], "little") == len(data) - 12
    assert json.loads(data[12:])["role"] == "lane"
    for count in range(12):
        assert admission_length(data[:count]) is None
    assert admission_length(data[:12]) == len(data) - 12
    for bad, text in (
        (b"YDRS", "starts with 59445253"),
        (data[:4] + b"\x02\0\0\0", "admission version 2; this side speaks 1"),
        (data[:8] + b"\x01\x00\x01\x00", "65537 bytes; at most 65536"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            admission_length(bad)
        assert admission_length(bad[:-4]) is None
    with pytest.raises(RemoteProtocolError, match="starts with 59445253$"):
        admission_length(b"YDRS" + data[4:12])
    assert admission_length(data[:8] + b"\x00\x00\x01\x00") == 65_536


@given(requests())
def test_requests_round_trip(request: AdmissionRequest) -> None:
    assert decode_request(encode_admission(request)[12:]) == request


@given(requests())
def test_answers_round_trip(request: AdmissionRequest) -> None:
    """Whatever was asked, the answer can be sent, read, and accepted only for what fits."""
    answer = admit(request, LOADED)
    assert decode_answer(encode_admission(answer)[12:]) == answer
    if answer.accepted:
        check_answer(request, answer)


def changed(packet: AdmissionRequest | AdmissionAnswer, **fields: Any) -> bytes:
    value = json.loads(encode_admission(packet)[12:])
    for name, new in fields.items():
        if new is ...:
            del value[name]
        else:
            value[name] = new
    return json.dumps(value).encode()


REQUEST_FIELDS = [a.name for a in attrs.fields(AdmissionRequest)]


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_every_field_of_a_request_is_asked_for_and_typed(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{name!r} is missing"):
        decode_request(changed(REQUEST, **{name: ...}))
    with pytest.raises(RemoteProtocolError, match=name):
        decode_request(changed(REQUEST, **{name: 1.5}))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (changed(REQUEST, more=1), "admission request: unknown field 'more'"),
        (changed(REQUEST, role="both"), "'role' must be one of lane, return, not 'both'"),
        (changed(REQUEST, sender_index=-2), "'sender_index' must be -1 to 4294967295"),
        *(
            (changed(REQUEST, **{name: 2**32}), f"'{name}' must be [01-]* to 4294967295")
            for name in (
                "sender_index",
                "target_index",
                "layer_start",
                "layer_end",
                "layer_count",
                "activation_width",
                "context_length",
                "batch_rows",
            )
        ),
        (changed(REQUEST, layer_end=0), "'layer_end' must be 1 to"),
        (changed(REQUEST, layer_count=0), "'layer_count' must be 1 to"),
        *(
            (changed(REQUEST, **{name: -1}), f"'{name}' must be 0 to")
            for name in ("target_index", "layer_start", "activation_width")
        ),
        (changed(REQUEST, layer_start=True), "'layer_start' must be an integer, not a boolean"),
        (changed(REQUEST, context_length=0), "'context_length' must be 1 to"),
        (changed(REQUEST, batch_rows=0), "'batch_rows' must be 1 to"),
        (changed(REQUEST, descriptor_sha256="0" * 64), "is not the digest of 'descriptor'"),
        (changed(REQUEST, descriptor_sha256=None), "is not the digest of 'descriptor'"),
        (changed(REQUEST, descriptor={}), "admission request.descriptor: field 'version' is missing"),
        (changed(REQUEST, extensions=["b", "a"]), "'extensions' must be names, strictly sorted"),
        (changed(REQUEST, extensions=["a", "a"]), "'extensions' must be names, strictly sorted"),
        (changed(REQUEST, extensions=[""]), "'extensions' must be names, strictly sorted"),
        (changed(REQUEST, extensions=[f"{i:03}" for i in range(33)]), "has 33 names; 32 are allowed"),
    ],
)
def test_requests_that_are_refused_by_name(body: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text) as caught:
        decode_request(body)
    assert caught.value.kind is ErrorKind.INVALID_DATA


ACCEPTED = admit(REQUEST, LOADED)
REFUSED = AdmissionAnswer(refusal=Refusal("f", "e", "x"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            changed(ACCEPTED, accepted=False),
            "^admission answer: field 'refusal' does not fit field 'accepted'$",
        ),
        (changed(REFUSED, accepted=True), "'refusal' does not fit field 'accepted'"),
        (changed(ACCEPTED, accepted=1), "'accepted' must be true or false"),
        (changed(ACCEPTED, descriptor=None, descriptor_sha256=None), "'descriptor_sha256' is missing"),
        (changed(ACCEPTED, more=None), "admission answer: unknown field 'more'"),
        (changed(REFUSED, refusal={"field": "f", "expected": "e"}), "refusal: field 'found' is missing"),
        (
            changed(REFUSED, refusal={"field": "f", "expected": "e", "found": "x", "y": 1}),
            "refusal: unknown field 'y'",
        ),
    ],
)
def test_answers_that_are_refused_by_name(body: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode_answer(body)


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(REQUEST_FIELDS), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_nothing_but_our_error(body: bytes) -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(RemoteProtocolError):
            decode(body)

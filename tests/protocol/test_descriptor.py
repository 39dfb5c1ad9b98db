from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs
import pytest
from hypothesis import given

from skippy.protocol import (
    AdmissionSidecar,
    LocalProtocolError,
    RemoteProtocolError,
    StageAdmissionDescriptor,
    descriptor_fault,
)
from skippy.protocol.descriptor import PROFILE_FIELDS, descriptor_difference, parse_descriptor
from skippy.protocol.strict_json import Fields, canonical_json, parse_object

from .admissions import DESCRIPTOR, PROFILE, descriptors

TENSORS = "resident tensor ids must be non-empty, strictly sorted, and unique"
PROFILES = "profiles must be non-empty, strictly sorted by profile_id, and unique"
SIDECAR = "sidecar kind and artifact_id are required"
SIDECARS = "sidecars must be strictly sorted and unique"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"version": 0}, "unsupported descriptor version"),
        ({"version": 2}, "unsupported descriptor version"),
        ({"package_id": "sha256:" + "0A" * 32}, "package_id must be a canonical sha256 digest"),
        ({"package_id": "0a" * 32}, "package_id must be a canonical sha256 digest"),
        ({"package_id": DESCRIPTOR.package_id + "0"}, "package_id must be a canonical sha256 digest"),
        ({"package_id": DESCRIPTOR.package_id + "\n"}, "package_id must be a canonical sha256 digest"),
        ({"plan_id": "skippy-plan:v2:" + "0b" * 32}, "plan_id must be a canonical native semantic digest"),
        ({"plan_id": "skippy-plan:v1:" + "0b" * 31}, "plan_id must be a canonical native semantic digest"),
        ({"layer_end": 2}, "layer range must be non-empty"),
        ({"layer_end": 1}, "layer range must be non-empty"),
        ({"resident_tensor_ids": ()}, TENSORS),
        ({"resident_tensor_ids": ("",)}, TENSORS),
        ({"resident_tensor_ids": ("a", "a")}, TENSORS),
        ({"resident_tensor_ids": ("b", "a")}, TENSORS),
        ({"profiles": ()}, PROFILES),
        ({"profiles": (PROFILE, PROFILE)}, PROFILES),
        ({"profiles": (PROFILE, attrs.evolve(PROFILE, profile_id="a"))}, PROFILES),
        ({"profiles": (attrs.evolve(PROFILE, profile_id=""),)}, PROFILES),
        ({"sidecars": (AdmissionSidecar(0, "a"),)}, SIDECAR),
        ({"sidecars": (AdmissionSidecar(2, "a"),)}, SIDECAR),
        ({"sidecars": (AdmissionSidecar(1, ""),)}, SIDECAR),
        ({"sidecars": (AdmissionSidecar(1, "a"), AdmissionSidecar(1, "a"))}, SIDECARS),
        ({"sidecars": (AdmissionSidecar(1, "b"), AdmissionSidecar(1, "a"))}, SIDECARS),
        ({"sidecars": (AdmissionSidecar(1, "a", ""), AdmissionSidecar(1, "b"))}, SIDECARS),
        ({"sidecars": (AdmissionSidecar(1, "a", "y"), AdmissionSidecar(1, "a", "x"))}, SIDECARS),
        # The first rule that is broken is the one that is named.
        ({"version": 2, "package_id": "", "layer_end": 0, "profiles": ()}, "unsupported descriptor version"),
        ({"layer_end": 0, "resident_tensor_ids": ()}, "layer range must be non-empty"),
        ({"profiles": (), "sidecars": (AdmissionSidecar(0, ""),)}, PROFILES),
    ],
)
def test_each_rule_in_its_order(changes: dict[str, Any], fault: str) -> None:
    broken = attrs.evolve(DESCRIPTOR, **changes)
    text = f"invalid stage admission descriptor: {fault}"
    assert descriptor_fault(broken) == text
    with pytest.raises(LocalProtocolError) as ours:
        broken.check()
    assert str(ours.value) == text
    with pytest.raises(RemoteProtocolError) as theirs:
        parse_descriptor(parse_object(canonical_json(broken.to_json()), "descriptor"))
    assert str(theirs.value) == text


@pytest.mark.parametrize("name", PROFILE_FIELDS[1:])
def test_identities_are_required(name: str) -> None:
    second = attrs.evolve(PROFILE, profile_id="second", **{name: ""})
    broken = attrs.evolve(DESCRIPTOR, profiles=(PROFILE, second))
    assert descriptor_fault(broken) == ("invalid stage admission descriptor: profile identities are required")


def test_sound_ones() -> None:
    assert descriptor_fault(DESCRIPTOR) is None
    DESCRIPTOR.check()
    sidecars = (AdmissionSidecar(1, "b"), AdmissionSidecar(1, "a", ""), AdmissionSidecar(1, "a", "A"))
    assert descriptor_fault(attrs.evolve(DESCRIPTOR, sidecars=sidecars)) is None
    assert descriptor_fault(attrs.evolve(DESCRIPTOR, layer_start=0, layer_end=1)) is None


@pytest.mark.parametrize("name", ["layer_start", "layer_end"])
def test_layers_are_32_bits(name: str) -> None:
    for value in (-1, 2**32):
        body = canonical_json(attrs.evolve(DESCRIPTOR, **{name: value}).to_json())
        with pytest.raises(RemoteProtocolError, match=f"d: field '{name}' must be 0 to 4294967295$"):
            parse_descriptor(parse_object(body, "d"))


def test_order_is_by_bytes() -> None:
    """U+FF5E is below U+1F600 in UTF-8 and in Python, though not in UTF-16."""
    ids = ("～", "\U0001f600")
    assert descriptor_fault(attrs.evolve(DESCRIPTOR, resident_tensor_ids=ids)) is None
    assert sorted(ids, key=str.encode) == list(ids)


@given(descriptors())
def test_round_trip(descriptor: StageAdmissionDescriptor) -> None:
    body = canonical_json(descriptor.to_json())
    assert parse_descriptor(parse_object(body, "descriptor")) == descriptor
    assert descriptor.digest == hashlib.sha256(body).hexdigest()


def test_the_digest_is_over_canonical_json() -> None:
    descriptor = attrs.evolve(
        DESCRIPTOR, resident_tensor_ids=('a"\n', "é"), sidecars=(AdmissionSidecar(1, "x"),)
    )
    text = (
        '{"layer_end":4,"layer_start":2,"package_id":"sha256:' + "0a" * 32 + '","plan_id":"skippy-plan:v1:'
        + "0b" * 32 + '","profiles":[{"backend_id":"toy","graph_configuration_id":"g",'
        '"graph_identity":"llama",'
        '"profile_id":"default","profile_identity":"p","slice_identity":"2-4","source_snapshot_identity":"sha256:'
        + "0a" * 32 + '"}],"resident_tensor_ids":["a\\"\\n","é"],'
        '"sidecars":[{"artifact_id":"x","kind":1,"name":null}],"version":1}'
    )  # fmt: skip
    assert descriptor.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"package_id": "sha256:" + "00" * 32}, "package_id"),
        ({"plan_id": "skippy-plan:v1:" + "00" * 32}, "plan_id"),
        ({"layer_start": 1}, "layer_start"),
        ({"layer_end": 5}, "layer_end"),
        ({"resident_tensor_ids": ("blk.2.attn_q.weight",)}, "resident_tensor_ids"),
        ({"sidecars": (AdmissionSidecar(1, "x"),)}, "sidecars"),
        ({"profiles": (attrs.evolve(PROFILE, profile_id="else"),)}, "profiles"),
        *(
            ({"profiles": (attrs.evolve(PROFILE, **{name: "else"}),)}, f"profiles.default.{name}")
            for name in PROFILE_FIELDS[1:]
        ),
        ({"plan_id": "skippy-plan:v1:" + "00" * 32, "layer_end": 9, "profiles": ()}, "plan_id"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], field: str) -> None:
    other = attrs.evolve(DESCRIPTOR, **changes)
    difference = descriptor_difference(DESCRIPTOR, other)
    assert difference is not None
    assert difference[0] == field
    assert difference[1] != difference[2]
    mirrored = descriptor_difference(other, DESCRIPTOR)
    assert mirrored is not None
    assert mirrored[1:] == (difference[2], difference[1])
    assert descriptor_difference(DESCRIPTOR, attrs.evolve(DESCRIPTOR)) is None


def test_long_lists_differ_in_few_words() -> None:
    other = attrs.evolve(DESCRIPTOR, resident_tensor_ids=("blk.2.attn_q.weight", "x"))
    assert descriptor_difference(DESCRIPTOR, other) == (
        "resident_tensor_ids",
        "2 entries, among them blk.3.attn_q.weight",
        "2 entries, among them x",
    )
    fewer = attrs.evolve(DESCRIPTOR, resident_tensor_ids=("blk.2.attn_q.weight",))
    assert descriptor_difference(DESCRIPTOR, fewer) == (
        "resident_tensor_ids",
        "2 entries, among them blk.3.attn_q.weight",
        "1 entries",
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xff{}", "it is not UTF-8 at byte 0"),
        (b"", "it is not JSON: Expecting value at character 0"),
        (b"{} {}", "it is not JSON: Extra data at character 3"),
        (b"[]", "it must be an object, not a list"),
        (b"null", "it must be an object, not null"),
        (b'{"a":1,"a":1}', "it is not strict JSON: field 'a' appears twice"),
        (b'{"b":{"a":1,"a":1}}', "it is not strict JSON: field 'a' appears twice"),
        (b'{"a":NaN}', "it is not strict JSON: NaN is not a JSON number"),
        (b'{"a":-Infinity}', "it is not strict JSON: -Infinity is not a JSON number"),
        (b'{"a":"\\ud800"}', "it holds a lone surrogate, which is no Unicode text"),
        (b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}", "it is nested too deep"),
    ],
)
def test_json_that_is_not_strict(body: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_object(body, "it")
    assert str(caught.value) == text


def test_what_a_peer_writes_is_quoted_to_80_characters() -> None:
    long, quoted = "n" * 81, repr("n" * 80)
    with pytest.raises(RemoteProtocolError, match=f"field {quoted} appears twice$"):
        parse_object(f'{{"{long}":1,"{long}":1}}'.encode(), "it")
    with pytest.raises(RemoteProtocolError, match=f"unknown field {quoted}$"):
        parse_object(f'{{"{long}":1}}'.encode(), "it").end()
    with pytest.raises(RemoteProtocolError, match=f"must be one of a, not {quoted}$"):
        parse_object(f'{{"c":"{long}"}}'.encode(), "it").choice("c", {"a": 1})


def test_canonical_json_has_no_spelling_for_what_is_no_number() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json({"a": value})


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="it is not strict JSON: .*digits"):
        parse_object(b'{"a":' + b"9" * 60_000 + b"}", "it")


def test_fields_are_taken_by_name_and_type() -> None:
    value = {"t": "x", "n": 3, "b": True, "l": ["x"], "o": {}, "z": None, "f": 1.5, "q": [{}, 1]}

    def fields() -> Fields:
        return parse_object(json.dumps(value).encode(), "it")

    taken = fields()
    assert (taken.text("t"), taken.integer("n", 3, 3), taken.boolean("b"), taken.texts("l")) == (
        "x", 3, True, ("x",),
    )  # fmt: skip
    taken.object("o").end()
    assert taken.integer_or_absent("none", 0, 9) is None
    assert fields().integer_or_absent("n", 3, 3) == 3
    assert taken.text_or_null("z") is None
    with pytest.raises(RemoteProtocolError, match="it: unknown field 'f'"):
        taken.end()
    wrong = {
        "it: field 'n' must be a string, not an integer": lambda f: f.text("n"),
        "it: field 'none' is missing": lambda f: f.text("none"),
        "it: field 't' must be an integer, not a string": lambda f: f.integer("t"),
        "it: field 'b' must be an integer, not a boolean": lambda f: f.integer("b"),
        "it: field 'f' must be an integer, not a fraction": lambda f: f.integer("f"),
        "it: field 'n' must be 4 to 5": lambda f: f.integer("n", 4, 5),
        "it: field 'n' must be 0 to 2": lambda f: f.integer_or_absent("n", 0, 2),
        "it: field 'z' must be an integer, not null": lambda f: f.integer_or_absent("z", 4, 5),
        "it: field 'n' must be true or false, not an integer": lambda f: f.boolean("n"),
        "it: field 't' must be a list, not a string": lambda f: f.texts("t"),
        "it: field 'q' must be a list of strings, not an object": lambda f: f.texts("q"),
        "it.q\\[1\\] must be an object, not an integer": lambda f: f.objects("q"),
        "it.z must be an object, not null": lambda f: f.object("z"),
        "it: field 'z' must be a string, not null": lambda f: f.text("z"),
        "it: field 't' must be one of a, b, not 'x'": lambda f: f.choice("t", {"a": 1, "b": 2}),
    }
    for text, take in wrong.items():
        with pytest.raises(RemoteProtocolError, match=f"^{text}$"):
            take(fields())

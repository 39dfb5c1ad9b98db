"""The stage admission descriptor: what one stage holds, in a form that compares exactly.

Plain values, their check, their canonical JSON and its digest. Who builds one is outside this package.
Source: ``docs/protocol.md``, section "The admission descriptor".
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

import attrs

from .errors import LocalProtocolError, RemoteProtocolError
from .strict_json import Fields, canonical_json

DESCRIPTOR_VERSION: Final = 1
SIDECAR_MMPROJ: Final = 1
U32_MAX: Final = 2**32 - 1
_PACKAGE_ID: Final = re.compile(r"sha256:[0-9a-f]{64}")
_PLAN_ID: Final = re.compile(r"skippy-plan:v1:[0-9a-f]{64}")


@attrs.frozen(slots=True)
class AdmissionSidecar:
    """A file beside the model that stage 0 holds; ``kind`` 1 is a projector (mmproj)."""

    kind: int
    artifact_id: str
    name: str | None = None


@attrs.frozen(slots=True, kw_only=True)
class AdmissionProfile:
    """The identities of one execution profile; none may be empty."""

    profile_id: str
    graph_identity: str
    profile_identity: str
    slice_identity: str
    source_snapshot_identity: str
    graph_configuration_id: str
    backend_id: str


PROFILE_FIELDS: Final = tuple(a.name for a in attrs.fields(AdmissionProfile))


@attrs.frozen(slots=True, kw_only=True)
class StageAdmissionDescriptor:
    """What one stage holds. Equal content means equal values, equal JSON, equal digest.

    Attributes:
        package_id: content of the model, ``sha256:`` and 64 lower-case hex digits.
        plan_id: what was made of it for this stage, ``skippy-plan:v1:`` and 64 lower-case hex digits.
        layer_start, layer_end: ``[start, end)``.
        resident_tensor_ids: names of the tensors kept, in the whole model's numbering; strictly ascending.
        profiles: strictly ascending by profile_id.
        sidecars: strictly ascending by kind, name (absent first), artifact_id.
    """

    version: int = DESCRIPTOR_VERSION
    package_id: str
    plan_id: str
    layer_start: int
    layer_end: int
    resident_tensor_ids: tuple[str, ...]
    profiles: tuple[AdmissionProfile, ...]
    sidecars: tuple[AdmissionSidecar, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return attrs.asdict(self)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 lower-case hex digits."""
        return hashlib.sha256(canonical_json(self.to_json())).hexdigest()

    def check(self) -> None:
        """Raise LocalProtocolError for a descriptor that no peer would take."""
        fault = descriptor_fault(self)
        if fault is not None:
            raise LocalProtocolError(fault)


def parse_descriptor(fields: Fields) -> StageAdmissionDescriptor:
    """A peer's descriptor, checked. RemoteProtocolError names what is wrong."""
    descriptor = StageAdmissionDescriptor(
        version=fields.integer("version"),
        package_id=fields.text("package_id"),
        plan_id=fields.text("plan_id"),
        layer_start=fields.integer("layer_start", 0, U32_MAX),
        layer_end=fields.integer("layer_end", 0, U32_MAX),
        resident_tensor_ids=fields.texts("resident_tensor_ids"),
        sidecars=tuple(map(_parse_sidecar, fields.objects("sidecars"))),
        profiles=tuple(map(_parse_profile, fields.objects("profiles"))),
    )
    fields.end()
    fault = descriptor_fault(descriptor)
    if fault is not None:
        raise RemoteProtocolError(fault)
    return descriptor


def _parse_sidecar(fields: Fields) -> AdmissionSidecar:
    sidecar = AdmissionSidecar(
        fields.integer("kind"), fields.text("artifact_id"), fields.text_or_null("name")
    )
    fields.end()
    return sidecar


def _parse_profile(fields: Fields) -> AdmissionProfile:
    profile = AdmissionProfile(**{name: fields.text(name) for name in PROFILE_FIELDS})
    fields.end()
    return profile


def descriptor_fault(descriptor: StageAdmissionDescriptor) -> str | None:
    """The first rule that a descriptor breaks, in the order of ``docs/protocol.md``; None: it is sound."""
    fault = _fault(descriptor)
    return None if fault is None else f"invalid stage admission descriptor: {fault}"


def _fault(descriptor: StageAdmissionDescriptor) -> str | None:
    tensors, profiles = descriptor.resident_tensor_ids, descriptor.profiles
    profile_ids = [profile.profile_id for profile in profiles]
    if descriptor.version != DESCRIPTOR_VERSION:
        return "unsupported descriptor version"
    if not _PACKAGE_ID.fullmatch(descriptor.package_id):
        return "package_id must be a canonical sha256 digest"
    if not _PLAN_ID.fullmatch(descriptor.plan_id):
        return "plan_id must be a canonical native semantic digest"
    if descriptor.layer_start >= descriptor.layer_end:
        return "layer range must be non-empty"
    if not tensors or "" in tensors or not _ascends(tensors):
        return "resident tensor ids must be non-empty, strictly sorted, and unique"
    if not profiles or "" in profile_ids or not _ascends(profile_ids):
        return "profiles must be non-empty, strictly sorted by profile_id, and unique"
    if not all(getattr(profile, name) for profile in profiles for name in PROFILE_FIELDS):
        return "profile identities are required"
    return _sidecar_fault(descriptor.sidecars)


def _sidecar_fault(sidecars: Sequence[AdmissionSidecar]) -> str | None:
    previous: tuple[int, bool, str, str] | None = None
    for sidecar in sidecars:
        if sidecar.kind != SIDECAR_MMPROJ or not sidecar.artifact_id:
            return "sidecar kind and artifact_id are required"
        place = (sidecar.kind, sidecar.name is not None, sidecar.name or "", sidecar.artifact_id)
        if previous is not None and place <= previous:
            return "sidecars must be strictly sorted and unique"
        previous = place
    return None


def _ascends(texts: Sequence[str]) -> bool:
    """Strictly, by UTF-8 bytes, which is the order of code points and so of Python's strings."""
    return all(a < b for a, b in itertools.pairwise(texts))


def descriptor_difference(
    expected: StageAdmissionDescriptor, found: StageAdmissionDescriptor
) -> tuple[str, object, object] | None:
    """The first difference as (field, expected, found), in the order of comparison; None when equal."""
    for name in ("package_id", "plan_id", "layer_start", "layer_end"):
        mine, theirs = getattr(expected, name), getattr(found, name)
        if mine != theirs:
            return name, mine, theirs
    for name in ("resident_tensor_ids", "sidecars"):
        mine, theirs = getattr(expected, name), getattr(found, name)
        if mine != theirs:
            return name, *_lists(mine, theirs)
    ours = {profile.profile_id: profile for profile in expected.profiles}
    others = {profile.profile_id: profile for profile in found.profiles}
    if ours.keys() != others.keys():
        return "profiles", sorted(ours), sorted(others)
    for profile_id, profile in ours.items():
        for name in PROFILE_FIELDS[1:]:
            mine, theirs = getattr(profile, name), getattr(others[profile_id], name)
            if mine != theirs:
                return f"profiles.{profile_id}.{name}", mine, theirs
    return None


def _lists(mine: Sequence[object], theirs: Sequence[object]) -> tuple[str, str]:
    """Two long lists in a few words: how many, and the first that the other does not have."""

    def words(one: Sequence[object], other: Sequence[object]) -> str:
        extra = next((item for item in one if item not in other), None)
        return f"{len(one)} entries" + ("" if extra is None else f", among them {extra}")

    return words(mine, theirs), words(theirs, mine)

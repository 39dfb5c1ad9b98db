"""The prefix caches of a chain as ``/kv`` shows them: stage 0's, and what the others have said in replies."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs

from skippy.stage import Stage
from skippy.stage.keeping import KvEntry

from .errors import ApiError
from .restoring import Restorer

SHOWN_DIGITS: Final = 16
"""Of a namespace: enough to tell them apart, too few to find out an API key by trying."""
_NAMESPACE: Final = re.compile("[0-9a-f]{1,64}")
COMMON: Final = "common"
"""How the namespace of requests without keys is called."""


def cache_report(stage: Stage, restorer: Restorer) -> dict[str, Any]:
    """What ``GET /kv`` answers.

    ``stage``: what stage 0 has now and has counted since its start. ``entries``: of its cache, the one used
    longest ago first, without their tokens. ``chain``: what the replies of all stages have said, over all
    requests of this endpoint.
    """
    cache, totals = stage.context.cache, restorer.totals
    report: dict[str, Any] = {
        "object": "kv_cache",
        "enabled": cache is not None,
        "chain": {
            "lookup_hits": totals.kv_lookup_hits,
            "lookup_misses": totals.kv_lookup_misses,
            "lookup_errors": totals.kv_lookup_errors,
            "restores": totals.kv_imported_pages,
            "restored_tokens": totals.kv_imported_tokens,
            "recorded_pages": totals.kv_recorded_pages,
            "recorded_bytes": totals.kv_recorded_bytes,
            "hits_by_stage": {str(index): hits for index, hits in sorted(restorer.hits_by_stage.items())},
        },
    }
    if cache is not None:
        report["settings"] = attrs.asdict(cache.settings)
        report["stage"] = attrs.asdict(cache.index.stats())
        report["entries"] = [_entry(entry) for entry in cache.index.entries()]
    return report


def _entry(entry: KvEntry) -> dict[str, Any]:
    return {
        "namespace": shown_namespace(entry.namespace),
        "tokens": entry.length,
        "sequence": entry.sequence,
        "state_bytes": 0 if entry.state is None else entry.state.size,
        "live": entry.live,
        "refs": entry.refs,
        "last_used": entry.last_used,
        "chunks": len(entry.schedule),
        "alone": entry.alone,
    }


def shown_namespace(namespace: str) -> str:
    return namespace[:SHOWN_DIGITS] or COMMON


def parse_namespace(text: str | None) -> str:
    """What ``DELETE /kv`` is to forget, as the setting ``cache_drop`` has it: ``all``, ``common``, or digits.

    Raises:
        ApiError: 400: neither of the words, nor the first digits of a namespace.
    """
    if text is None or text in ("all", COMMON) or _NAMESPACE.fullmatch(text):
        return text or "all"
    raise ApiError(
        f"namespace is {text[:80]!r}; it must be 'all', {COMMON!r} or the first digits (0-9a-f) of one",
        param="namespace",
    )

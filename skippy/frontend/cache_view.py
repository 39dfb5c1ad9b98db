"""The prefix caches of a chain as ``/kv`` shows them: each stage's, and what all have said in replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import trio

from skippy.protocol import ReplyAnnex
from skippy.stage import GenerationSettings, Stage, StageError
from skippy.stage.reports import COMMON, cache_report, parse_reports, timing_report

from .admission import AdmissionGate
from .errors import ApiError
from .generation import ChainUnavailable, GenerationError
from .prefill import send_settings
from .restoring import Restorer

REPORT_SECS: Final = 5.0
"""How long a report waits for a lane, and for the stages behind this one."""

_NAMESPACE: Final = re.compile("[0-9a-f]{1,64}")


class ChainCaches:
    """Asks the stages what they remember, or has them forget it."""

    def __init__(
        self, stage: Stage, restorer: Restorer, gate: AdmissionGate, new_id: Callable[[], int]
    ) -> None:
        self._context = stage.context
        self._restorer = restorer
        self._gate = gate
        self._new_id = new_id

    async def report(self) -> dict[str, Any]:
        """See :meth:`skippy.frontend.generation.Generator.cache_report`."""
        others: list[dict[str, Any]] = []
        missing = None
        if self._context.downstream is not None:
            missing = f"no lane was free, or stages did not answer, within {REPORT_SECS:g} s"
            with trio.move_on_after(REPORT_SECS):
                try:
                    others = parse_reports(await self._tell(GenerationSettings(cache_report=True)))
                    missing = None
                except GenerationError as exc:
                    missing = str(exc)
        return chain_report([cache_report(self._context), *others], missing, self._restorer)

    async def prompt_times(self) -> list[dict[str, Any]]:
        """What the last prompt has taken each stage that tells, :func:`skippy.stage.reports.timing_report`.

        Raises: as dropping does.
        """
        others: list[dict[str, Any]] = []
        if self._context.downstream is not None:
            others = parse_reports(await self._tell(GenerationSettings(timing_report=True)))
        return [timing_report(self._context), *others]

    async def drop(self, namespace: str) -> int:
        """See :meth:`skippy.frontend.generation.Generator.drop_cache`."""
        cache = self._context.cache
        before = 0 if cache is None else cache.index.counters.dropped
        try:
            await self._tell(GenerationSettings(cache_drop=namespace))
        finally:
            self._restorer.forget()  # also answers of what has ended meanwhile
        return 0 if cache is None else cache.index.counters.dropped - before

    async def _tell(self, settings: GenerationSettings) -> ReplyAnnex | None:
        """Take a lane, tell every stage something, and wait for the answer; what comes with it."""
        admission = await self._gate.acquire(1, 0)
        try:
            with admission.running() as lane:
                lane.request = self._new_id(), self._new_id()
                place = await send_settings(lane, settings)
                await place.wait()
                return place.annex
        except StageError as exc:
            raise ChainUnavailable(str(exc)) from exc


def chain_report(stages: list[dict[str, Any]], missing: str | None, restorer: Restorer) -> dict[str, Any]:
    """What ``GET /kv`` answers.

    ``stages``: the report of each stage, :func:`skippy.stage.reports.cache_report`, stage 0 first.
    ``missing``: why there is none of the others, or null. ``chain``: what the replies of all stages have
    said, over all requests of this endpoint.
    """
    totals = restorer.totals
    return {
        "object": "kv_cache",
        "enabled": stages[0]["enabled"],
        "stages": stages,
        "missing": missing,
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


def parse_namespace(query: Iterable[tuple[str, str]]) -> str:
    """What ``DELETE /kv`` is to forget, as the setting ``cache_drop`` has it: ``all``, ``common``, or digits.

    Args:
        query: names and values; a slip in one of them must not have everything forgotten.

    Raises:
        ApiError: 400: neither of the words, nor first digits of a namespace; two of them; another name.
    """
    text: str | None = None
    for name, value in query:
        if name != "namespace" or text is not None:
            what = "given twice" if name == "namespace" else "not known; the only parameter is namespace"
            raise ApiError(f"{name[:80]} is {what}", param=name[:80])
        text = value
    if text is None or text in ("all", COMMON) or _NAMESPACE.fullmatch(text):
        return text or "all"
    raise ApiError(
        f"namespace is {text[:80]!r}; it must be 'all', {COMMON!r} or the first digits (0-9a-f) of one",
        param="namespace",
    )

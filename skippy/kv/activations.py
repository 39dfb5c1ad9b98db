"""Boundary activations of prefills, so that a stage can feed the next one without computing rows again.

A row at position ``i`` depends on the tokens up to ``i`` alone, so whoever has rows of one prompt has those
of every other prompt as far as the tokens are equal. Rows are kept in pages at fixed positions. A page is
known by the digest of all tokens before it, and by its own tokens, which are compared: prompts that part ways
in the middle of a page each have their own, and may use the other's rows up to there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from skippy.protocol import Buffer

PAGE_TOKENS: Final = 128
MAX_SIBLINGS: Final = 64
"""Pages that continue the same tokens in different ways; one more, and the least recently used of them goes.
A lookup compares with each."""
F32_BYTES: Final = 4


@attrs.frozen(slots=True, kw_only=True)
class ActivationStats:
    """What an :class:`ActivationCache` holds and has done.

    Attributes:
        pages, bytes: how much is kept now.
        recorded_rows: rows that were kept, so far.
        hits, misses: lookups.
        evicted_pages: pages that had to make room.
    """

    pages: int
    bytes: int
    recorded_rows: int
    hits: int
    misses: int
    evicted_pages: int


@attrs.define(slots=True, eq=False)
class _Page:
    """Rows ``[low, high)`` of one page; ``tokens`` are its own, as far as known: ``high`` or more."""

    key: bytes
    tokens: array[int]
    rows: memoryview
    low: int
    high: int

    def agrees(self, tokens: array[int]) -> bool:
        """Whether one continues the other."""
        shared = min(len(self.tokens), len(tokens))
        return self.tokens[:shared] == tokens[:shared]

    def shared(self, tokens: array[int]) -> int:
        """How many tokens both start with."""
        length = min(len(self.tokens), len(tokens))
        if self.tokens[:length] == tokens[:length]:
            return length
        return next(i for i in range(length) if self.tokens[i] != tokens[i])


class ActivationCache:
    """Rows by namespace and token path, least recently used out first. Event loop only; nothing waits.

    Args:
        max_bytes: of all pages together, each counted in full; nothing is kept where not one page fits.
        width: f32 values of a row.
    """

    def __init__(self, max_bytes: int, width: int, *, page_tokens: int = PAGE_TOKENS) -> None:
        self.max_bytes = max_bytes
        self._row_bytes = width * F32_BYTES
        self._page_tokens = page_tokens
        self._page_bytes = page_tokens * self._row_bytes
        self._pages: OrderedDict[_Page, None] = OrderedDict()
        """All pages, the least recently used first."""
        self._by_key: dict[bytes, list[_Page]] = {}
        self._recorded = self._hits = self._misses = self._evicted = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return 0 < self._page_bytes <= self.max_bytes

    def record(self, namespace: str, tokens: Sequence[int], start: int, rows: Buffer) -> None:
        """Keep a copy of the rows of ``tokens[start:]``.

        Args:
            tokens: the whole path, from position 0 to the end of ``rows``.
            rows: ``(len(tokens) - start) * width`` f32.

        Raises:
            ValueError: the sizes do not fit.
        """
        view = memoryview(rows).cast("B")
        if not 0 <= start < len(tokens) or len(view) != (len(tokens) - start) * self._row_bytes:
            raise ValueError(
                f"{len(view)} bytes are not the rows {start} to {len(tokens)} of {self._row_bytes} bytes each"
            )
        if not self.enabled:
            return
        for key, first, own in self._cut(namespace, tokens, start):
            low, high = max(start - first, 0), len(own)
            at = (first + low - start) * self._row_bytes
            self._keep(key, own, low, high, view[at : at + (high - low) * self._row_bytes])
        self._recorded += len(tokens) - start

    def find(self, namespace: str, tokens: Sequence[int], start: int, count: int) -> list[memoryview] | None:
        """The rows ``[start, start + count)`` of exactly this path, in pieces; None if one is missing.

        Args:
            tokens: the path, at least ``start + count`` of it.

        Returns:
            Read-only bytes, valid for as long as they are held, whatever is evicted.

        Raises:
            ValueError: the path is shorter than that.
        """
        end = start + count
        if start < 0 or count < 1 or end > len(tokens):
            raise ValueError(f"rows {start} to {end} of a path of {len(tokens)} tokens")
        found: list[tuple[_Page, memoryview]] = []
        for key, first, own in self._cut(namespace, tokens[:end], start):
            pieces = self._cover(self._by_key.get(key, ()), own, max(start - first, 0))
            if pieces is None:
                self._misses += 1
                return None
            found += pieces
        self._hits += 1
        for page, _ in found:
            self._pages.move_to_end(page)
        return [view for _, view in found]

    def forget(self, namespace: str, tokens: Sequence[int]) -> None:
        """Drop every page that holds rows of this path."""
        for key, _, own in self._cut(namespace, tokens, 0):
            for page in list(self._by_key.get(key, ())):
                if page.shared(own) > page.low:
                    self._remove(page)

    def clear(self) -> None:
        """Drop everything."""
        self._pages.clear()
        self._by_key.clear()

    @property
    def used_bytes(self) -> int:
        return len(self._pages) * self._page_bytes

    def stats(self) -> ActivationStats:
        return ActivationStats(
            pages=len(self._pages),
            bytes=self.used_bytes,
            recorded_rows=self._recorded,
            hits=self._hits,
            misses=self._misses,
            evicted_pages=self._evicted,
        )

    def _cut(
        self, namespace: str, tokens: Sequence[int], start: int
    ) -> Iterator[tuple[bytes, int, array[int]]]:
        """(key, position of its first row, own tokens) of each page from the one that holds ``start``."""
        path = array("i", tokens)
        key = hashlib.blake2b(namespace.encode(), digest_size=32, person=b"namespace").digest()
        for first in range(0, len(path), self._page_tokens):
            own = path[first : first + self._page_tokens]
            if first + self._page_tokens > start:
                yield key, first, own
            key = hashlib.blake2b(key + own.tobytes(), digest_size=32).digest()

    def _keep(self, key: bytes, own: array[int], low: int, high: int, rows: memoryview) -> None:
        """Put rows into a page that they continue, or else into a new one."""
        pages = self._by_key.setdefault(key, [])
        for page in pages:
            if page.agrees(own) and page.low <= high and low <= page.high:
                self._extend(page, own, low, high, rows)
                return
        page = _Page(key, own, memoryview(bytearray(self._page_bytes)), low, high)
        page.rows[low * self._row_bytes : high * self._row_bytes] = rows
        pages.append(page)
        self._pages[page] = None
        if len(pages) > MAX_SIBLINGS:
            self._evict(next(other for other in self._pages if other.key == key))
        while self.used_bytes > self.max_bytes:
            self._evict(next(iter(self._pages)))

    def _extend(self, page: _Page, own: array[int], low: int, high: int, rows: memoryview) -> None:
        """Add what the page does not have yet. Rows that are there stay: somebody may be sending them."""
        size = self._row_bytes
        if low < page.low:
            page.rows[low * size : page.low * size] = rows[: (page.low - low) * size]
            page.low = low
        if high > page.high:
            page.rows[page.high * size : high * size] = rows[(page.high - low) * size :]
            page.high = high
        if len(own) > len(page.tokens):
            page.tokens = own
        self._pages.move_to_end(page)

    def _cover(
        self, pages: Sequence[_Page], own: array[int], low: int
    ) -> list[tuple[_Page, memoryview]] | None:
        """The rows ``[low, len(own))`` of one page, from as few siblings as it takes."""
        pieces = []
        while low < len(own):
            having = [page for page in pages if page.low <= low]
            best = max(having, key=lambda page: min(page.shared(own), page.high), default=None)
            high = 0 if best is None else min(best.shared(own), best.high)
            if best is None or high <= low:
                return None
            view = best.rows[low * self._row_bytes : high * self._row_bytes]
            pieces.append((best, view.toreadonly()))
            low = high
        return pieces

    def _evict(self, page: _Page) -> None:
        self._evicted += 1
        self._remove(page)

    def _remove(self, page: _Page) -> None:
        del self._pages[page]
        siblings = self._by_key[page.key]
        siblings.remove(page)
        if not siblings:
            del self._by_key[page.key]

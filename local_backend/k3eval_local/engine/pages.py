"""Who holds which page of the cache memory. Pure bookkeeping: no tensors, no bytes.

A page is free when no running sequence and no checkpoint holds it. Both kinds of holders are counted apart,
because what only checkpoints hold can be evicted. Allocation prefers consecutive page numbers, so that a
long sequence is a few contiguous stretches of memory that attention can read without gathering.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class Holder(Enum):
    """Kind of owner of a reference to a page."""

    RUNNING = 0
    CACHED = 1


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. Internal: admission control prevents it."""


class PageAllocator:
    """Reference counts over `total` pages numbered from 0. Not thread-safe: the engine's thread owns it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._counts = {holder: np.zeros(total, dtype=np.int32) for holder in Holder}
        self._free = np.ones(total, dtype=np.bool_)
        self._free_count = total

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free_count

    @property
    def evictable(self) -> int:
        """Pages that only checkpoints hold."""
        return int(np.count_nonzero((self._counts[Holder.RUNNING] == 0) & ~self._free))

    @property
    def running(self) -> int:
        """Pages that a running sequence holds."""
        return int(np.count_nonzero(self._counts[Holder.RUNNING]))

    def allocate(self, count: int, holder: Holder, *, after: int | None = None, roomy: bool = False) -> Pages:
        """Takes `count` free pages, each with one reference of `holder`.

        after: the caller's last page; its successors are taken first when free.
        roomy: leave free pages behind the new stretch (for a sequence that will grow), instead of filling
            the smallest hole that fits.
        Raises OutOfPages and takes nothing when fewer are free.
        """
        if count > self._free_count:
            raise OutOfPages(f"{count} pages asked for, {self._free_count} free")
        parts: list[Pages] = []
        missing = count
        if after is not None and missing:
            ahead = self._free[after + 1 : after + 1 + missing]
            n = len(ahead) if ahead.all() else int(ahead.argmin())
            missing -= self._take(parts, after + 1, n)
        while missing:
            start, n = self._stretch(missing, roomy)
            missing -= self._take(parts, start, n)
        pages = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        self._counts[holder][pages] = 1
        return pages

    def retain(self, pages: Pages, holder: Holder) -> None:
        """Adds one reference to each page (page numbers distinct)."""
        self._counts[holder][pages] += 1
        self._free_count -= int(np.count_nonzero(self._free[pages]))
        self._free[pages] = False

    def release(self, pages: Pages, holder: Holder) -> None:
        """Drops one reference from each page (page numbers distinct)."""
        counts = self._counts[holder]
        if (counts[pages] <= 0).any():
            raise ValueError(f"a page is released more often than it was retained ({holder.name})")
        counts[pages] -= 1
        held = self._counts[Holder.RUNNING][pages] + self._counts[Holder.CACHED][pages]
        freed = pages[held == 0]
        self._free[freed] = True
        self._free_count += len(freed)

    def _take(self, parts: list[Pages], start: int, n: int) -> int:
        if n:
            parts.append(np.arange(start, start + n, dtype=np.int32))
            self._free[start : start + n] = False
            self._free_count -= n
        return n

    def _stretch(self, wanted: int, roomy: bool) -> tuple[int, int]:
        """Start and length (<= wanted) of the best free stretch."""
        edges = np.flatnonzero(np.diff(self._free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = np.flatnonzero(lengths >= wanted)
        if len(fitting) == 0 or roomy:
            best = int(lengths.argmax())
        else:
            best = int(fitting[lengths[fitting].argmin()])
        start, length = int(starts[best]), int(lengths[best])
        # The middle of a hole leaves the sequence before it as much room to grow as the new one gets.
        if roomy and start > 0 and length > wanted:
            start, length = start + (length - wanted) // 2, wanted
        return start, min(length, wanted)


def stretches(table: Pages) -> list[tuple[int, int]]:
    """Splits a block table into maximal runs of consecutive pages: [(first page, number of pages), ...]."""
    if len(table) == 0:
        return []
    starts = np.flatnonzero(np.diff(table, prepend=table[0] - 2) != 1)
    ends = np.append(starts[1:], len(table))
    return [(int(table[start]), int(end - start)) for start, end in zip(starts, ends, strict=True)]

"""Memory of running sequences and of cached prefixes, in one pool of pages.

Admission reserves the worst case (prompt + max_tokens), so a running sequence never fails for want of a page:
pages free + pages that only checkpoints hold >= pages still promised, at all times. Pages are taken when they
are needed, evicting least recently used checkpoints. A hit pins its pages before anything is allocated, and
restores by copy: the state into the sequence's slot, a page filled in part into a page of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from k3eval_local.engine.pages import Holder, PageAllocator, Pages
from k3eval_local.engine.prefix import Checkpoint, PrefixIndex, TokenArray
from k3eval_local.engine.runner import ModelRunner, Row

_GROWTH_PAGES = 4


@dataclass(eq=False)
class SequenceMemory:
    """What one running sequence holds."""

    slot: int
    limit: int
    """Pages promised to it in all."""
    hit_tokens: int
    table: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int32))


@dataclass
class CacheCounters:
    """Running totals."""

    hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    checkpoints_saved: int = 0
    evictions: int = 0


class CacheManager:
    """Slots, pages and checkpoints. Not thread-safe: the engine's thread owns it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.layout = runner.layout
        self.counters = CacheCounters()
        self.pages = PageAllocator(self.layout.pages)
        self.index = PrefixIndex()
        self._runner = runner
        self._slots = list(range(self.layout.slots - 1, -1, -1))
        self.promised_pages = 0
        """Pages that running sequences may still take."""

    @property
    def free_slots(self) -> int:
        """Sequences that could still start."""
        return len(self._slots)

    @property
    def cached_bytes(self) -> int:
        """Bytes that only checkpoints hold."""
        return self.pages.evictable * self.layout.page_bytes

    def admit(self, tokens: TokenArray, total_tokens: int, *, use_cache: bool) -> SequenceMemory | None:
        """Gives a sequence a slot and its prompt's pages, restoring the longest cached prefix.

        tokens: the prompt; at least its last token is always left to run. total_tokens: prompt + output.
        None when slots or pages do not suffice now; then nothing has changed.
        """
        if not self._slots:
            return None
        size = self.layout.page_tokens
        limit = self.layout.pages_for(total_tokens)
        hit = self.index.match(tokens, len(tokens) - 1) if use_cache else None
        pinned = self._pin(hit, limit)
        if pinned is None and hit is not None and len(self._slots) == self.layout.slots:
            # Alone and still no room: a page filled in part is needed twice for a moment. Do without it.
            hit, pinned = None, self._pin(None, limit)
        if pinned is None:
            return None
        whole = hit.position // size if hit is not None else 0
        self._slots.sort(reverse=True)  # the lowest slots first: a dense batch needs no gather
        memory = SequenceMemory(
            self._slots.pop(), limit, hit.position if hit is not None else 0, pinned[:whole]
        )
        self.promised_pages += limit - whole
        try:
            if hit is None:
                self._runner.reset_state(memory.slot)
            else:
                self._runner.load_state(memory.slot, hit.state_pages)
                self.index.touch(hit)
            self.grow(memory, len(tokens))
            if len(pinned) > whole:  # the sequence will write behind a boundary inside this page
                self._runner.copy_page(int(pinned[whole]), int(memory.table[whole]), memory.hit_tokens % size)
        except Exception:
            self.release(memory)
            raise
        finally:
            self.pages.release(pinned[whole:], Holder.RUNNING)
        if hit is not None:
            self.counters.hits += 1
            self.counters.hit_tokens += hit.position
        elif use_cache:
            self.counters.misses += 1
        return memory

    def grow(self, memory: SequenceMemory, tokens: int) -> None:
        """Makes room for `tokens` tokens in all, within the promise."""
        held = len(memory.table)
        wanted = self.layout.pages_for(tokens)
        if wanted <= held:
            return
        if held:
            wanted = min(max(wanted, held + _GROWTH_PAGES), memory.limit)
        self._make_room(wanted - held)
        last = int(memory.table[-1]) if held else None
        fresh = self.pages.allocate(wanted - held, Holder.RUNNING, after=last, roomy=True)
        memory.table = np.concatenate((memory.table, fresh))
        self.promised_pages -= len(fresh)

    def row(self, memory: SequenceMemory, cached: int) -> Row:
        """The sequence as the runner sees it."""
        return Row(memory.slot, memory.table, cached)

    def checkpoint(self, memory: SequenceMemory, tokens: TokenArray, *, evict_first: bool = False) -> bool:
        """Keeps the sequence's present state, reached after exactly `tokens`, for later requests.

        False when it exists already (then it counts as used) or when no room can be made for it.
        """
        existing = self.index.find(tokens, len(tokens))
        if existing is not None:
            self.index.touch(existing)
            return False
        if not self._make_room(self.layout.state_pages):
            return False
        state_pages = self.pages.allocate(self.layout.state_pages, Holder.CACHED)
        try:
            self._runner.save_state(memory.slot, state_pages)
        except Exception:
            self.pages.release(state_pages, Holder.CACHED)
            raise
        pages = memory.table[: self.layout.pages_for(len(tokens))].copy()
        self.pages.retain(pages, Holder.CACHED)
        self.index.insert(tokens, Checkpoint(len(tokens), pages, state_pages), evict_first=evict_first)
        self.counters.checkpoints_saved += 1
        return True

    def release(self, memory: SequenceMemory) -> None:
        """Returns the slot and the pages; what checkpoints hold stays."""
        self.promised_pages -= memory.limit - len(memory.table)
        self.pages.release(memory.table, Holder.RUNNING)
        self._slots.append(memory.slot)

    def clear(self) -> None:
        """Evicts every checkpoint."""
        for checkpoint in list(self.index):
            self._evict(checkpoint)

    def _pin(self, hit: Checkpoint | None, limit: int) -> Pages | None:
        """Holds the hit's pages, if the pages that the sequence may need besides can be had; else None."""
        pages = hit.pages if hit is not None else np.empty(0, dtype=np.int32)
        whole = hit.position // self.layout.page_tokens if hit is not None else 0
        self.pages.retain(pages, Holder.RUNNING)
        if self.pages.free + self.pages.evictable - self.promised_pages >= limit - whole:
            return pages
        self.pages.release(pages, Holder.RUNNING)
        return None

    def _make_room(self, count: int) -> bool:
        while self.pages.free < count and len(self.index):
            self._evict(next(iter(self.index)))
        return self.pages.free >= count

    def _evict(self, checkpoint: Checkpoint) -> None:
        self.index.remove(checkpoint)
        self.pages.release(checkpoint.pages, Holder.CACHED)
        self.pages.release(checkpoint.state_pages, Holder.CACHED)
        self.counters.evictions += 1

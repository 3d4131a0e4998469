"""The meter: ledger, budget, prices, limits and warnings that all clients of a job share. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from k3eval.meter.cache import PrefixWatch
from k3eval.meter.gate import HostGate
from k3eval.meter.ledger import Budget, Ledger, totals
from k3eval.meter.pricing import STALE_DAYS, PriceRow, PriceTable
from k3eval.notices import Notices, Notify, warn
from k3eval.results import Attempt, Totals


class Meter:
    """Counts what calls cost. Share one among all clients and threads of a job.

    ``ledger``: a file to keep the rows in; in memory when not given. ``budget``: a limit over all calls in
    that ledger. ``prices``: other prices than the bundled ones. ``concurrency``: most calls at a time to one
    account.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        budget: Budget | None = None,
        *,
        prices: PriceTable | None = None,
        concurrency: int | None = None,
        notify: Notify = warn,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.budget = budget
        self.prices = PriceTable.bundled() if prices is None else prices
        self.notices = Notices(notify)
        self.prefixes = PrefixWatch()
        self._concurrency = concurrency
        self._now = now
        self._gates: dict[tuple[str, str], HostGate] = {}
        self._own: list[Attempt] = []
        self._lock = threading.Lock()

    @property
    def scope(self) -> str:
        """The ledger scope under which this meter's calls are written."""
        return "" if self.budget is None else self.budget.scope

    @property
    def total(self) -> Totals:
        """Sums over the calls made through this meter (the ledger may hold more)."""
        with self._lock:
            own = tuple(self._own)
        return totals(own)

    def now(self) -> datetime:
        """The wall clock."""
        return self._now()

    def gate(self, host: str, account: str) -> HostGate:
        """Return the gate of one account at one host."""
        with self._lock:
            return self._gates.setdefault((host, account), HostGate(self._concurrency))

    def settled(self, attempt: Attempt) -> None:
        """Add a finished attempt to this meter's own sums."""
        with self._lock:
            self._own.append(attempt)

    def check_age(self, rows: Sequence[PriceRow]) -> None:
        """Warn once about prices that nobody has checked for two months."""
        today = self.now().date()
        oldest = max(rows, key=lambda row: row.age_days(today), default=None)
        if oldest is not None and oldest.age_days(today) > STALE_DAYS:
            self.notices.once(
                "stale_price",
                f"{oldest.host}/{oldest.model}",
                f"the price of {oldest.model} at {oldest.host} was checked {oldest.age_days(today)} days ago"
                f" ({oldest.checked_on}); computed costs may be off",
            )

"""A node store from outside: its counters, whether it is idle, its processes. For demos, tests and benchmarks."""

import os
import select
import signal
import time
from contextlib import suppress

from vllm_kvtier.doctor.store import request_counts
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.store.protocol import Counts
from vllm_kvtier.store.tiers.base import TierCounts

ANSWER_SECONDS = 10.0
QUIET_SECONDS = 0.06  # without copies between engines, memory and secondary tiers
POLL_SECONDS = 0.01  # the store does not report the end of an operation


class StoreFailed(RuntimeError):
    """The store does not answer, or its answer lacks what is needed."""


def store_counts(path: str, seconds: float = ANSWER_SECONDS) -> Counts:
    """The counters of the store at ``path``. Blocks; raises StoreFailed with the store's reason."""
    try:
        return request_counts(path, "devtools", seconds)
    except KVTierError as error:
        raise StoreFailed(str(error)) from error


def tier_of(counts: Counts, name: str = "disk") -> TierCounts:
    """Raises StoreFailed where the store has no such tier."""
    for tier in counts.tiers:
        if tier.name == name:
            return tier
    raise StoreFailed(f"the store has no tier {name!r}; there are {[tier.name for tier in counts.tiers]}")


def open_tier(path: str, name: str = "disk", seconds: float = 30.0) -> tuple[Counts, float]:
    """The store's counts as soon as the tier is ready, and the seconds until then. Raises StoreFailed with the tier's
    reason, or if it is not ready in time."""
    started = time.monotonic()
    while (tier := tier_of(counts := store_counts(path), name)).state == "opening":
        if time.monotonic() > started + seconds:
            raise StoreFailed(f"{name} is not open after {seconds:g} s")
        time.sleep(POLL_SECONDS)
    if tier.state != "ready":
        raise StoreFailed(f"{name} is {tier.state}: {tier.reason}")
    return counts, time.monotonic() - started


def counts_when_idle(path: str, quiet: float = QUIET_SECONDS, seconds: float = 10.0) -> Counts:
    """The store's counts after ``quiet`` seconds without stores, promotions, demotions or pending writes, but at the
    latest after ``seconds``. Raises StoreFailed."""
    deadline = time.monotonic() + seconds
    last, since = None, 0.0
    while True:
        counts, now = store_counts(path), time.monotonic()
        index = counts.index
        moved = (index.commits, index.aborts, index.reservations, index.leases)
        moved += tuple((tier.read_blocks, tier.written_blocks) for tier in counts.tiers)
        if moved != last:
            last, since = moved, now
        busy = index.reservations or any(map(_to_be_written, counts.tiers))
        if (now - since > quiet and not busy) or now > deadline:
            return counts
        time.sleep(POLL_SECONDS)


def _to_be_written(tier: TierCounts) -> float:
    """Blocks that wait for this tier, or are on their way; none where it takes none."""
    of = tier.extra.get
    over = of("written", 0) + of("failed", 0) + of("dropped_evicted", 0)
    return of("admitted", 0) - over if tier.state == "ready" else 0


def end_store(path: str, how: signal.Signals = signal.SIGTERM, seconds: float = 30.0) -> None:
    """Send the store at ``path`` this signal, and wait until it is gone. Does nothing if no store answers; a hung store
    ends when its engines are gone."""
    with suppress(StoreFailed, ProcessLookupError):  # there is none, or it has just ended
        fd = linux.pidfd_open(store_counts(path).pid)
        try:
            linux.pidfd_send_signal(fd, how)
            select.select([fd], [], [], seconds)
        finally:
            os.close(fd)

"""Readings of a node store and of engines, and how fast their counters move between two of them."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from vllm_kvtier.doctor.server import Scrape, Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.wire.reactor import Reactor

ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class Reading:
    """``counts``: of the store, None where it does not answer, for ``reason``. ``engines``: by URL, what its /metrics
    say, or why they do not."""

    at: float  # monotonic seconds
    counts: m.Counts | None
    reason: str = ""
    engines: dict[str, Scrape | str] = field(default_factory=dict)

    @property
    def anything(self) -> bool:
        return self.counts is not None or any(isinstance(each, Scrape) for each in self.engines.values())


class Watcher:
    """Reads a store and engines again and again; goes on when any of them ends and comes back. ``close`` it."""

    def __init__(self, path: str, urls: Sequence[str]):
        self._servers = [Server(url, ANSWER_SECONDS) for url in urls]
        self._threads = ThreadPoolExecutor(max(1, len(self._servers)), "kvtier-metrics")
        self._reactor, self._changed = Reactor("kvtier-top"), threading.Event()
        hello = m.Hello("kvtier top", os.getpid(), "tool")
        self._client = StoreClient(self._reactor, path, hello, ask_timeout=ANSWER_SECONDS, on_change=self._changed.set)
        self._client.start()
        self._reactor.start()
        self._changed.wait(ANSWER_SECONDS)  # connected, or it knows why not

    def read(self) -> Reading:
        """Takes ANSWER_SECONDS at most, whatever hangs."""
        answers = [self._threads.submit(_metrics, server) for server in self._servers]
        pending = self._client.stat()
        pending.wait(ANSWER_SECONDS + 0.5)
        counts = pending.outcome if isinstance(pending.outcome, m.Counts) else None
        at = time.monotonic()
        engines = {server.url: answer.result() for server, answer in zip(self._servers, answers, strict=True)}
        reason = "" if counts else getattr(pending.outcome, "reason", "it does not answer")
        return Reading(at, counts, reason, engines)

    def close(self) -> None:
        self._reactor.stop()
        self._threads.shutdown(wait=False)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _metrics(server: Server) -> Scrape | str:
    try:
        return server.metrics()
    except KVTierError as error:
        return str(error)


@dataclass(frozen=True)
class Rates:
    """From one reading to a later one. Counters of another life of the store or an engine give no rate: None."""

    before: Reading | None
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at - self.before.at if self.before is not None else 0.0

    def of_store(self, value: Callable[[m.Counts], float]) -> float | None:
        """A second, of a number that grows."""
        here, past = self.now.counts, self.before.counts if self.before is not None else None
        if here is None or past is None or here.instance != past.instance or self.seconds <= 0:
            return None
        return (value(here) - value(past)) / self.seconds

    def of_tier(self, name: str, value: Callable[[object], float]) -> float | None:
        def found(counts: m.Counts) -> float:
            return next((value(tier) for tier in counts.tiers if tier.name == name), 0.0)

        return self.of_store(found)

    def of_engine(self, url: str, value: Callable[[Scrape], float]) -> float | None:
        here, past = self.now.engines.get(url), self.before.engines.get(url) if self.before is not None else None
        if not isinstance(here, Scrape) or not isinstance(past, Scrape) or self.seconds <= 0:
            return None
        grown = value(here) - value(past)
        return grown / self.seconds if grown >= 0 else None  # it was restarted

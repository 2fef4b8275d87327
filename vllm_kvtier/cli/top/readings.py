"""Readings of a node store and of engines, and the rates of their counters between two readings."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from vllm_kvtier.doctor.engines.server import Scrape, Server
from vllm_kvtier.doctor.store import request_counts
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as m

ANSWER_SECONDS = 2.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Reading:
    """``counts``: of the store; None if it does not answer, for ``reason``. ``engines``: {URL: metrics or error}."""

    at: float  # monotonic seconds
    counts: m.Counts | None
    reason: str = ""
    engines: dict[str, Scrape | str] = field(default_factory=dict)

    @property
    def anything(self) -> bool:
        return self.counts is not None or any(isinstance(each, Scrape) for each in self.engines.values())


class Watcher:
    """Reads a store and engines repeatedly, also across their restarts. ``close`` it."""

    def __init__(self, path: str, urls: Sequence[str]):
        self._path = path
        self._servers = [Server(url, ANSWER_SECONDS) for url in urls]
        self._threads = ThreadPoolExecutor(max(1, len(self._servers)), "kvtier-top")

    def read(self) -> Reading:
        """Take a reading within ANSWER_SECONDS, also if a server hangs."""
        answers = [self._threads.submit(_answer_or_reason, server.metrics) for server in self._servers]
        counts = _answer_or_reason(lambda: request_counts(self._path, "kvtier top", ANSWER_SECONDS))
        at = time.monotonic()
        engines = {server.url: answer.result() for server, answer in zip(self._servers, answers, strict=True)}
        if isinstance(counts, str):
            return Reading(at, None, counts, engines)
        return Reading(at, counts, "", engines)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer_or_reason(ask: Callable[[], _Answer]) -> _Answer | str:
    try:
        return ask()
    except KVTierError as error:
        return str(error)


@dataclass(frozen=True)
class Rates:
    """Rates from one reading to a later one; None across a restart of the store or engine."""

    before: Reading | None
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at - self.before.at if self.before is not None else 0.0

    def of_store(self, value: Callable[[m.Counts], float]) -> float | None:
        """Growth of a counter, per second."""
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

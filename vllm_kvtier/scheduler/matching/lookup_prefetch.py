"""Lookups for queued requests, so that the answers are there when vLLM matches the requests.

Without it each request of a burst is looked up when vLLM comes to it, and all others wait for its answer. A prefetched
hit is leased for its request. Therefore few lookups are ahead at a time, and not for long: when all have expired, vLLM
is not about to come to the queue. Then a single one is sent each time it does, until one is in time. On vLLM's
scheduler thread only.
"""

import time
from typing import Any, Protocol

from vllm_kvtier.scheduler.sources.base import PendingLookup
from vllm_kvtier.vllm_compat import requests as vr

MAX_PREFETCHES = 16
# Sent together when vLLM matches a request in time (the queue moves) and there is room for as many: their answers then
# take the interpreter once.
PREFETCHES_AT_ONCE = 8
MAX_PREFETCH_SECONDS = 0.25


class PrefetchSource(Protocol):
    """What is used of a ``NodeStoreSource``."""

    @property
    def epoch(self) -> int: ...

    def lookup_queued(self, request: Any, lora_fingerprint: bytes) -> PendingLookup | None: ...

    def cancel(self, pending: PendingLookup) -> None: ...


class LookupPrefetcher:
    def __init__(self, source: PrefetchSource, hash_block_size: int):
        self._source, self._hash_block_size = source, hash_block_size
        self._queue: dict[str, Any] = {}  # requests without a lookup, oldest first
        self._expired: dict[str, Any] = {}  # requests whose lookup was sent too early; they come before the others
        self._lookups: dict[
            str, tuple[PendingLookup, float, bytes, Any]
        ] = {}  # oldest first, with time, LoRA fingerprint and request

    def __len__(self) -> int:
        return len(self._lookups)

    def add(self, request: Any) -> None:
        """vLLM will match the request, after those that came before."""
        first = not self._queue and not self._expired
        self._queue[request.request_id] = request
        if first:
            self._send(1)

    def on_matched(self, request_id: str) -> None:
        """vLLM came to the request for the first time; ``take`` or ``cancel`` may follow."""
        self._queue.pop(request_id, None)
        self._expired.pop(request_id, None)
        if not self._lookups:
            if self._expired or self._queue:
                self._send(1)
        elif request_id in self._lookups and len(self._lookups) <= MAX_PREFETCHES - PREFETCHES_AT_ONCE:
            self._send(PREFETCHES_AT_ONCE)

    def take(self, request: Any, block_hashes: list[bytes], computed: int) -> PendingLookup | None:
        """The lookup that was sent for the request, if it is the one to be sent now; else it is cancelled."""
        lookup, _, lora_fingerprint, _ = self._lookups.get(request.request_id, (None, 0.0, b"", None))
        if lookup is None:
            return None
        same = lookup.epoch == self._source.epoch and lora_fingerprint == vr.lora_fingerprint(request)
        if same and lookup.start <= computed and lookup.max_tokens == len(block_hashes) * self._hash_block_size:
            del self._lookups[request.request_id]
            return lookup
        self.cancel(request.request_id)
        return None

    def cancel(self, request_id: str) -> None:
        """The request ended, or was matched without a prefetched lookup. Idempotent."""
        self._queue.pop(request_id, None)
        self._expired.pop(request_id, None)
        if request_id in self._lookups:
            self._source.cancel(self._lookups[request_id][0])
            del self._lookups[request_id]

    def expire(self) -> bool:
        """Cancel the lookups of requests that vLLM did not come to in time. Returns whether lookups are left or may
        follow."""
        while self._lookups:
            request_id, (_, since, _, request) = next(iter(self._lookups.items()))
            if time.monotonic() - since < MAX_PREFETCH_SECONDS:
                break
            self.cancel(request_id)
            self._expired[request_id] = request
        return bool(self._lookups or self._queue or self._expired)

    def _send(self, most: int) -> None:
        while (queue := self._expired or self._queue) and len(self._lookups) < MAX_PREFETCHES and most > 0:
            request = queue.pop(next(iter(queue)))
            lora_fingerprint = vr.lora_fingerprint(request)
            if lora_fingerprint is None:
                continue
            lookup = self._source.lookup_queued(request, lora_fingerprint)
            if lookup is not None:
                self._lookups[request.request_id] = lookup, time.monotonic(), lora_fingerprint, request
                most -= 1

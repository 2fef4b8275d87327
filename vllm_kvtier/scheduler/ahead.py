"""Asks the node store for requests that vLLM will match soon, so that their answers are there by then.

Without it each of a burst's requests is asked for when vLLM comes to it, and waits for its own answer while all others
wait with it. Here the next few have been asked for when the first one is matched, and the store's answers overlap.

What is found is held for its request, so few are ahead at a time, and not for long: a request that vLLM does not come
to is asked for anew when it does, and until then nobody else is asked for ahead, since vLLM is not about to come to
them either. On the scheduler's thread only.
"""

import time
from collections.abc import Callable
from typing import Any

from vllm_kvtier.scheduler.params import read
from vllm_kvtier.scheduler.tier import HostAsk, HostTier
from vllm_kvtier.vllm_compat import requests as vr

MOST = 16  # requests ahead
MORE = 2  # of them for each that is matched in time: the queue moves
KEPT = 0.25  # seconds


class Ahead:
    def __init__(
        self,
        tier: HostTier,
        unit: int,
        align: int,
        cached: Callable[[list[bytes]], int],
        worth: Callable[[Any, int], bool],
    ):
        """``unit``: tokens of a hash; ``align``: what is asked for begins at a multiple. ``cached``: tokens of a chain
        that the engine has itself, about; ``worth``: whether a request is to be asked for from this token on."""
        self._tier, self._unit, self._align, self._cached, self._worth = tier, unit, align, cached, worth
        self._queue: dict[str, Any] = {}  # requests that are not asked for, in the order that they came
        self._late: set[str] = set()  # requests that were asked for too early
        self._asks: dict[str, tuple[HostAsk, float, bytes]] = {}  # oldest first, with the time and the adapter

    def __len__(self) -> int:
        return len(self._asks)

    def queued(self, request: Any) -> None:
        """vLLM will match it, after those that came before."""
        first = not self._queue and not self._late
        self._queue[request.request_id] = request
        if first:
            self._fill(1)

    def matched(self, request_id: str) -> None:
        """vLLM came to it for the first time; ``take`` or ``forget`` may follow."""
        self._queue.pop(request_id, None)
        self._late.discard(request_id)
        if request_id in self._asks:
            self._fill(MORE)

    def take(self, request: Any, chain: list[bytes], computed: int) -> HostAsk | None:
        """What was asked for it, if that is what is to be asked now."""
        ask, _, variant = self._asks.get(request.request_id, (None, 0.0, b""))
        if ask is None:
            return None
        same = ask.epoch == self._tier.epoch and variant == vr.variant(request)
        if same and ask.start <= computed and ask.most == len(chain) * self._unit:
            del self._asks[request.request_id]
            return ask
        self.forget(request.request_id)
        return None

    def forget(self, request_id: str) -> None:
        """It is over, or was matched without us."""
        self._queue.pop(request_id, None)
        self._late.discard(request_id)
        if request_id in self._asks:
            self._tier.cancel(self._asks[request_id][0])
            del self._asks[request_id]

    def expire(self) -> None:
        """Give back what is held for those that vLLM does not come to."""
        while self._asks:
            request_id, (_, since, _) = next(iter(self._asks.items()))
            if time.monotonic() - since < KEPT:
                return
            self.forget(request_id)
            self._late.add(request_id)

    def _fill(self, most: int) -> None:
        while self._queue and len(self._asks) < MOST and most > 0:
            request = self._queue.pop(next(iter(self._queue)))
            variant = vr.variant(request)
            ask = self._ask(request, variant) if variant is not None else None
            if ask is not None:
                self._asks[request.request_id] = ask, time.monotonic(), variant
                most -= 1

    def _ask(self, request: Any, variant: bytes) -> HostAsk | None:
        hints = read(request.kv_transfer_params)
        chain = vr.chain(request, request.num_tokens, self._unit)
        if hints.handoff or not chain or not self._tier.limit():
            return None
        start = self._cached(chain) // self._align * self._align
        if len(chain) * self._unit <= start or not self._worth(request, start):
            return None
        return self._tier.ask(start, chain, variant, hints.stores)

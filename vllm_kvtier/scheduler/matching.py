"""Matching and loading: per request, what vLLM is told, and what became of it.

On the scheduler's thread only. Whom to ask, and what to take, is ``asking``'s. What another request is loading already
is waited for, not loaded twice.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler import orders
from vllm_kvtier.scheduler.asking import Asker
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Event, Lifecycle, State
from vllm_kvtier.scheduler.nearby import Nearby
from vllm_kvtier.scheduler.offers import Address, Loan
from vllm_kvtier.scheduler.params import read
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.scheduler.tier import HOST, HostOffer, HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.scheduler.weighing import Scales
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder, PullOrder

Order = PullOrder | LoadOrder | FetchOrder | FailedOrder

# So long a request that waits for room keeps another engine from reusing what it was lent.
LOAN_SECONDS = 1.0
# After so many of them failed one request, it is computed.
MOST_FAILED = 4


class Matcher:
    def __init__(
        self,
        config: KVTierConfig,
        peers: Peers,
        ledger: Ledger,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        unit: int,
        my_address: Callable[[], Address],
        counters: Counters,
        resumes: bool = True,
        tier: HostTier | None = None,
        planner: Planner | None = None,
        hurry: Hurry | None = None,
        instance: str = "",
        bytes_of: Callable[[int], int] = lambda tokens: 0,
        free: Callable[[], int] = lambda: 1 << 60,
        cached: Callable[[list[bytes]], int] | None = None,
    ):
        """``groups``: (block tokens, window) a group. ``unit``: tokens a block hash covers. ``tier``: the node store,
        if it is used at all. ``instance``, ``bytes_of``, ``free``: as Nearby's. ``cached``: as Ahead's; None: nobody is
        asked for ahead.

        ``resumes``: whether the model can compute several tokens on top of others; if not, only a pull that leaves
        one is of use.
        """
        self._config, self._peers, self._ledger, self._keys = config, peers, ledger, keys
        self._groups, self._unit, self._counters = groups, unit, counters
        self._tier, self._planner, self._hurry = tier, planner, hurry
        self._scales = Scales(config, groups, unit, resumes, tier, planner, counters)
        self.nearby = Nearby(config, groups, unit, instance, planner, counters, bytes_of, free, hurry)
        self._asker = Asker(
            config, peers, groups, unit, my_address, counters, resumes, tier, planner, self._scales, self.nearby,
            cached, hurry is not None and hurry.possible,
        )  # fmt: skip
        self.whereabouts = self._asker.whereabouts
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[Order] = []
        self._inbound: dict[bytes, str] = {}  # block hash -> request that loads it
        self._introduced: set[str] = set()
        self._introductions: dict[str, list] = {}

    def get(self, request_id: str) -> Tracked | None:
        return self._tracked.get(request_id)

    def __len__(self) -> int:
        return len(self._tracked)

    def states(self) -> Iterator[State]:
        """Of all requests that are there."""
        return (t.life.state for t in self._tracked.values())

    def forgo(self, request: Any) -> None:
        """It is computed here, whatever was asked or offered for it."""
        t = self.track(request)
        if t.life.state is State.NEW and t.hints.handoff and t.sources is None:
            self._peers.drop(t.hints.handoff.address, t.hints.handoff.export)
        self._asker.drop_held(t)
        self._asker.forget_ahead(t)
        if t.life.state in (State.NEW, State.ASKING, State.OFFERED):
            self._asker.advance(t, Event.DECLINE)

    def track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, read(request.kv_transfer_params), Lifecycle(request.request_id))
            self._tracked[request.request_id] = tracked
        return tracked

    def warm(self, request: Any) -> None:
        """It will be matched later; nobody else's KV is asked for until then."""
        hints = read(request.kv_transfer_params)
        chain, variant = vr.chain(request, request.num_tokens, self._unit), vr.variant(request)
        if variant is not None and chain and not hints.handoff and self._tier.warm(chain, variant, hints.stores):
            self._counters.count("warmed")

    def ask_ahead(self, request: Any) -> None:
        """vLLM has it and will match it in its turn."""
        if self._planner is not None:
            self._planner.will_compute(request.request_id, 0, request.num_tokens)
        if self._asker.ahead is not None:
            self._asker.ahead.queued(request)

    def expire(self) -> None:
        """Once a step."""
        if self._asker.ahead is not None:
            self._asker.ahead.expire()

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: tokens beyond ``computed`` that an offer covers; None: ask again."""
        if self._planner is None:
            return self._match(request, computed)
        self._planner.forget(request.request_id)
        tokens, asynchronous = self._match(request, computed)
        self._planner.will_compute(request.request_id, computed + (tokens or 0), request.num_tokens)
        return tokens, asynchronous

    def _match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        t = self.track(request)
        if self._hurry is not None and self._hurry.awaits_verdict:
            return None, False
        self._notice_preemption(t)
        self._notice_eviction(t, computed)
        t.local = computed
        while True:
            match t.life.state:
                case State.NEW:
                    if self._asker.ahead is not None:
                        self._asker.ahead.matched(request.request_id)
                    if self._awaits(t, computed):
                        return None, False
                    if not self._asker.ask_next(t, computed, len(self._tracked) == 1):
                        t.life.fire(Event.DECLINE)
                        return 0, False
                case State.ASKING:
                    if t.waits_since:
                        self._asker.linger(t, len(self._tracked) == 1)
                    if not self._asker.answered(t):
                        return None, False
                case State.OFFERED:
                    if t.offer.place and self._awaits(t, computed):
                        return None, False
                    alone = len(self._tracked) == 1
                    hurried = self._hurry is not None and self._hurry.suits(t, computed, len(self._tracked))
                    gain = self._scales.gain(t, computed, time.monotonic(), alone or hurried)
                    t.hurried, t.among = bool(gain and hurried), not alone
                    if t.hurried:  # of the whole prompt, vLLM computes the last token in the same step
                        return min(gain, request.num_tokens - 1 - computed), False
                    if gain:
                        return gain, True
                    self._asker.decline(t)
                    return 0, False
                case _:
                    return 0, False

    def _notice_preemption(self, t: Tracked) -> None:
        """A request that lost its blocks may have them back from the node store: it is matched like a new one."""
        preemptions = getattr(t.request, "num_preemptions", 0)
        if t.life.state is State.LOADED or (t.life.state is State.LOCAL and preemptions > t.preemptions):
            t.life.fire(Event.PREEMPT)
            t.pulled, t.offer, t.plan = 0, None, None
            t.sources = deque([HOST] if self._tier else [])
            t.begun_at, t.risen = time.monotonic(), 0
        t.preemptions = preemptions

    def _notice_eviction(self, t: Tracked, computed: int) -> None:
        """While a request waits for room, vLLM's cache loses what it had of it: the store is asked again, from there.

        An offer that begins behind that is of no use any more, nor is it right any more that the store had nothing.
        And another engine's cache is not held for it all the time.
        """
        if self._tier is None or self._asker.asks_nobody(t):
            return
        old = isinstance(t.offer, Loan) and time.monotonic() - t.offered_at > LOAN_SECONDS
        if t.life.state is State.OFFERED and t.offer.place and (old or t.offer.start > computed):
            self._asker.missed(t, "held too long" if old else "evicted here meanwhile")
            self._asker.advance(t, Event.DECLINE)
        elif t.life.state is not State.LOCAL or t.asked_from - computed < max(1, self._config.pull_threshold):
            return
        t.life.fire(Event.PREEMPT)
        t.offer, t.plan, t.sources = None, None, deque([HOST])

    def _awaits(self, t: Tracked, computed: int) -> bool:
        """Whether another request loads what this one needs next, and most of what it loads is of use here.

        vLLM has it in its prefix cache when that load ends. Otherwise a short prompt would wait for a long load
        that it shares only the beginning of.
        """
        if not self._inbound or t.request.skip_reading_prefix_cache:
            return False
        chain, first = t.request.block_hashes, computed // self._unit
        other = self._inbound.get(bytes(chain[first])) if first < len(chain) else None
        loading = self._tracked.get(other) if other else None
        if loading is None or loading.life.state is not State.LOADING or other == t.request.request_id:
            return False  # what an aborted one loads does not enter vLLM's cache
        if time.monotonic() > loading.ordered_at + self._config.transfer_timeout:
            return False  # it hangs: its workers should have given it up by now
        if t.awaited != other:
            mine = {bytes(h) for h in chain[first:]}
            shared = sum(h in mine for h in loading.inbound)
            if 2 * shared < len(loading.inbound):
                return False
            t.awaited = other
            self._counters.count("awaited", loading.source)
        return True

    # -- loading -------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of them are ours to fill (0: none)."""
        t = self.track(request)
        self._asker.forget_ahead(t)
        if t.life.state in (State.NEW, State.ASKING):
            self._asker.drop_held(t)
        if t.life.state is State.ASKING:
            t.missed = t.missed or "not waited for"
            # vLLM went on without our answer (a request that may not read any prefix cache).
            self._asker.advance(t, Event.DECLINE)
            self._account(t)
            return
        if t.life.state is not State.OFFERED:
            self._account(t)
            return
        if external <= 0:
            self._asker.decline(t)
            self._account(t)
            return
        t.life.fire(Event.HURRY if t.hurried else Event.ALLOCATE)
        t.ordered_at = time.monotonic()
        tokens = t.local + external
        known = (self._groups, self._unit, self._keys(), block_ids, tokens, self._config.transfer_timeout)
        order = self._order(t, known)
        if t.offer.place and self._planner is not None:
            self._planner.started(t.offer.place, t.offer.nbytes)
            t.planned_for = t.offer
        t.pulled = external
        self._orders.append(order)
        # Computing goes on in this block, or makes a prompt's last token in it again: what the source had summed there
        # is not what will be there.
        first = min(tokens, request.num_tokens - 1)
        pairs = zip(block_ids, self._groups, strict=True)
        again = {ids[first // size] for ids, (size, _) in pairs if first // size < len(ids)}
        t.entries = [entry for entry in t.entries if entry.block not in again]
        if t.hurried:
            self._hurry.begin(t, order)
            return
        t.inbound = vr.chain(request, tokens, self._unit)[t.local // self._unit :]
        self._inbound.update(dict.fromkeys(t.inbound, request.request_id))

    def _order(self, t: Tracked, known: tuple) -> Order:
        """What the workers are to bring; their blocks get new content."""
        if isinstance(t.offer, HostOffer):
            order = t.load = orders.load_order(t, *known)
            for group in order.groups:
                self._ledger.forget(group.blocks.tolist())
            return order
        if t.offer.mapped:
            order = t.load = orders.fetch_order(t, *known)
        else:
            order = orders.pull_order(t, *known)
        self._ledger.forget(e.block for e in t.entries)
        if t.offer.instance not in self._introduced:
            self._introduced.add(t.offer.instance)
            self._introductions[t.offer.instance] = t.offer.ranks
        return order

    def fail_load(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """``allocated`` raised, at whatever point: in place of what it ordered, if it did, the workers report a load
        into these blocks that failed. All else follows from that report, as with any load that fails."""
        t = self._tracked[request.request_id]
        self._orders = [order for order in self._orders if order.request_id != request.request_id]
        if t.life.state is State.OFFERED:
            t.life.fire(Event.HURRY if t.hurried else Event.ALLOCATE)
        t.ordered_at, t.pulled, t.entries = time.monotonic(), external, []
        order = t.load = orders.failed_order(t, self._groups, block_ids, t.local + external)
        self._orders.append(order)
        if t.hurried:
            self._hurry.begin(t, order)

    def let_go(self, request_id: str, gone: bool = False, ended: bool = False) -> list[Callable[[], object]]:
        """Something of ours raised while it dealt with the request, which is computed now. Returns what gives back all
        that it held, each to be called whatever becomes of the others; only the fields are gone by, not the state. What
        the workers load goes on until they report its end. ``gone``: the request has ended; ``ended``: its load has."""
        if gone and self._planner is not None:
            self._planner.forget(request_id)
        t = self._tracked.get(request_id)
        if t is None:
            return self._asker.give_back_ahead(request_id)
        state, held = t.life.state, []
        if state in (State.LOADING, State.VERIFYING, State.ABANDONED) and not ended:
            t.life.state = State.ABANDONED if gone else state
            return held
        if ended or state in (State.NEW, State.ASKING, State.OFFERED):
            held = self._asker.let_go(t)
            if t.planned_for is not None:
                held.append(partial(self._planner.ended, t.planned_for.place, t.planned_for.nbytes))
            self._inbound = {h: loading for h, loading in self._inbound.items() if loading != request_id}
            t.pulled, t.plan, t.planned_for, t.load, t.hurried = 0, None, None, None, False
            t.sources, t.inbound, t.entries, t.places = deque(), [], [], {}
            t.life.state = State.LOCAL
        if gone or state in (State.ABANDONED, State.GONE):
            t.life.state = State.GONE
            self._tracked.pop(request_id, None)
        return held

    def request_ids(self) -> list[str]:
        return list(self._tracked)

    def take_orders(self) -> tuple[list[Order], dict[str, list]]:
        """Pulls and loads for the workers to start in this step, and the engines they name for the first time."""
        taken, self._orders = self._orders, []
        introductions, self._introductions = self._introductions, {}
        return taken, introductions

    def take_aborted(self) -> list[str]:
        """Requests that nobody waits for any more, whose loads were ordered in earlier steps and have not ended."""
        taken, self._asker.aborted = self._asker.aborted, []
        return taken

    def put_back(self, taken: list[Order], introductions: dict[str, list], aborted: list[str]) -> None:
        """What was taken did not get to the workers."""
        self._orders, self._introductions = taken + self._orders, {**introductions, **self._introductions}
        self._asker.aborted = aborted + self._asker.aborted

    def loaded(self, request_id: str, failed: bool) -> None:
        """All ranks are through with a pull (``failed`` if any of them failed)."""
        t = self._tracked.get(request_id)
        if t is None:
            return
        done = t.life.state is State.ABANDONED
        for block_hash in t.inbound:
            if self._inbound.get(block_hash) == request_id:
                del self._inbound[block_hash]
        t.inbound = []
        if t.planned_for is not None:
            self._planner.ended(t.planned_for.place, t.planned_for.nbytes)
            t.planned_for = None
        self._asker.advance(t, Event.LOAD_FAILED if failed else Event.LOAD_DONE)
        if failed:
            t.pulled, t.missed = 0, f"{t.source} failed"
            self._look_elsewhere(t)
            if t.hurried:  # else vLLM gives it blocks anew
                self._account(t)
        elif t.offer is not None and t.offer.alike and not (done or isinstance(t.offer, HostOffer)):
            # Read whole: in the workers' tables.
            for entry in t.entries:
                self._ledger.mark(entry)
        if not failed and (not done or vr.ended_well(t.request)):  # hurried, it may end in the step that loads it
            self._account(t)
        t.entries, t.load, t.places = [], None, {}
        if done:
            self._tracked.pop(request_id, None)

    def _account(self, t: Tracked) -> None:
        """Once a request: where the KV of its prompt comes from, now that it is to be computed or is here."""
        if t.accounted:
            return
        t.accounted, count, prompt = True, self._counters.count, t.request.num_prompt_tokens
        local = min(t.local, prompt)
        brought = min(t.pulled, prompt - local)
        risen = min(t.risen, brought) if t.source == "host" else 0
        if brought:
            count("hits", t.source)
        elif local:
            count("hits", "own cache")
        else:
            count("misses", t.missed or "nobody to ask")
        parts = {
            "own cache": local,
            "below memory": risen,
            t.source: brought - risen,
            "computed": prompt - local - brought,
        }
        for kind, tokens in parts.items():
            if tokens:
                count("prompt_tokens", kind, tokens)

    def _look_elsewhere(self, t: Tracked) -> None:
        """An engine of this node that had lent its blocks failed us: others may have them, if vLLM asks again."""
        if isinstance(t.offer, Loan) and t.life.state is State.LOCAL:
            t.failed.add(t.offer.instance)
            if isinstance(t.asking, Holder):  # the store may know whoever answered there by another name
                t.failed.add(t.asking.instance)
            if len(t.failed) > MOST_FAILED:
                return
            t.life.fire(Event.PREEMPT)
            t.offer, t.plan, t.hurried, t.sources = None, None, False, None

    def discard(self, request_id: str, corrupt: list[tuple[int, int]]) -> None:
        """What lies in these (group, slot) failed its checksum in a load: the store is to forget it."""
        t = self._tracked.get(request_id)
        if t is None or not isinstance(t.offer, HostOffer):
            return
        variant = vr.variant(t.request)
        for group, slot, block_hash in orders.hashes_of(t, self._groups, self._unit, corrupt):
            self._tier.discard(variant, group, block_hash, slot, t.offer.session)

    def finished(self, request: Any) -> Tracked:
        """The request ended in whatever way; gives back what it held, unless the workers still read."""
        t = self.track(request)
        if t.life.state is State.NEW and t.hints.handoff and t.sources is None:
            # Aborted before it was ever scheduled: the other side must not wait for us.
            self._peers.drop(t.hints.handoff.address, t.hints.handoff.export)
        if self._planner is not None:
            self._planner.forget(request.request_id)
        self._asker.drop_held(t)
        self._asker.forget_ahead(t)
        self._asker.advance(t, Event.FINISH)
        if t.life.state is State.GONE:
            self._tracked.pop(request.request_id, None)
        return t

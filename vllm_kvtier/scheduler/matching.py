"""Matching and loading: per request, whom to ask, what to take, and what became of it.

On the scheduler's thread only; ``Peers`` and ``HostTier`` do the waiting. A request's sources are tried in order: the
prefill that was promised to it; the node store; then, for what the store lacks, the engines its params name and the
engine that last pulled this chain from us. What another request is loading already is waited for, not loaded twice.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.codecs import Codec
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler import orders
from vllm_kvtier.scheduler.exports import GroupBlocks
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Action, Event, Lifecycle, State
from vllm_kvtier.scheduler.params import Handoff, read
from vllm_kvtier.scheduler.patience import Patience
from vllm_kvtier.scheduler.peers import Address, NoOffer, Offer, Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HOST, HostAsk, HostOffer, HostTier, NotInMemory
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.scheduler.weighing import Scales
from vllm_kvtier.scheduler.whereabouts import Whereabouts
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import LoadOrder, PullOrder

logger = logging.getLogger("vllm.kvtier.matching")

# The store answers in a fraction of a millisecond. When nobody else is being served, waiting for it that long holds
# nobody up and is shorter than the empty step that vLLM makes when we have no answer yet.
STORE_PATIENCE = 3e-3  # seconds


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
    ):
        """``groups``: (block tokens, window) a group. ``unit``: tokens a block hash covers. ``tier``: the node store,
        if it is used at all.

        ``resumes``: whether the model can compute several tokens on top of others; if not, only a pull that leaves
        one is of use.
        """
        self._config, self._peers, self._ledger, self._keys = config, peers, ledger, keys
        self._groups, self._unit, self._my_address, self._counters = groups, unit, my_address, counters
        self._resumes, self._tier, self._planner, self._hurry = resumes, tier, planner, hurry
        self._align = math.lcm(unit, *(size for size, _ in groups))
        self._scales = Scales(config, groups, unit, resumes, tier, planner, counters)
        self._patience = Patience(config, tier, planner, counters, unit) if tier is not None else None
        self.whereabouts = Whereabouts(config.retain_seconds)
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[PullOrder | LoadOrder] = []
        self._aborted: list[str] = []  # requests whose loads the workers need not go on with
        self._inbound: dict[bytes, str] = {}  # block hash -> request that loads it
        self._introduced: set[str] = set()
        self._introductions: dict[str, list] = {}

    def get(self, request_id: str) -> Tracked | None:
        return self._tracked.get(request_id)

    def __len__(self) -> int:
        return len(self._tracked)

    def track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, read(request.kv_transfer_params), Lifecycle(request.request_id))
            self._tracked[request.request_id] = tracked
        return tracked

    def warm(self, request: Any) -> None:
        """It will be matched later; nobody else's KV is asked for until then."""
        hints = read(request.kv_transfer_params)
        chain = vr.chain(request, request.num_tokens, self._unit)
        if chain and not hints.handoff and self._tier.warm(chain, vr.variant(request), hints.stores):
            self._counters.count("warmed")

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: tokens beyond ``computed`` that an offer covers; None: ask again."""
        t = self.track(request)
        if self._hurry is not None and self._hurry.awaits_verdict:
            return None, False
        self._notice_preemption(t)
        self._notice_eviction(t, computed)
        t.local = computed
        while True:
            match t.life.state:
                case State.NEW:
                    if self._awaits(t, computed):
                        return None, False
                    if not self._ask_next(t, computed):
                        t.life.fire(Event.DECLINE)
                        return 0, False
                case State.ASKING:
                    if t.waits_since:
                        self._linger(t)
                    if not self._answered(t):
                        return None, False
                case State.OFFERED:
                    if isinstance(t.offer, HostOffer) and self._awaits(t, computed):
                        return None, False
                    gain = self._scales.gain(t, computed, time.monotonic())
                    t.hurried = bool(gain and self._hurry and self._hurry.suits(t, computed, len(self._tracked)))
                    if t.hurried:  # of the whole prompt, vLLM computes the last token in the same step
                        return min(gain, request.num_tokens - 1 - computed), False
                    if gain:
                        return gain, True
                    self._decline(t)
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
        t.preemptions = preemptions

    def _notice_eviction(self, t: Tracked, computed: int) -> None:
        """While a request waits for room, vLLM's cache loses what it had of it: the store is asked again, from there.

        An offer that begins behind that is of no use any more, nor is it right any more that the store had nothing.
        """
        if self._tier is None or self._asks_nobody(t):
            return
        if t.life.state is State.OFFERED and isinstance(t.offer, HostOffer) and t.offer.start > computed:
            self._counters.count("declined", "evicted here meanwhile")
            self._act(t, t.life.fire(Event.DECLINE))
        elif t.life.state is not State.LOCAL or t.asked_from - computed < max(1, self._config.pull_threshold):
            return
        t.life.fire(Event.PREEMPT)
        t.offer, t.plan, t.sources = None, None, deque([HOST])

    def _asks_nobody(self, t: Tracked) -> bool:
        return not self._resumes or getattr(t.request, "skip_reading_prefix_cache", False)

    def _awaits(self, t: Tracked, computed: int) -> bool:
        """Whether another request loads what this one needs next, and most of what it loads is of use here.

        vLLM has it in its prefix cache when that load ends. Otherwise a short prompt would wait for a long load
        that it shares only the beginning of.
        """
        if not self._inbound:
            return False
        chain, first = t.request.block_hashes, computed // self._unit
        other = self._inbound.get(bytes(chain[first])) if first < len(chain) else None
        loading = self._tracked.get(other) if other else None
        if loading is None or loading.life.state is not State.LOADING or other == t.request.request_id:
            return False  # what an aborted one loads does not enter vLLM's cache
        if t.awaited != other:
            mine = {bytes(h) for h in chain[first:]}
            shared = sum(h in mine for h in loading.inbound)
            if 2 * shared < len(loading.inbound):
                return False
            t.awaited = other
            self._counters.count("awaited", loading.source)
        return True

    def _ask_next(self, t: Tracked, computed: int) -> bool:
        """Ask the next source that could be worth it; False if none is left."""
        request = t.request
        if t.sources is None:
            t.sources, t.begun_at = deque(self._sources(t)), time.monotonic()
        # At least the last token is computed here, so it is not worth asking for less than the threshold before it.
        lacking = request.num_tokens - 1 - computed
        if getattr(request, "skip_reading_prefix_cache", False):
            lacking = 0  # prompt log-probabilities need every token computed; vLLM 0.25 asks all the same
        variant = vr.variant(request) if t.sources else b""
        if t.held is not None:
            lacking = request.num_tokens - 1 - t.held.tokens
        while t.sources:
            source = t.sources.popleft()
            if source is HOST:
                if self._ask_store(t, computed, lacking, variant):
                    return True
                continue
            if lacking < max(1, self._config.pull_threshold):
                self._counters.count("declined", "below threshold" if lacking > 0 else "local hit")
                if isinstance(source, Handoff):
                    self._peers.drop(source.address, source.export)  # nobody else will come for it
                continue
            hashes = vr.chain(request, request.num_tokens, self._unit)
            host, port = self._my_address() if self._config.bidirectional else ("", 0)
            common = dict(start=computed, variant=variant, reply_host=host, reply_port=port)
            if isinstance(source, Handoff):
                digest = vr.chain_digest(hashes, orders.tail_hash(t, request.num_tokens, self._unit))
                t.pending = self._peers.ask(
                    source.address, export=source.export, digest=digest, chain=hashes[-1:], **common
                )
            elif len(hashes) * self._unit - computed >= self._config.pull_threshold:
                t.pending = self._peers.ask(source, chain=hashes, **common)
            else:
                continue
            t.asking = source
            t.life.fire(Event.ASK)
            if isinstance(source, Handoff):
                self._take_promise(t, source, digest, computed)
            return True
        if t.held is not None:
            t.offer, t.offered_at, t.held = t.held, time.monotonic(), None
            t.life.fire(Event.TAKE)
            return True
        return False

    def _ask_store(self, t: Tracked, computed: int, lacking: int, variant: bytes) -> bool:
        hashes = vr.chain(t.request, t.request.num_tokens, self._unit)
        t.asked_from = computed
        if lacking <= 0 or len(hashes) * self._unit <= computed or computed % self._align:
            if hashes:
                self._tier.touch(hashes, variant)  # what the GPU has, the store should not forget
            return False
        t.pending = self._tier.ask(computed, hashes, variant, t.hints.stores)
        if t.pending is None:
            return False
        t.asking, t.waits_since = HOST, 0.0
        t.life.fire(Event.ASK)
        self._linger(t)
        return True

    def _linger(self, t: Tracked) -> None:
        if len(self._tracked) == 1 and isinstance(t.pending, HostAsk):
            t.pending.wait(STORE_PATIENCE)

    def _wait_for_more(self, t: Tracked, outcome: HostOffer | NotInMemory) -> bool:
        """Ask the store again, and let it take its time, if what is on its way up there is worth that."""
        have = outcome.tokens if isinstance(outcome, HostOffer) else t.asked_from
        patience = self._patience.worth(t, have, outcome.further)
        if not patience:
            return False
        hashes = vr.chain(t.request, t.request.num_tokens, self._unit)
        again = self._tier.ask(t.asked_from, hashes, vr.variant(t.request), t.hints.stores, patience)
        if again is None:
            return False
        self._drop_held(t)
        t.pending = again
        if isinstance(outcome, HostOffer):
            t.held = outcome  # so that it stays there meanwhile
        return True

    def _take_promise(self, t: Tracked, handoff: Handoff, digest: bytes, computed: int) -> None:
        """Go on without the answer if the params say all that it would: the checksums decide what the read was worth.

        The ask stays under way, so that a lease covers the read soon after it began and can be released at its end.
        Not with a codec: encoding takes longer than a checksum, and what is read before its end is read in vain.
        """
        if self._config.wire_codec != Codec.RAW:
            return
        promise = handoff.promise
        if promise is None or promise.digest != digest or len(promise.blocks) != len(self._groups):
            return
        ranks = self._peers.known(handoff.address, promise.instance)
        if ranks is None:
            return
        groups = [GroupBlocks(size, ids, w) for ids, (size, w) in zip(promise.blocks, self._groups, strict=True)]
        if not all(group.cover(computed, promise.tokens) for group in groups):
            return
        blocks = [group.ids[computed // group.block_tokens :] for group in groups]
        offer = Offer(handoff.address, promise.instance, 0, computed, promise.tokens, blocks, ranks)
        if self._scales.fits(t, offer):
            t.offer, t.offered_at = offer, time.monotonic()
            t.life.fire(Event.GRANT)

    def _sources(self, t: Tracked):
        if t.hints.handoff:
            yield t.hints.handoff
        if self._tier is not None and (self._resumes or t.hints.handoff):
            yield HOST
        if t.hints.handoff:
            return
        if not self._config.bidirectional or not self._resumes:
            return
        mine = self._my_address()
        seen = set()
        chain = vr.chain(t.request, t.request.num_tokens, self._unit)
        for address in (*t.hints.sources, self.whereabouts.find(chain)):
            if address and address != mine and address not in seen:
                seen.add(address)
                yield address

    def _answered(self, t: Tracked) -> bool:
        outcome = t.pending.outcome
        if outcome is None:
            # Peers answers every ask by its deadline; this is for the case that its thread died.
            if time.monotonic() < t.pending.deadline + 1.0:
                return False
            self._counters.count("declined", "timeout")
            self._act(t, t.life.fire(Event.TIMEOUT))
        elif isinstance(outcome, HostOffer | NotInMemory) and self._wait_for_more(t, outcome):
            return False  # the store has been asked again
        elif isinstance(outcome, NoOffer):
            self._counters.count("declined", outcome.code)
            logger.debug("kvtier: %s: %s", t.request.request_id, outcome.reason)
            t.life.fire(Event.REFUSE)
            t.pending = None
            if outcome.code in ("timeout", "not_ready"):
                self._give_up(t)  # computed here now: nobody else will come for it
        elif isinstance(outcome, HostOffer):
            if t.waits_since:
                self._patience.rewarded(t, outcome.tokens)
            self._drop_held(t)
            t.pending, t.held = None, outcome
            t.life.fire(Event.HOLD)
        elif not self._scales.fits(t, outcome):
            self._counters.count("declined", "malformed")
            t.life.fire(Event.REFUSE)
            t.pending = None
            self._peers.release(outcome, done=True)
        elif t.held is not None and outcome.tokens < t.held.tokens + max(1, self._config.pull_threshold):
            self._counters.count("declined", "the node store has as much")
            t.life.fire(Event.REFUSE)
            t.pending = None
            self._peers.release(outcome, done=False)
        else:
            self._drop_held(t)
            t.offer, t.offered_at = outcome, time.monotonic()
            t.life.fire(Event.GRANT)
        return True

    def _drop_held(self, t: Tracked) -> None:
        if t.held is not None:
            self._tier.release(t.held)
            t.held = None

    def _give_up(self, t: Tracked) -> None:
        """Tell a prefill that was promised to us that we will not fetch it."""
        if isinstance(t.asking, Handoff):
            self._peers.drop(t.asking.address, t.asking.export)

    def _decline(self, t: Tracked) -> None:
        if isinstance(t.offer, HostOffer) and t.offer.tokens > t.local:
            reason = "slower than computing"
        else:
            reason = "local hit" if t.offer.tokens <= t.local else "below threshold"
        self._counters.count("declined", reason)
        self._act(t, t.life.fire(Event.DECLINE))

    def _act(self, t: Tracked, action: Action, done: bool = True) -> None:
        if action is Action.CANCEL_ASK and t.pending is not None:
            if isinstance(t.pending, HostAsk):
                self._tier.cancel(t.pending)
            else:
                self._peers.cancel(t.pending)
            t.pending = None
            self._give_up(t)
        elif action is Action.RELEASE and t.offer is not None:
            if isinstance(t.offer, HostOffer):
                self._tier.release(t.offer)
            elif t.offer.lease:
                self._peers.release(t.offer, done)
            elif t.pending is not None and isinstance(t.pending.outcome, Offer):
                self._peers.release(t.pending.outcome, done)
            elif t.pending is not None and t.pending.outcome is None:
                self._peers.cancel(t.pending)
                self._give_up(t)
            else:  # refused or not answered, while we read what was promised
                self._give_up(t)
        elif action is Action.CANCEL_LOAD and t.load is not None:  # a pull is one transfer: it cannot be stopped
            self._aborted.append(t.request.request_id)

    # -- loading -------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of them are ours to fill (0: none)."""
        t = self.track(request)
        if t.life.state in (State.NEW, State.ASKING):
            self._drop_held(t)
        if t.life.state is State.ASKING:
            # vLLM went on without our answer (a request that may not read any prefix cache).
            self._act(t, t.life.fire(Event.DECLINE))
            return
        if t.life.state is not State.OFFERED:
            return
        if external <= 0:
            self._decline(t)
            return
        t.life.fire(Event.HURRY if t.hurried else Event.ALLOCATE)
        t.ordered_at = time.monotonic()
        tokens = t.local + external
        known = (self._groups, self._unit, self._keys(), block_ids, tokens, self._config.transfer_timeout)
        if isinstance(t.offer, HostOffer):
            order = t.load = orders.load_order(t, *known)
            for group in order.groups:
                self._ledger.forget(group.blocks.tolist())
            if self._planner is not None:
                self._planner.started("host", t.offer.nbytes)
        else:
            order = orders.pull_order(t, *known)
            self._ledger.forget(e.block for e in t.entries)
            if t.offer.instance not in self._introduced:
                self._introduced.add(t.offer.instance)
                self._introductions[t.offer.instance] = t.offer.ranks
        t.pulled = external
        self._orders.append(order)
        if t.hurried:
            self._hurry.begin(t, order)
            return
        t.inbound = vr.chain(request, tokens, self._unit)[t.local // self._unit :]
        self._inbound.update(dict.fromkeys(t.inbound, request.request_id))

    def take_orders(self) -> tuple[list[PullOrder | LoadOrder], dict[str, list]]:
        """Pulls and loads for the workers to start in this step, and the engines they name for the first time."""
        taken, self._orders = self._orders, []
        introductions, self._introductions = self._introductions, {}
        return taken, introductions

    def take_aborted(self) -> list[str]:
        """Requests that nobody waits for any more, whose loads were ordered in earlier steps and have not ended."""
        taken, self._aborted = self._aborted, []
        return taken

    def loaded(self, request_id: str, failed: bool) -> None:
        """All ranks are through with a pull (``failed`` if any of them failed)."""
        t = self._tracked.get(request_id)
        if t is None:
            return
        loading = t.life.state in (State.LOADING, State.VERIFYING, State.ABANDONED)
        done = t.life.state is State.ABANDONED
        for block_hash in t.inbound:
            if self._inbound.get(block_hash) == request_id:
                del self._inbound[block_hash]
        t.inbound = []
        if loading and isinstance(t.offer, HostOffer) and self._planner is not None:
            self._planner.ended("host", t.offer.nbytes)
        self._act(t, t.life.fire(Event.LOAD_FAILED if failed else Event.LOAD_DONE))
        if failed:
            t.pulled = 0
        elif not isinstance(t.offer, HostOffer):  # only a pull enters what it checked into the workers' tables
            for entry in t.entries:
                self._ledger.mark(entry)
        t.entries, t.load, t.places = [], None, {}
        if done:
            self._tracked.pop(request_id, None)

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
        self._drop_held(t)
        self._act(t, t.life.fire(Event.FINISH))
        if t.life.state is State.GONE:
            self._tracked.pop(request.request_id, None)
        return t

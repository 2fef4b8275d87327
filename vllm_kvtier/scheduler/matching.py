"""Matching and loading: per request, whom to ask, what to take, and what became of it.

On the scheduler's thread only; ``Peers`` does the waiting. A request's sources are tried in order: the prefill
that was promised to it, then the engines its params name, then the engine that last pulled this chain from us.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.exports import GroupBlocks
from vllm_kvtier.scheduler.ledger import Entry, Keys, Ledger
from vllm_kvtier.scheduler.lifecycle import Action, Event, Lifecycle, State
from vllm_kvtier.scheduler.params import Handoff, Hints, Report, read
from vllm_kvtier.scheduler.peers import Address, NoOffer, Offer, Peers, PendingAsk
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import GroupPull, PullOrder

logger = logging.getLogger("vllm.kvtier.matching")

MAX_WHEREABOUTS = 1 << 16  # chain ends remembered (about 100 bytes each)


class Whereabouts:
    """Which engine last pulled a chain from us: it has the conversation, even if no router says so."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._at: OrderedDict[bytes, tuple[Address, float]] = OrderedDict()

    def note(self, chain_end: bytes, address: Address) -> None:
        """Any thread (one assignment)."""
        self._at[chain_end] = (address, time.monotonic() + self._seconds)
        self._at.move_to_end(chain_end)
        while len(self._at) > MAX_WHEREABOUTS:
            self._at.popitem(last=False)

    def find(self, chain: list[bytes]) -> Address | None:
        for block_hash in reversed(chain):
            found = self._at.get(block_hash)
            if found and found[1] > time.monotonic():
                return found[0]
        return None


@dataclass
class Tracked:
    """One request. ``sources`` still to be tried; ``local`` tokens vLLM had when it last asked us."""

    request: Any
    hints: Hints
    life: Lifecycle
    sources: deque[Handoff | Address] | None = None  # made at the first match: needs the hash chain
    pending: PendingAsk | None = None
    asking: Handoff | Address | None = None
    offer: Offer | None = None
    offered_at: float = 0.0
    local: int = 0
    pulled: int = 0
    entries: list[Entry] = field(default_factory=list)

    def report(self) -> Report:
        source = f"{self.offer.address[0]}:{self.offer.address[1]}" if self.offer and self.pulled else None
        return Report(self.request.num_prompt_tokens, self.local, self.pulled, source)


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
    ):
        """``groups``: (block tokens, window) a group. ``unit``: tokens a block hash covers.

        ``resumes``: whether the model can compute several tokens on top of others; if not, only a pull that leaves
        one is of use.
        """
        self._config, self._peers, self._ledger, self._keys = config, peers, ledger, keys
        self._groups, self._unit, self._my_address, self._counters = groups, unit, my_address, counters
        self._resumes = resumes
        self._windowed = any(window is not None for _, window in groups)
        self.whereabouts = Whereabouts(config.retain_seconds)
        self._tracked: dict[str, Tracked] = {}
        self._orders: list[PullOrder] = []
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

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """vLLM's ``get_num_new_matched_tokens``: tokens beyond ``computed`` that an offer covers; None: ask again."""
        t = self.track(request)
        if t.life.state is State.LOADED:  # vLLM matches a request again only after it lost its blocks
            t.life.fire(Event.PREEMPT)
            t.pulled = 0
        t.local = computed
        while True:
            match t.life.state:
                case State.NEW:
                    if not self._ask_next(t, computed):
                        t.life.fire(Event.DECLINE)
                        return 0, False
                case State.ASKING:
                    if not self._answered(t):
                        return None, False
                case State.OFFERED:
                    gain = self._gain(t, computed)
                    if gain:
                        return gain, True
                    self._decline(t)
                    return 0, False
                case _:
                    return 0, False

    def _ask_next(self, t: Tracked, computed: int) -> bool:
        """Ask the next source that could be worth it; False if none is left."""
        request = t.request
        if t.sources is None:
            t.sources = deque(self._sources(t))
        # At least the last token is computed here, so it is not worth asking for less than the threshold before it.
        lacking = request.num_tokens - 1 - computed
        if getattr(request, "skip_reading_prefix_cache", False):
            lacking = 0  # prompt log-probabilities need every token computed; vLLM 0.25 asks all the same
        variant = vr.variant(request) if t.sources else b""
        while t.sources:
            source = t.sources.popleft()
            if lacking < max(1, self._config.pull_threshold):
                self._counters.count("declined", "below threshold" if lacking > 0 else "local hit")
                if isinstance(source, Handoff):
                    self._peers.drop(source.address, source.export)  # nobody else will come for it
                continue
            hashes = vr.chain(request, request.num_tokens, self._unit)
            host, port = self._my_address() if self._config.bidirectional else ("", 0)
            common = dict(start=computed, variant=variant, reply_host=host, reply_port=port)
            if isinstance(source, Handoff):
                digest = vr.chain_digest(hashes, self._tail(request, request.num_tokens))
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
        return False

    def _take_promise(self, t: Tracked, handoff: Handoff, digest: bytes, computed: int) -> None:
        """Go on without the answer if the params say all that it would: the checksums decide what the read was worth.

        The ask stays under way, so that a lease covers the read soon after it began and can be released at its end.
        """
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
        if self._fits(t, offer):
            t.offer, t.offered_at = offer, time.monotonic()
            t.life.fire(Event.GRANT)

    def _sources(self, t: Tracked):
        if t.hints.handoff:
            yield t.hints.handoff
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

    def _tail(self, request: Any, tokens: int) -> bytes:
        if tokens % self._unit == 0 or len(request.block_hashes) < tokens // self._unit:
            return b""  # no tail, or not hashed so far yet (some speculative decoding): then nothing matches
        return vr.tail_hash(request, tokens, self._unit)

    def _answered(self, t: Tracked) -> bool:
        outcome = t.pending.outcome
        if outcome is None:
            # Peers answers every ask by its deadline; this is for the case that its thread died.
            if time.monotonic() < t.pending.deadline + 1.0:
                return False
            self._counters.count("declined", "timeout")
            self._act(t, t.life.fire(Event.TIMEOUT))
        elif isinstance(outcome, NoOffer):
            self._counters.count("declined", outcome.code)
            logger.debug("kvtier: %s: %s", t.request.request_id, outcome.reason)
            t.life.fire(Event.REFUSE)
            t.pending = None
            if outcome.code in ("timeout", "not_ready"):
                self._give_up(t)  # computed here now: nobody else will come for it
        elif not self._fits(t, outcome):
            self._counters.count("declined", "malformed")
            t.life.fire(Event.REFUSE)
            t.pending = None
            self._peers.release(outcome, done=True)
        else:
            t.offer, t.offered_at = outcome, time.monotonic()
            t.life.fire(Event.GRANT)
        return True

    def _fits(self, t: Tracked, offer: Offer) -> bool:
        """Whether an offer says what was asked for: another process sent it, and its numbers become indices here."""
        most = t.request.num_tokens if isinstance(t.asking, Handoff) else len(t.pending.ask.chain) * self._unit
        if not (t.pending.ask.start <= offer.start < offer.tokens <= most and len(offer.blocks) == len(self._groups)):
            return False
        return all(
            len(ids) == -(-offer.tokens // size) - offer.start // size
            for ids, (size, _) in zip(offer.blocks, self._groups, strict=True)
        )

    def _give_up(self, t: Tracked) -> None:
        """Tell a prefill that was promised to us that we will not fetch it."""
        if isinstance(t.asking, Handoff):
            self._peers.drop(t.asking.address, t.asking.export)

    def _gain(self, t: Tracked, computed: int) -> int:
        """Tokens the offer adds to ``computed``; 0 if it is no longer worth it or held for too long."""
        offer = t.offer
        if offer.start > computed or time.monotonic() - t.offered_at > self._config.transfer_timeout:
            return 0
        prompt = t.request.num_tokens
        tokens = min(offer.tokens, prompt)
        if tokens == prompt and self._windowed:
            # vLLM would compute the last token again, after it has given up the blocks that only this token's
            # window reaches (``get_num_skipped_tokens`` is asked for the next token's).
            tokens -= 1
        if tokens < prompt - 1 and not self._resumes or not self._reaches(offer, tokens):
            return 0
        gain = tokens - computed
        return gain if gain >= max(1, self._config.pull_threshold) else 0

    def _reaches(self, offer: Offer, tokens: int) -> bool:
        """Whether the offer has all blocks that the windows of the token after ``tokens`` reach."""
        for ids, (size, window) in zip(offer.blocks, self._groups, strict=True):
            if window is not None:
                skipped = offer.start // size
                first = max(0, tokens - window + 1) // size
                if not all(ids[max(0, first - skipped) : -(-tokens // size) - skipped]):
                    return False
        return True

    def _decline(self, t: Tracked) -> None:
        self._counters.count("declined", "local hit" if t.offer.tokens <= t.local else "below threshold")
        self._act(t, t.life.fire(Event.DECLINE))

    def _act(self, t: Tracked, action: Action, done: bool = True) -> None:
        if action is Action.CANCEL_ASK and t.pending is not None:
            self._peers.cancel(t.pending)
            t.pending = None
            self._give_up(t)
        elif action is Action.RELEASE and t.offer is not None:
            if t.offer.lease:
                self._peers.release(t.offer, done)
            elif t.pending is not None and isinstance(t.pending.outcome, Offer):
                self._peers.release(t.pending.outcome, done)
            elif t.pending is not None and t.pending.outcome is None:
                self._peers.cancel(t.pending)
                self._give_up(t)
            else:  # refused or not answered, while we read what was promised
                self._give_up(t)

    # -- loading -------------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of them are ours to fill (0: none)."""
        t = self.track(request)
        if t.life.state is State.ASKING:
            # vLLM went on without our answer (a request that may not read any prefix cache).
            self._act(t, t.life.fire(Event.DECLINE))
            return
        if t.life.state is not State.OFFERED:
            return
        if external <= 0:
            self._decline(t)
            return
        t.life.fire(Event.ALLOCATE)
        tokens = t.local + external
        order = self._order(t, block_ids, tokens)
        if t.offer.instance not in self._introduced:
            self._introduced.add(t.offer.instance)
            self._introductions[t.offer.instance] = t.offer.ranks
        t.pulled = external
        self._orders.append(order)

    def _order(self, t: Tracked, block_ids: tuple[list[int], ...], tokens: int) -> PullOrder:
        # Blocks count whole, up to the offer's end, even if the last token is not taken: so the source summed them.
        most = t.offer.tokens
        hashes = vr.chain(t.request, most, self._unit)
        variant, keys, pulls = vr.variant(t.request), self._keys(), []
        for g, (size, window) in enumerate(self._groups):
            theirs = GroupBlocks(size, [0] * (t.offer.start // size) + t.offer.blocks[g], window)
            rows = []
            for place in range(t.local // size, -(-tokens // size)):
                local = block_ids[g][place] if place < len(block_ids[g]) else 0
                if not local:
                    continue  # outside a sliding window: vLLM gave no block, nobody reads it
                end = min((place + 1) * size, most)
                block_hash = hashes[end // self._unit - 1] if end % self._unit == 0 else self._tail(t.request, end)
                entry = Entry(g, local, keys.key(block_hash, g, variant), end - place * size)
                rows.append((entry, theirs.ids[place] if place < len(theirs.ids) else 0))
            t.entries += [entry for entry, _ in rows]
            pulls.append(
                GroupPull(
                    g,
                    np.array([e.block for e, _ in rows], np.int64),
                    np.array([remote for _, remote in rows], np.int64),
                    np.array([e.key for e, _ in rows], np.uint64),
                    np.array([e.valid for e, _ in rows], np.int32),
                )
            )
        self._ledger.forget(e.block for e in t.entries)
        return PullOrder(
            t.request.request_id, t.offer.instance, pulls, self._config.transfer_timeout, promised=not t.offer.lease
        )

    def take_orders(self) -> tuple[list[PullOrder], dict[str, list]]:
        """Pulls for the workers to start in this step, and the engines they name for the first time."""
        orders, self._orders = self._orders, []
        introductions, self._introductions = self._introductions, {}
        return orders, introductions

    def loaded(self, request_id: str, failed: bool) -> None:
        """All ranks are through with a pull (``failed`` if any of them failed)."""
        t = self._tracked.get(request_id)
        if t is None:
            return
        done = t.life.state is State.ABANDONED
        self._act(t, t.life.fire(Event.LOAD_FAILED if failed else Event.LOAD_DONE))
        if failed:
            t.pulled = 0
        else:
            for entry in t.entries:
                self._ledger.mark(entry)
        t.entries = []
        if done:
            self._tracked.pop(request_id, None)

    def finished(self, request: Any) -> Tracked:
        """The request ended in whatever way; gives back what it held, unless the workers still read."""
        t = self.track(request)
        if t.life.state is State.NEW and t.hints.handoff and t.sources is None:
            # Aborted before it was ever scheduled: the other side must not wait for us.
            self._peers.drop(t.hints.handoff.address, t.hints.handoff.export)
        self._act(t, t.life.fire(Event.FINISH))
        if t.life.state is State.GONE:
            self._tracked.pop(request.request_id, None)
        return t

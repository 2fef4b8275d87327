"""Whom a request asks for KV, in which order, and what it takes of the answers.

The prefill that was promised to it; the node store; then, for what the store lacks, engines of this node that have it
in their GPU caches, engines that its params name, and the engine that last pulled this chain from us. What the store
has is held while others are asked for more. On the scheduler's thread only; ``Peers`` and ``HostTier`` do the waiting.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_kvtier.codecs import Codec
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler import orders
from vllm_kvtier.scheduler.ahead import Ahead
from vllm_kvtier.scheduler.exporting import alignment
from vllm_kvtier.scheduler.exports import GroupBlocks
from vllm_kvtier.scheduler.lifecycle import Action, Event
from vllm_kvtier.scheduler.nearby import Nearby
from vllm_kvtier.scheduler.offers import Address, Loan, NoOffer, Offer
from vllm_kvtier.scheduler.params import Handoff
from vllm_kvtier.scheduler.patience import Patience
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.scheduler.tier import HOST, HostAsk, HostOffer, HostTier, NotInMemory
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.scheduler.weighing import Scales
from vllm_kvtier.scheduler.whereabouts import Whereabouts
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.worker.work import LoadOrder

logger = get_logger("vllm.kvtier.matching")

# The store, and an engine of this node, answer in a fraction of a millisecond. When nobody else is being served,
# waiting for them that long holds nobody up and is shorter than the empty step that vLLM makes without an answer.
SHORT_PATIENCE = 3e-3  # seconds
# An engine of this node that does not answer in this time hangs; what it has the store may have too.
HOLDER_TIMEOUT = 0.5
# When others are, a request without an answer would wait for all of their step. They can spare this, and not more than
# such a share of the time, whatever happens. An engine that launches a step meanwhile answers in 1 to 3 ms
# (``benchmarks/asks.py``).
BUSY_PATIENCE = 3e-3
BUSY_SHARE = 0.01
MOST_SAVED = 20e-3  # seconds of it that may be saved up
LINGERS = 2  # times that one request may have that: for the store, and for a holder


def _whom(asking: Handoff | Holder | Address) -> str:
    """For the metrics: by the words of ``Tracked.source``."""
    if isinstance(asking, Holder):
        return "gpu"
    return "host" if asking is HOST else "handoff" if isinstance(asking, Handoff) else "retained"


class Asker:
    def __init__(
        self,
        config: KVTierConfig,
        peers: Peers,
        groups: list[tuple[int, int | None]],
        unit: int,
        my_address: Callable[[], Address],
        counters: Counters,
        resumes: bool,
        tier: HostTier | None,
        planner: Planner | None,
        scales: Scales,
        nearby: Nearby,
        cached: Callable[[list[bytes]], int] | None = None,
        hurries: bool = False,
    ):
        """As Matcher's. ``hurries``: whether a load among others may be of use as soon as it has ended."""
        self._config, self._peers, self._groups, self._unit = config, peers, groups, unit
        self._my_address, self._counters, self._resumes, self._tier = my_address, counters, resumes, tier
        self._align = alignment(groups, unit)
        self._scales, self._nearby, self._planner, self._hurries = scales, nearby, planner, hurries
        self._patience = Patience(config, tier, planner, counters, unit) if tier is not None else None
        self.whereabouts = Whereabouts(config.retain_seconds)
        self.ahead = None
        if tier is not None and cached is not None and resumes:
            self.ahead = Ahead(tier, unit, self._align, cached, self._worth_asking_ahead)
        self._spare, self._spared = MOST_SAVED, time.monotonic()  # that may be waited among others, and as of when
        self.aborted: list[str] = []  # requests whose loads the workers need not go on with

    def asks_nobody(self, t: Tracked) -> bool:
        return not self._resumes or t.request.skip_reading_prefix_cache

    # -- asking ------------------------------------------------------------------------------------------------------

    def ask_next(self, t: Tracked, computed: int, alone: bool) -> bool:
        """Ask the next source that could be worth it; False if none is left. ``alone``: no other request is here."""
        request = t.request
        if t.sources is None:
            t.sources, t.begun_at = deque(self._sources(t)), time.monotonic()
        # At least the last token is computed here, so it is not worth asking for less than the threshold before it.
        lacking = request.num_tokens - 1 - computed
        if request.skip_reading_prefix_cache:
            lacking = 0  # prompt log-probabilities need every token computed; vLLM asks all the same
        variant = vr.variant(request) if t.sources else b""
        left = lacking if t.held is None else request.num_tokens - 1 - t.held.tokens
        while t.sources:
            source = t.sources.popleft()
            if source is HOST:
                if self._ask_store(t, computed, lacking, variant, alone):
                    return True
                continue
            if isinstance(source, Holder):
                if lacking > 0 and self._ask_holder(t, source, computed, variant, alone):
                    return True
                continue
            if left < max(1, self._config.pull_threshold):
                self.missed(t, "below threshold" if left > 0 else "local hit")
                if isinstance(source, Handoff):
                    self._peers.drop(source.address, source.export)  # nobody else will come for it
                continue
            if self._ask_peer(t, source, computed, variant):
                return True
        if t.held is not None:
            t.offer, t.offered_at, t.held = t.held, time.monotonic(), None
            t.life.fire(Event.TAKE)
            return True
        return False

    def _ask_peer(self, t: Tracked, source: Handoff | Address, computed: int, variant: bytes) -> bool:
        request = t.request
        hashes = vr.chain(request, request.num_tokens, self._unit)
        host, port = self._my_address() if self._config.bidirectional else ("", 0)
        common = dict(start=computed, variant=variant, reply_host=host, reply_port=port)
        digest = b""
        if isinstance(source, Handoff):
            digest = vr.chain_digest(hashes, orders.tail_hash(t, request.num_tokens, self._unit))
            t.pending = self._peers.ask(
                source.address, export=source.export, digest=digest, chain=hashes[-1:], **common
            )
        elif len(hashes) * self._unit - computed >= self._config.pull_threshold:
            t.pending = self._peers.ask(source, chain=hashes, **common)
        else:
            return False
        t.asking, t.waits_since, t.asked_at = source, 0.0, time.monotonic()
        t.life.fire(Event.ASK)
        if isinstance(source, Handoff):
            self._take_promise(t, source, digest, computed)
        return True

    def _ask_holder(self, t: Tracked, holder: Holder, computed: int, variant: bytes, alone: bool) -> bool:
        mapped = self._nearby.suits(t, holder, computed, alone)
        if mapped is None or (self._tier is not None and t.epoch != self._tier.epoch):
            return False
        hashes = vr.chain(t.request, min(holder.tokens, t.request.num_tokens), self._unit)
        patience = self._nearby.patience(t, holder, computed)
        t.pending = self._peers.ask(
            holder.address, HOLDER_TIMEOUT + patience, near=holder.instance, chain=hashes, start=computed,
            variant=variant, lend=True, mapped=mapped, patience=patience,
        )  # fmt: skip
        t.asking, t.waits_since, t.asked_at = holder, 0.0, time.monotonic()
        t.life.fire(Event.ASK)
        self.linger(t, alone)
        return True

    def _ask_store(self, t: Tracked, computed: int, lacking: int, variant: bytes, alone: bool) -> bool:
        hashes = vr.chain(t.request, t.request.num_tokens, self._unit)
        t.asked_from, t.epoch = computed, self._tier.epoch
        if lacking <= 0 or len(hashes) * self._unit <= computed or computed % self._align:
            if hashes:
                self._tier.touch(hashes, variant)  # what the GPU has, the store should not forget
            t.missed = "less than a block"
            self.forget_ahead(t)
            return False
        ahead = self.ahead.take(t.request, hashes, computed) if self.ahead is not None else None
        if ahead is None and not alone and self._hopeless(t.request, computed, trial=True):
            self._tier.touch(hashes, variant)
            self.missed(t, "computed before an answer")
            return False
        t.pending = ahead or self._tier.ask(computed, hashes, variant, t.hints.stores)
        if t.pending is None:
            t.missed = "no store"
            return False
        t.asking, t.waits_since, t.asked_at = HOST, 0.0, time.monotonic()
        t.life.fire(Event.ASK)
        self.linger(t, alone)
        return True

    def _worth_asking_ahead(self, request: Any, start: int) -> bool:
        if request.num_tokens - 1 <= start or request.skip_reading_prefix_cache:
            return False
        return not self._hopeless(request, start, trial=False)

    def _hopeless(self, request: Any, start: int, trial: bool) -> bool:
        """Whether the prompt from ``start`` on is computed sooner than anything of it would come, among others."""
        if self._config.load_policy != "measured" or self._planner is None:
            return False
        least = 0.0 if self._hurries else self._planner.handover_seconds()
        return self._planner.hopeless(start, request.num_tokens - 1, request.num_tokens, trial, least)

    def let_go(self, t: Tracked) -> list[Callable[[], object]]:
        """What gives back all that was asked or offered for a request; see ``Matcher.let_go``."""
        held, offer, pending = t.held, t.offer, t.pending
        t.held = t.offer = t.pending = None
        steps = self.give_back_ahead(t.request.request_id)
        if isinstance(pending, HostAsk):
            steps.append(partial(self._tier.cancel, pending))
        elif pending is not None:  # its answer too, if that was taken
            steps.append(partial(self._peers.cancel, pending))
        for each in (held, offer):
            if isinstance(each, HostOffer):
                steps.append(partial(self._tier.release, each))
            elif each is not None and each.lease and (pending is None or pending.outcome is not each):
                steps.append(partial(self._peers.release, each, done=False))
        if t.hints.handoff is not None:
            steps.append(partial(self._peers.drop, t.hints.handoff.address, t.hints.handoff.export))
        return steps

    def give_back_ahead(self, request_id: str) -> list[Callable[[], object]]:
        return [partial(self.ahead.forget, request_id)] if self.ahead is not None else []

    def forget_ahead(self, t: Tracked) -> None:
        if self.ahead is not None:
            self.ahead.forget(t.request.request_id)

    def linger(self, t: Tracked, alone: bool) -> None:
        """Wait for an answer from this node, if that is soon to be expected."""
        if not isinstance(t.pending, HostAsk) and not isinstance(t.asking, Holder):
            return
        if alone:
            t.pending.wait(SHORT_PATIENCE)
            return
        now = time.monotonic()
        self._spare = min(MOST_SAVED, self._spare + BUSY_SHARE * (now - self._spared))
        self._spared = now
        if self._spare >= BUSY_PATIENCE and t.lingered < LINGERS:
            t.lingered += 1
            t.pending.wait(BUSY_PATIENCE)
            self._spare -= time.monotonic() - now

    def _wait_for_more(self, t: Tracked, outcome: HostOffer | NotInMemory) -> bool:
        """Ask the store again, and let it take its time, if what is on its way up there is worth that."""
        have = outcome.tokens if isinstance(outcome, HostOffer) else t.asked_from
        if outcome.further is not None and any(holder.tokens >= outcome.further.tokens for holder in outcome.holders):
            return False  # a GPU of this node has it already
        patience = self._patience.worth(t, have, outcome.further)
        if not patience:
            return False
        hashes = vr.chain(t.request, t.request.num_tokens, self._unit)
        again = self._tier.ask(t.asked_from, hashes, vr.variant(t.request), t.hints.stores, patience)
        if again is None:
            return False
        self.drop_held(t)
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

    # -- answers -----------------------------------------------------------------------------------------------------

    def answered(self, t: Tracked) -> bool:
        outcome = t.pending.outcome
        if outcome is None:
            # Peers answers every ask by its deadline; this is for the case that its thread died.
            if time.monotonic() < t.pending.deadline + 1.0:
                return False
            self.missed(t, "timeout")
            self.act(t, t.life.fire(Event.TIMEOUT))
        elif isinstance(outcome, HostOffer | NotInMemory) and self._wait_for_more(t, outcome):
            return False  # the store has been asked again
        elif isinstance(outcome, NoOffer):
            if isinstance(outcome, NotInMemory):
                t.sources.extendleft(reversed(outcome.holders))
            self.missed(t, outcome.code)
            logger.debug("kvtier: %s: %s", t.request.request_id, outcome.reason)
            t.life.fire(Event.REFUSE)
            t.pending = None
            if outcome.code in ("timeout", "not_ready", "unreachable"):
                self._give_up(t)  # computed here now: nobody else will come for it
        elif isinstance(outcome, HostOffer):
            if t.waits_since:
                self._patience.rewarded(t, outcome.tokens)
            self.drop_held(t)
            t.pending, t.held = None, outcome
            t.sources.extendleft(reversed(outcome.holders))
            t.life.fire(Event.HOLD)
        elif not self._scales.fits(t, outcome):
            self.missed(t, "malformed")
            t.life.fire(Event.REFUSE)
            t.pending = None
            self._peers.release(outcome, done=True)
        elif t.held is not None and not self._betters(t, outcome):
            self.missed(t, "the node store has as much")
            t.life.fire(Event.REFUSE)
            t.pending = None
            self._peers.release(outcome, done=False)
        else:
            self.drop_held(t)
            t.offer, t.offered_at = outcome, time.monotonic()
            t.life.fire(Event.GRANT)
        if not t.waits_since:  # else it was not the answer that took so long
            self._counters.observe("ask_seconds", _whom(t.asking), time.monotonic() - t.asked_at)
        elif not isinstance(outcome, HostOffer):  # it waited in vain
            self._counters.observe("waited_seconds", "", time.monotonic() - t.waits_since)
        return True

    def missed(self, t: Tracked, reason: str) -> None:
        """A source was not made use of."""
        t.missed = reason
        self._counters.count("declined", reason)

    def _betters(self, t: Tracked, offer: Offer) -> bool:
        """Whether it is to be taken in place of what the store offered."""
        if isinstance(offer, Loan):
            return self._nearby.better(t, offer, t.held)
        return offer.tokens >= t.held.tokens + max(1, self._config.pull_threshold)

    def drop_held(self, t: Tracked) -> None:
        if t.held is not None:
            self._tier.release(t.held)
            t.held = None

    def _give_up(self, t: Tracked) -> None:
        """Tell a prefill that was promised to us that we will not fetch it."""
        if isinstance(t.asking, Handoff):
            self._peers.drop(t.asking.address, t.asking.export)

    def decline(self, t: Tracked) -> None:
        if t.offer.place and t.offer.tokens > t.local:
            reason = "slower than computing"
        else:
            reason = "local hit" if t.offer.tokens <= t.local else "below threshold"
        self.missed(t, reason)
        self.act(t, t.life.fire(Event.DECLINE))

    def act(self, t: Tracked, action: Action, done: bool = True) -> None:
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
        elif action is Action.CANCEL_LOAD and isinstance(t.load, LoadOrder):  # a pull or a fetch cannot be stopped
            self.aborted.append(t.request.request_id)

"""Other nodes' stores as a source of KV for an engine that has no node store of its own.

It has the part of ``HostTier``'s face that the matcher uses, and stands in its place: lookups, leases and what is made
of answers. Asking is what a store's mover does too (``store.lower.nodes``), here on the engine's reactor. Nothing is
written anywhere. The workers read the slots that were lent themselves (``worker.far``), straight into their device.
"""

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvtier.codecs import Codec
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.offers import NoOffer
from vllm_kvtier.scheduler.slots import SlotPlan, Spaces, full_bytes, offered_bytes, plan_slots
from vllm_kvtier.scheduler.tier import HOST, Further, HostAsk, HostOffer, NotInMemory, packed
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.asking import ASK_SECONDS, Answer, Asking
from vllm_kvtier.store.lower.nodes.options import NodeOptions
from vllm_kvtier.store.lower.nodes.peers import Peer, Peers
from vllm_kvtier.store.lower.nodes.wrong import WrongBlocks
from vllm_kvtier.store.messages import HASH, MAX_UNITS
from vllm_kvtier.store.pending import Pending
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.vllm_compat.worker import wants_host_buffer
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.work import FarSource

logger = get_logger("vllm.kvtier.far")

BANDWIDTH = 6e9  # bytes a second: a network of 50 Gbit/s
# Seconds that a request waits for a better answer than the first: a store that is well answers in some hundred us.
BETTER = 0.02
# Seconds in which a store brings up what it has below its memory, before any did; and what the latest counts.
FIRST_RISE, WEIGHT = 0.05, 0.2


def is_far(config: KVTierConfig) -> bool:
    """Whether the engine asks other nodes' stores itself."""
    return config.store == "off" and bool(config.store_nodes)


def tier_bandwidth(config: KVTierConfig, facts: EngineFacts) -> float:
    """Bytes a second of a rank's loads, before any was measured."""
    return min(facts.link_bandwidth, BANDWIDTH) if is_far(config) else facts.link_bandwidth


@dataclass(frozen=True)
class FarOffer(HostOffer):
    """``lease``: our own number for what is held there; ``source``: whose memory the slots are in."""

    tier: "FarTier | None" = None
    source: FarSource | None = None

    def begin(self) -> FarSource | None:
        self.tier.begin(self)
        return self.source


@dataclass(frozen=True)
class Answered:
    """What the nodes said. ``lease``: ours, 0: nobody has anything in memory."""

    lease: int
    offer: w.Offer | None
    source: FarSource | None
    below: int  # units that one of them might have below it


class FarAsk(HostAsk):
    """``asked``: in the nodes' words."""

    def __init__(self, tier: "FarTier", pending: Pending, start: int, most: int, patience: float, asked: w.Ask):
        super().__init__(tier, pending, start, most, "", patience)
        self.asked = asked


@dataclass(slots=True)
class Loan:
    peer: Peer
    lease: int  # the peer's
    reading: bool = False


class FarTier:
    """``tell`` speaks to all workers. Raises ConfigError, in words, for options that cannot be meant or would speak to
    others without a key."""

    sharing = None  # it knows nothing of other engines' caches
    instance = ""  # of a node store: there is none

    def __init__(
        self,
        config: KVTierConfig,
        facts: EngineFacts,
        unit: int,
        reactor: Reactor,
        tell: Callable[[m.FarSetup], None],
    ):
        self._config, self._facts, self._unit, self._reactor, self._tell = config, facts, unit, reactor, tell
        options = NodeOptions.parse({"nodes": config.store_nodes, "cluster_key_file": config.cluster_key_file or ""})
        self._peers = Peers(reactor, uuid.uuid4().hex, options, self._gone, logger)
        self._asking = Asking(reactor, self._peers, options.nodes, BETTER)
        self._plan: SlotPlan | None = None
        self._spaces, self._wrong = Spaces(), WrongBlocks()
        self._able: set[int] = set()  # ranks
        self._leases = itertools.count(1)
        self._loans: dict[int, Loan] = {}
        self._rise = FIRST_RISE

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def open(
        self, namespace: m.Namespace, described: dict[int, m.Described], codec: str | dict[str, str] = Codec.RAW
    ) -> None:
        """All ranks are known: lay out the slots, as the engines that fill them do. ``codec``: the option's value as
        ``choice.resolve`` returned it. Raises ValueError for blocks that fit no slot."""
        plan = plan_slots(namespace, described, codec, self._facts.groups, self._unit, self._facts.release)
        pages, names = [shape.slot_pages for shape in plan.shapes], [codec.name for codec in plan.codecs]
        host = wants_host_buffer(self._config.host_buffer, self._facts.config, torch.device("cuda"))
        self._tell(m.FarSetup(plan.offsets, pages, names, host))
        self._plan, self._spaces.base = plan, plan.base

    def reached(self, message: m.PoolReady) -> None:
        """A rank can read from other nodes, or cannot any more."""
        (self._able.add if message.nbytes else self._able.discard)(message.rank)

    def lost(self, message: m.FarLost) -> None:
        """Talking to it is not enough: its memory cannot be read."""
        peer = self._peers.find(message.instance)
        if peer is not None:
            self._peers.close(peer, message.reason)

    def _ask(self, ask: w.Ask, nodes: tuple[str, ...], patience: float, pending: Pending) -> None:
        began = time.monotonic()

        def decided(answer: Answer) -> None:
            if patience:
                self._rise += WEIGHT * (time.monotonic() - began - self._rise)
            pending.resolve(self._answered(answer))

        self._asking.ask(ask, nodes, decided, patience)

    def _answered(self, answer: Answer) -> Answered:
        peer, offer = answer.peer, answer.offer
        if peer is None:
            return Answered(0, None, None, answer.below)
        lease = next(self._leases)
        self._loans[lease] = Loan(peer, offer.lease)
        source = FarSource(peer.welcome.instance, peer.agent, peer.base, peer.metadata, peer.generation)
        return Answered(lease, offer, source, answer.below)

    def _begin(self, lease: int) -> None:
        loan = self._loans.get(lease)
        if loan is not None and not loan.reading:
            loan.reading = True
            self._peers.begin_read(loan.peer)

    def _give_back(self, lease: int) -> None:
        loan = self._loans.pop(lease, None)
        if loan is None:
            return
        if loan.reading:
            self._peers.end_read(loan.peer)
            self._peers.reached(loan.peer)
        self._peers.release(loan.peer, loan.lease)

    def _gone(self, peer: Peer, reason: str) -> None:
        self._loans = {lease: loan for lease, loan in self._loans.items() if loan.peer is not peer}

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        return self._plan is not None

    @property
    def codecs(self) -> list[Codec]:
        return self._plan.codecs if self._plan is not None else []

    @property
    def epoch(self) -> int:
        return self._spaces.epoch

    def limit(self) -> int:
        """0: some rank cannot read from other nodes."""
        return int(self.opened and len(self._able) == self._facts.world_size)

    def space(self, variant: bytes) -> bytes:
        """``variant``: LoRA adapter fingerprint."""
        return self._spaces.of(variant)

    def renew(self) -> None:
        """What others have stored is this engine's no longer: its weights may have changed in place."""
        self._spaces.renew()

    def touch(self, chain: list[bytes], variant: bytes) -> None:
        """What others forget is theirs to know."""

    def warm(self, chain: list[bytes], variant: bytes, nodes: tuple[str, ...] = ()) -> bool:
        """Nothing is brought nearer for a request that comes later: there is no memory here to keep it in."""
        return False

    def pin(self, chain: list[bytes], pinned: bool) -> None:
        return None

    def inspect(self, chain: list[bytes]) -> None:
        return None

    def explain(self, chain: list[bytes], variant: bytes) -> None:
        return None

    problem = "it has no store of its own: it reads other nodes' stores, which are not asked here"

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def ask(
        self,
        start: int,
        chain: list[bytes],
        variant: bytes,
        nodes: tuple[str, ...] = (),
        patience: float = 0.0,
    ) -> FarAsk | None:
        """What other nodes' stores have of ``chain`` from token ``start`` on; None where nobody can be asked.

        ``nodes``: those that the request names, beside the listed ones. ``patience``: seconds that one may take for
        what it has below its memory.
        """
        if not self.limit() or start >= MAX_UNITS * self._unit:
            return None
        patience = min(patience, w.MAX_PATIENCE)
        ask = w.Ask(0, self.space(variant), self._unit, self._plan.shapes, packed(chain), start // self._unit)
        pending = Pending(0, time.monotonic() + patience + 2 * ASK_SECONDS)
        self._reactor.call_soon(lambda: self._ask(ask, nodes, patience, pending))
        return FarAsk(self, pending, start, len(chain) * self._unit, patience, ask)

    def offer(self, ask: FarAsk, pending: Pending, instance: str) -> HostOffer | NoOffer:
        """The answer as an offer; ``Peers`` has checked that its slots are where and as many as they have to be."""
        answered: Answered = pending.outcome
        have = answered.offer.units if answered.lease else ask.start // self._unit
        further = None
        if answered.below > have:
            further = Further(have * self._unit, 0.0, self._rise)
        if not answered.lease:
            return NotInMemory("not stored", "", further)
        asked, shapes = ask.asked, self._plan.shapes
        units = self._wrong.good_units(asked.space, asked.chain, shapes, asked.start, have)
        tokens = units * self._unit
        if units < have:
            further = None
        if tokens <= ask.start or ask.epoch != self.epoch:
            self._return(answered.lease)
            return NoOffer("not stored", "")
        counts = [(units - asked.start) // shape.units for shape in shapes]
        slots = [row[:count] for row, count in zip(answered.offer.slots, counts, strict=True)]
        nbytes, logical = offered_bytes(slots, self._plan.part_bytes, self._plan.logical)
        return FarOffer(
            HOST,
            answered.source.instance,
            answered.lease,
            ask.start,
            tokens,
            slots,
            [],
            session=answered.lease,
            nbytes=nbytes,
            logical=logical,
            epoch=ask.epoch,
            further=further,
            tier=self,
            source=answered.source,
        )

    def begin(self, offer: FarOffer) -> None:
        """The workers are about to read it: the store there may have to help."""
        self._reactor.call_soon(lambda: self._begin(offer.lease))

    def release(self, offer: FarOffer) -> None:
        self._return(offer.lease)

    def cancel(self, ask: FarAsk) -> None:
        """A lease that still comes goes back at once."""
        ask._pending.then(lambda p: self._return(p.outcome.lease) if p.outcome.lease else None)

    def _return(self, lease: int) -> None:
        self._reactor.call_soon(lambda: self._give_back(lease))

    def discard(self, variant: bytes, group: int, block_hash: bytes, slot: int, session: int) -> None:
        """It came with a wrong checksum, under the lease ``session``. Where that has ended meanwhile, something else
        may have been put in its place, and nobody knows that it is wrong there."""
        if session in self._loans:
            self._wrong.add(self.space(variant), group, block_hash[:HASH])

    def load_bytes(self, tokens: int) -> int:
        """What one rank loads for so many tokens, as far as they are in full attention."""
        return full_bytes(self._facts.groups, self._plan.part_bytes, tokens)

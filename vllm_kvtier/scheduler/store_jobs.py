"""Blocks that the store was asked about, until they are stored or given back: answers, orders to the workers, commits.

The offloader (``offloading``, scheduler's thread) collects blocks, pins them and asks; what becomes of them it finds in
``returned``. All but the first section runs on the reactor's thread.
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.codecs import choice
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.events import Events, Raw
from vllm_kvtier.scheduler.tables import Table
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.store.client import Pending
from vllm_kvtier.store.messages import EXISTS, NO_PARENT_STORED, NO_ROOM, Reserved
from vllm_kvtier.telemetry.events import Label
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger("vllm.kvtier.offloading")

# What becomes of a block. After the last three it is offered again however often that happens, after those before
# ``offloading.REWINDS`` times: there may be too little memory for it, or a fault.
STORED, STORED_ALREADY, NO_BEGINNING, TOO_SLOW = "", "stored already", "beginning not stored", "copies too slow"
MALFORMED = "malformed answer"
FAULT = "internal error"
NO_STORE, FOR_REQUESTS, TOO_MANY = "no store", "room for requests", "too many copies under way"
_REFUSALS = {EXISTS: STORED_ALREADY, NO_ROOM: "store full", NO_PARENT_STORED: NO_BEGINNING}


@dataclass(eq=False, slots=True)
class Item:
    """One block on its way to the store."""

    table: Table  # of the request that offered it
    group: int
    index: int  # in the request's block table
    block: int
    key: int
    space: bytes
    hash: bytes
    parent: bytes
    begun: int  # of its table when it was collected
    label: Label | None = None  # that it should have in the store
    slot: int = 0
    after: "Item | None" = None  # its parent, where that was on its way as well when this one got its slot
    same: "list[Item] | None" = None  # the same content, from other requests: what becomes of this one is theirs
    lost: bool = False  # it was not copied, or its parent was not

    @property
    def name(self) -> tuple[bytes, int, bytes]:
        return self.space, self.group, self.hash


@dataclass
class Batch:
    """Blocks of one space and tenant, collected in steps up to ``step``."""

    space: bytes
    tenant: bytes
    since: int  # step of the first
    step: int = -1  # step that fills the last
    prompts: bool = False  # blocks of prompts are among them
    items: list[Item] = field(default_factory=list)
    raws: list[Raw] = field(default_factory=list)  # of labels, where events are published


@dataclass(eq=False)
class Flight:
    """One order the workers copy."""

    order: int
    group: int
    items: list[Item]
    session: int
    waiting: set[int]  # ranks
    kept: int  # so many of the first were copied, by the ranks that are through with it
    stop: int  # the workers were asked to copy no more than so many
    why: str = TOO_SLOW  # it was cut short, if it was


class StoreJobs:
    def __init__(
        self,
        tier: HostTier,
        groups: list[tuple[int, int | None]],
        counters: Counters,
        reactor: Reactor,
        tell: Callable[[m.StoreBlocks | m.CancelStores], None],
        on_free: Callable[[], None],
    ):
        """``tell`` is to all workers; ``on_free`` hears (reactor's thread) that blocks wait in ``returned``."""
        self._tier, self._groups, self._counters, self._reactor = tier, groups, counters, reactor
        self._tell, self._on_free = tell, on_free
        self._orders = itertools.count(1)
        self._flights: dict[int, Flight] = {}  # changed on the reactor's thread, under the lock of ``_quiet``
        self._queues: list[deque[Flight]] = [deque() for _ in groups]  # by group, in order; reactor's thread
        self._flying: dict[tuple[bytes, int, bytes], Item] = {}  # that have a slot; reactor's thread
        # Items that were lost, and how many reservations had been sent then: until all of these are answered, one of
        # them may still be answered with a slot behind such an item.
        self._gaps: deque[tuple[int, list[Item]]] = deque()
        self._sent = self._answered = 0  # reservations
        self.returned: deque[tuple[list[Item], str]] = deque()  # to be unpinned, and what became of them
        self._quiet = threading.Condition()

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def asked(self) -> None:
        """Call before a reservation is sent: what is lost meanwhile has to wait for its answer, see ``_gaps``."""
        with self._quiet:
            self._sent += 1

    def cut_flights(self, short: int, held_once: Callable[[list[int]], int]) -> None:
        """Ask the workers to leave out the ends of the newest orders, as far as no request uses their blocks, until so
        many are freed."""
        stops = []
        with self._quiet:
            for order, flight in reversed(self._flights.items()):
                if short <= 0:
                    break
                alone = []
                for i in range(len(flight.items) - 1, -1, -1):
                    if len(alone) == short:
                        break
                    if held_once([flight.items[i].block]):
                        alone.append(i)
                short -= len(alone)
                if alone and alone[-1] < flight.stop:
                    flight.stop, flight.why = alone[-1], FOR_REQUESTS
                    stops.append((order, flight.stop))
        if stops:
            self._reactor.call_soon(lambda: self._tell(m.CancelStores(stops)))

    def wait_quiet(self, seconds: float) -> None:
        """Until all that was asked is answered and no copy is under way, at most ``seconds``."""
        with self._quiet:
            self._quiet.wait_for(lambda: self._sent == self._answered and not self._flights, seconds)

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _attempt(self, part: Callable[..., object], *args: Any) -> bool:
        """Whether ``part`` went well. Nothing here may keep blocks from being unpinned."""
        try:
            part(*args)
        except Exception:
            logger.exception("kvtier: storing blocks failed in part; they are offered again")
            return False
        return True

    def reserved(
        self, batch: Batch, items: list[Item], pending: Pending, instance: str, events: Events | None
    ) -> None:
        """The store's answer for blocks of ``batch``; ``events`` hears of labels that it may have lost."""
        reserved = pending.outcome
        slots = reserved.slots if isinstance(reserved, Reserved) else []
        refused: defaultdict[str, list[Item]] = defaultdict(list)
        granted: list[list[Item]] = [[] for _ in self._groups]
        if not isinstance(reserved, Reserved) or pending.session != self._tier.session:
            refused[NO_STORE] = items
        elif len(slots) != len(items):
            refused[MALFORMED] = items
        else:
            for item, slot in zip(items, slots, strict=True):
                if slot == EXISTS and (same := self._flying.get(item.name)) is not None:
                    if same.lost:
                        refused[FOR_REQUESTS].append(item)
                    else:
                        same.same = [*(same.same or ()), item]
                    continue
                if slot <= 0:
                    refused[_REFUSALS.get(slot, MALFORMED)].append(item)
                    continue
                item.slot = slot
                if self._groups[item.group][1] is None:
                    item.after = self._flying.get((item.space, item.group, item.parent))
                self._flying[item.name] = item
                granted[item.group].append(item)
        for some in granted:
            if some:
                self._begin(batch.step, some, pending.session, instance)
        self.returned.extend((some, why) for why, some in refused.items())
        self.count_answer()
        self._land_all()
        if self.returned:
            self._on_free()
        if events is not None:
            labels = [(item.group, item.label) for some in granted for item in some if item.label is not None]
            events.tell_again(batch.space, labels)

    def count_answer(self) -> None:
        with self._quiet:
            self._answered += 1
            self._quiet.notify_all()
        self._close_gaps()

    def _begin(self, step: int, items: list[Item], session: int, instance: str) -> None:
        order, group = next(self._orders), items[0].group
        flight = Flight(order, group, items, session, set(self._tier.writers[group]), len(items), len(items))
        with self._quiet:
            self._flights[order] = flight
        self._queues[group].append(flight)
        if not self._attempt(self._order, flight, step, instance):  # no worker has heard of it
            flight.waiting.clear()
            flight.kept, flight.why = 0, FAULT

    def _order(self, flight: Flight, step: int, instance: str) -> None:
        items = flight.items
        self._tell(
            m.StoreBlocks(
                flight.order,
                instance,
                flight.group,
                step,
                np.array([item.block for item in items], np.int64).tobytes(),
                np.array([item.key for item in items], np.uint64).tobytes(),
                np.array([item.slot for item in items], np.int64).tobytes(),
            )
        )

    def stored(self, message: m.Stored) -> None:
        """A rank is through with orders."""
        for order, kept in [*((order, None) for order in message.done), *message.cut]:
            flight = self._flights.get(order)
            if flight is not None:
                flight.waiting.discard(message.rank)
                flight.kept = flight.kept if kept is None else min(flight.kept, kept)
        self._land_all()
        if self.returned:
            self._on_free()
        if message.nbytes:
            self._counters.count("stored_bytes", choice.names(self._tier.codecs), message.nbytes)
            self._counters.count("store_seconds", amount=message.seconds)

    def _land_all(self) -> None:
        for queue in self._queues:
            while queue and not queue[0].waiting:
                self._land(queue.popleft())

    def _land(self, flight: Flight) -> None:
        """All ranks are through with it, and with those of its group before."""
        if flight.session != self._tier.session:
            flight.kept, flight.why = 0, NO_STORE  # the connection ended, and its reservations with it
        kept, lost, same = [], [], ([], [])
        for i, item in enumerate(flight.items):
            item.lost = i >= flight.kept or (item.after is not None and item.after.lost)
            item.after = None  # or each would keep all before it
            (lost if item.lost else kept).append(item)
            same[item.lost].extend(item.same or ())
        if kept and not self._attempt(self._tier.commit, [item.slot for item in kept], flight.session):
            flight.kept, flight.why = 0, FAULT
            self._land(flight)
            return
        if kept:
            self._forget(kept)
            self.returned += [(kept, STORED), (same[False], STORED_ALREADY)]
        if lost:
            slots = [item.slot for item in lost]
            if not self._attempt(self._tier.abort, slots, flight.session):
                self._attempt(self._tier.abort, slots, flight.session)  # or the store takes them back itself, but late
            self._gaps.append((self._sent, lost))  # behind the message: none of those sent later comes before it
            self._close_gaps()
            self.returned.append((lost + same[True], flight.why))
        with self._quiet:  # behind what it returned
            del self._flights[flight.order]
            self._quiet.notify_all()
        if kept:
            self._attempt(self._count_stored, flight.group, len(kept))

    def _count_stored(self, group: int, blocks: int) -> None:
        self._counters.count("stored_blocks", amount=blocks)
        logical = blocks * self._tier.logical[group]
        self._counters.count("stored_logical_bytes", self._tier.codecs[group].name, logical)

    def _close_gaps(self) -> None:
        while self._gaps and self._gaps[0][0] <= self._answered:
            self._forget(self._gaps.popleft()[1])

    def _forget(self, items: list[Item]) -> None:
        for item in items:
            if self._flying.get(item.name) is item:  # on another connection it may have got another slot
                del self._flying[item.name]

    def lost(self) -> None:
        """The store went away, and our reservations with it."""
        self.cancel(NO_STORE)

    def cancel(self, why: str) -> None:
        if self._flights:
            for flight in self._flights.values():
                flight.stop, flight.why = 0, why
            self._tell(m.CancelStores([(order, 0) for order in reversed(self._flights)]))

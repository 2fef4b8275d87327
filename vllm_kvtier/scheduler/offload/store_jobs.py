"""Blocks that are reserved in the store, until they are stored or freed: answers, jobs for the workers, commits.

The offloader (``scheduler.offload.offloader``, scheduler's thread) collects blocks, pins them and reserves them;
``returned`` says how each ended. All but the first section runs on the reactor's thread.
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.codecs import choice
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.offload.block_tables import Table
from vllm_kvtier.scheduler.offload.kv_events import Events, Raw
from vllm_kvtier.scheduler.sources.node_store import NodeStore
from vllm_kvtier.store.client import Pending
from vllm_kvtier.store.protocol import EXISTS, HASH_BYTES, MAX_ITEMS, NO_PARENT_STORED, NO_ROOM, Reserved
from vllm_kvtier.telemetry.events import Label
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

# How a block ended. After the last three it is offered again without limit; after those before ``MAX_REWINDS`` times
# (``scheduler.offload.offloader``), because there may be too little memory, or a fault.
STORED, STORED_ALREADY, PARENT_NOT_STORED, COPY_DROPPED = "", "already_stored", "parent_not_stored", "copy_dropped"
MALFORMED = "malformed_answer"
INTERNAL_ERROR = "internal_error"
STORE_UNAVAILABLE, BLOCKS_NEEDED, INFLIGHT_LIMIT = "store_unavailable", "blocks_needed", "inflight_limit"
# Seconds after which blocks that a step collected are reserved: when its forward has been launched, mostly, and vLLM
# waits for the device; and those of the last requests: when their output has been sent. Before, the threads that handle
# the messages would take the interpreter from vLLM's.
RESERVE_WITHIN = 4e-3, 1e-3
_REFUSALS = {EXISTS: STORED_ALREADY, NO_ROOM: "store_full", NO_PARENT_STORED: PARENT_NOT_STORED}


@dataclass(eq=False, slots=True)
class Item:
    """One block on its way to the store."""

    table: Table  # of the request that offered it
    group: int
    index: int  # in the request's block table
    block: int
    key: int
    namespace_id: bytes
    hash: bytes
    parent: bytes
    begun: int  # of its table when it was collected
    label: Label | None = None  # that it should have in the store
    slot: int = 0
    after: "Item | None" = None  # its parent, if that was on its way when this one got its slot
    same: "list[Item] | None" = None  # the same content, from other requests: they end as this one
    lost: bool = False  # it was not copied, or its parent was not

    @property
    def name(self) -> tuple[bytes, int, bytes]:
        return self.namespace_id, self.group, self.hash


class Run(NamedTuple):
    """Blocks of one request and group, as they were collected: one object for many, because collecting takes the
    scheduler's thread."""

    table: Table
    group: int
    indices: Sequence[int]  # in the request's block table
    blocks: Sequence[int]
    hashes: Sequence[bytes]
    parents: Sequence[bytes]  # of each; of the first alone, if each is the parent of the next
    begun: int


@dataclass
class Batch:
    """Blocks of one namespace and tenant, collected in steps up to ``step``: ``runs``, and ``items`` made of earlier
    ones."""

    namespace_id: bytes
    tenant: bytes
    since: int  # step of the first
    keys: Callable[[Sequence[bytes], int], list[int]]  # content keys of hashes, of a group
    step: int = -1  # step that fills the last
    soon: bool = False  # blocks of prompts or of ended requests are among them
    count: int = 0  # blocks
    runs: list[Run] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    raws: list[Raw] = field(default_factory=list)  # of labels, where events are published

    def make_items(self) -> list[Item]:
        """Of all runs so far; returns the new ones."""
        made: list[Item] = []
        hashes_of: defaultdict[int, list[bytes]] = defaultdict(list)
        for run in self.runs:
            hashes_of[run.group] += run.hashes
        keys, name = {g: iter(self.keys(hashes, g)) for g, hashes in hashes_of.items()}, self.namespace_id
        for table, g, indices, blocks, hashes, parents, begun in self.runs:
            before = parents if len(parents) == len(hashes) else [*parents, *hashes[:-1]]
            for i, block, h, parent in zip(indices, blocks, hashes, before, strict=True):
                made.append(Item(table, g, i, block, next(keys[g]), name, h[:HASH_BYTES], parent[:HASH_BYTES], begun))
        self.runs = []
        self.items += made
        return made


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
    why: str = COPY_DROPPED  # it was cut short, if it was


class StoreJobs:
    def __init__(
        self,
        store: NodeStore,
        groups: Sequence[CacheGroup],
        counters: Counters,
        reactor: Reactor,
        send: Callable[[m.StoreBlocks | m.CancelStores], None],
        on_free: Callable[[], None],
    ):
        """``send``: to all workers. ``on_free`` is called (reactor's thread) when blocks wait in ``returned``."""
        self._store, self._groups, self._counters, self._reactor = store, groups, counters, reactor
        self._send, self._on_free = send, on_free
        self._orders = itertools.count(1)
        self._flights: dict[int, Flight] = {}  # changed on the reactor's thread, under the lock of ``_quiet``
        self._queues: list[deque[Flight]] = [deque() for _ in groups]  # by group, in order; reactor's thread
        self._flying: dict[tuple[bytes, int, bytes], Item] = {}  # that have a slot; reactor's thread
        # Lost items, and the number of reservations sent by then: any of these may be answered with a slot behind such
        # an item.
        self._gaps: deque[tuple[int, list[Item]]] = deque()
        self._sent = self._answered = 0  # reservations
        self.returned: deque[tuple[list[Item], str]] = deque()  # to be unpinned, and how they ended
        self._quiet = threading.Condition()

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def ask(self, batch: Batch, events: Events | None, idle: bool) -> None:
        """Have the reactor's thread reserve the blocks of ``batch``, which is that thread's own from now on. ``events``
        sends labels again that the store may have lost. ``idle``: no step is launched."""
        reserve = partial(self._reserve_all, batch, events)
        with self._quiet:
            self._sent += -(-batch.count // MAX_ITEMS)
        self._reactor.call_within(RESERVE_WITHIN[idle], reserve)

    def cut_flights(self, short: int, held_once: Callable[[list[int]], int]) -> None:
        """Have the workers skip the ends of the newest jobs, as far as no request uses their blocks, to free ``short``
        blocks."""
        stops = []
        with self._quiet:
            for order, flight in reversed(self._flights.items()):
                if short <= 0:
                    break
                alone: list[int] = []
                for i in range(len(flight.items) - 1, -1, -1):
                    if len(alone) == short:
                        break
                    if held_once([flight.items[i].block]):
                        alone.append(i)
                short -= len(alone)
                if alone and alone[-1] < flight.stop:
                    flight.stop, flight.why = alone[-1], BLOCKS_NEEDED
                    stops.append((order, flight.stop))
        if stops:
            self._reactor.call_soon(lambda: self._send(m.CancelStores(stops)))

    def wait_quiet(self, seconds: float) -> None:
        """Wait until all reservations are answered and no copy is under way, at most ``seconds``."""
        with self._quiet:
            self._quiet.wait_for(lambda: self._sent == self._answered and not self._flights, seconds)

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _attempt(self, part: Callable[..., object], *args: Any) -> bool:
        """Whether ``part`` did not raise. No exception may keep blocks pinned."""
        try:
            part(*args)
        except Exception:
            logger.exception("kvtier: storing blocks failed in part; they are offered again")
            return False
        return True

    def _reserve_all(self, batch: Batch, events: Events | None) -> None:
        made = self._attempt(batch.make_items)
        if not made:  # without names: only to be unpinned, and offered again
            for run in batch.runs:
                pairs, name = zip(run.indices, run.blocks, strict=True), batch.namespace_id
                batch.items += [Item(run.table, run.group, i, b, 0, name, b"", b"", run.begun) for i, b in pairs]
        for at in range(0, len(batch.items), MAX_ITEMS):
            items = batch.items[at : at + MAX_ITEMS]
            if made:
                self._reserve(batch, items, events)
            else:
                self._refuse(items)

    def _refuse(self, items: list[Item]) -> None:
        self.returned.append((items, INTERNAL_ERROR))
        self._count_answer()
        self._on_free()

    def _reserve(self, batch: Batch, items: list[Item], events: Events | None) -> None:
        instance = self._store.instance
        groups, hashes = [item.group for item in items], b"".join([item.hash for item in items])
        parents = b"".join([item.parent for item in items])
        try:
            pending = self._store.reserve(batch.namespace_id, batch.tenant, groups, hashes, parents)
        except Exception:
            logger.exception("kvtier: blocks could not be reserved in the store; they are offered again")
            self._refuse(items)
            return
        pending.then(lambda answer: self.reserved(batch, items, answer, instance, events))

    def reserved(self, batch: Batch, items: list[Item], pending: Pending, instance: str, events: Events | None) -> None:
        """The store's answer for blocks of ``batch``; ``events`` sends labels again that it may have lost."""
        reserved = pending.outcome
        slots = reserved.slots if isinstance(reserved, Reserved) else []
        refused: defaultdict[str, list[Item]] = defaultdict(list)
        granted: list[list[Item]] = [[] for _ in self._groups]
        if not isinstance(reserved, Reserved) or pending.session != self._store.session:
            refused[STORE_UNAVAILABLE] = items
        elif len(slots) != len(items):
            refused[MALFORMED] = items
        else:
            for item, slot in zip(items, slots, strict=True):
                if slot == EXISTS and (same := self._flying.get(item.name)) is not None:
                    if same.lost:
                        refused[BLOCKS_NEEDED].append(item)
                    else:
                        same.same = [*(same.same or ()), item]
                    continue
                if slot <= 0:
                    refused[_REFUSALS.get(slot, MALFORMED)].append(item)
                    continue
                item.slot = slot
                if self._groups[item.group].kind.whole_prefix:
                    item.after = self._flying.get((item.namespace_id, item.group, item.parent))
                self._flying[item.name] = item
                granted[item.group].append(item)
        for some in granted:
            if some:
                for part, ranks in self._store.by_writers(some):
                    self._begin(batch.step, part, ranks, pending.session, instance)
        self.returned.extend((some, why) for why, some in refused.items())
        self._count_answer()
        self._land_all()
        if self.returned:
            self._on_free()
        if events is not None:
            labels = [(item.group, item.label) for some in granted for item in some if item.label is not None]
            events.send_labels_again(batch.namespace_id, labels)

    def _count_answer(self) -> None:
        with self._quiet:
            self._answered += 1
            self._quiet.notify_all()
        self._close_gaps()

    def _begin(self, step: int, items: list[Item], ranks: set[int], session: int, instance: str) -> None:
        order, group = next(self._orders), items[0].group
        flight = Flight(order, group, items, session, ranks, len(items), len(items))
        with self._quiet:
            self._flights[order] = flight
        self._queues[group].append(flight)
        if not self._attempt(self._order, flight, step, instance):  # no worker has it
            flight.waiting.clear()
            flight.kept, flight.why = 0, INTERNAL_ERROR

    def _order(self, flight: Flight, step: int, instance: str) -> None:
        items = flight.items
        self._send(
            m.StoreBlocks(
                flight.order,
                instance,
                flight.group,
                step,
                np.array([item.block for item in items], np.int64).tobytes(),
                np.array([item.key for item in items], np.uint64).tobytes(),
                self._store.slot_array([item.slot for item in items]).tobytes(),
            )
        )

    def stored(self, message: m.Stored) -> None:
        """A rank ended jobs."""
        for order, kept in [*((order, None) for order in message.done), *message.cut]:
            flight = self._flights.get(order)
            if flight is not None and message.rank in flight.waiting:
                flight.waiting.discard(message.rank)
                flight.kept = flight.kept if kept is None else min(flight.kept, kept)
        self._land_all()
        if self.returned:
            self._on_free()
        if message.nbytes:
            self._counters.count("stored_bytes", choice.names(self._store.codecs), message.nbytes)
            # The ranks copy side by side: the mean of those that write.
            self._counters.count("store_seconds", amount=message.seconds / len(set().union(*self._store.writers)))

    def _land_all(self) -> None:
        for queue in self._queues:
            while queue and not queue[0].waiting:
                self._land(queue.popleft())

    def _land(self, flight: Flight) -> None:
        """All ranks ended the job, and those of its group before it."""
        if flight.session != self._store.session:
            flight.kept, flight.why = 0, STORE_UNAVAILABLE  # the connection ended, and its reservations with it
        kept: list[Item] = []
        lost: list[Item] = []
        same: tuple[list[Item], list[Item]] = ([], [])
        for i, item in enumerate(flight.items):
            item.lost = i >= flight.kept or (item.after is not None and item.after.lost)
            item.after = None  # or each would keep all before it
            (lost if item.lost else kept).append(item)
            same[item.lost].extend(item.same or ())
        if kept and not self._attempt(self._store.commit, [item.slot for item in kept], flight.session):
            flight.kept, flight.why = 0, INTERNAL_ERROR
            self._land(flight)
            return
        if kept:
            self._remove(kept)
            self.returned += [(kept, STORED), (same[False], STORED_ALREADY)]
        if lost:
            slots = [item.slot for item in lost]
            if not self._attempt(self._store.abort, slots, flight.session):
                self._attempt(self._store.abort, slots, flight.session)  # or the store frees them itself, but late
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
        logical = blocks * self._store.logical[group]
        self._counters.count("stored_logical_bytes", self._store.codecs[group].name, logical)

    def _close_gaps(self) -> None:
        while self._gaps and self._gaps[0][0] <= self._answered:
            self._remove(self._gaps.popleft()[1])

    def _remove(self, items: list[Item]) -> None:
        for item in items:
            name = item.name
            if self._flying.get(name) is item:  # on another connection it may have got another slot
                del self._flying[name]

    def lost(self) -> None:
        """The store disconnected, and our reservations ended."""
        self.cancel(STORE_UNAVAILABLE)

    def cancel(self, why: str) -> None:
        if self._flights:
            for flight in self._flights.values():
                flight.stop, flight.why = 0, why
            self._send(m.CancelStores([(order, 0) for order in reversed(self._flights)]))

"""Offloading: full blocks go to the node store as requests fill them.

A block's way: *collected* in the step that fills it and pinned at once, so that nothing else gets its memory;
*reserved*, when the store says which of the collected it lacks; *copying*, ordered from the workers behind the
forward that writes it; then committed and unpinned. A block the store has, or has no room for, is unpinned after
the second stage. Pins are bounded: beyond the bound, and when vLLM is short of blocks, the newest are not stored.

Collecting and unpinning happen on the scheduler's thread (the pool has no lock), the rest on the reactor's.
"""

import functools
import hashlib
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.codecs import choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.events import Events, Raw
from vllm_kvtier.scheduler.ledger import Keys
from vllm_kvtier.scheduler.tables import Growth, Table
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.store.client import Pending
from vllm_kvtier.store.messages import EXISTS, HASH, MAX_ITEMS, NO_PARENT, NO_PARENT_STORED, NO_ROOM, Reserved
from vllm_kvtier.telemetry.events import Label
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor

logger = logging.getLogger("vllm.kvtier.offloading")

# Blocks are asked for together: a request that only generates fills one in 16 steps, and a message a step for each
# would cost more than it saves: every thread that a message goes through takes the interpreter from the engine's. A
# long prompt asks at once, so that the copy begins behind its forward; a short one soon, because others may begin with
# it; what is generated is wanted when the request has ended, which asks as well.
ASK_AT = 32, 64  # blocks: where prompts are among them, and where not
ASK_AFTER = 8, 32  # steps, the same
REWINDS = 2

_REFUSALS = {EXISTS: "stored already", NO_ROOM: "store full", NO_PARENT_STORED: "beginning not stored"}


@dataclass
class Chain:
    """A request in a batch. ``firsts``: by group, its first block there; ``rewinds`` of its table at that time."""

    table: Table
    firsts: list[int]
    rewinds: int


@dataclass
class Batch:
    """Blocks of one space and tenant, collected in steps up to ``step``; row i is one block."""

    space: bytes
    tenant: bytes
    since: int  # step of the first
    step: int = -1  # step that fills the last
    prompts: bool = False  # blocks of prompts are among them
    groups: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    chains: dict[str, Chain] = field(default_factory=dict)
    raws: list[Raw] = field(default_factory=list)  # of labels, where events are published
    labels: dict[int, Label] = field(default_factory=dict)  # of rows that should have one in the store


@dataclass
class Flight:
    """One order the workers copy."""

    group: int
    blocks: list[int]
    slots: list[int]
    session: int
    waiting: set[int]  # ranks
    complete: bool = True


class Offloader:
    def __init__(
        self,
        config: KVTierConfig,
        tier: HostTier,
        pool: BlockPool,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        counters: Counters,
        reactor: Reactor,
        tell: Callable[[m.StoreBlocks | m.CancelStores], None],
        on_free: Callable[[], None],
    ):
        """``on_free`` hears (reactor's thread) that blocks wait to be unpinned."""
        self._config, self._tier, self._pool, self._keys = config, tier, pool, keys
        self._groups, self._counters, self._reactor = groups, counters, reactor
        self._tell, self._on_free = tell, on_free
        self.events: Events | None = None
        self._unit = pool.hash_block_tokens
        self._most = min(int(pool.num_blocks * config.store_hold_share), MAX_ITEMS)  # all of it may be one message
        self._pinned = 0
        self._held: Counter[int] = Counter()  # the blocks of these pins
        self._open: dict[tuple[bytes, bytes], Batch] = {}
        self._step = 0
        self._orders = itertools.count(1)
        self._flights: dict[int, Flight] = {}  # reactor's thread
        self._asked = 0  # batches waiting for the store's answer
        self._free: deque[list[int]] = deque()
        self._lost: deque[Batch] = deque()  # some of their blocks had no parent in the store
        self._unheard: deque[Batch] = deque()  # the store went away before it answered
        self._quiet = threading.Condition()
        self._cancelled = False

    def wanted(self) -> bool:
        return self._config.store_write != "off"

    @property
    def pinned(self) -> int:
        """Blocks held for copies."""
        return self._pinned

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def begin_step(self, step: int, growth: list[Growth]) -> None:
        self._step = step
        self.drain()
        if self._tier.limit() and self.wanted():  # tables may be followed for other engines' sake
            for tracked, table, computed in growth:
                request = tracked.request
                full = min(computed, len(request.block_hashes) * self._unit)
                if self._config.store_write == "prompt":
                    full = min(full, request.num_prompt_tokens)
                self._collect(tracked, table, full, None)
        self._ask(False)

    def finished(self, t: Tracked, table: Table | None, block_ids: tuple[list[int], ...]) -> None:
        """The request ended; what it filled last goes too, if it ended well."""
        request = t.request
        if table is not None and self._tier.limit() and self.wanted() and vr.ended_well(request):
            full = min(vr.written_tokens(request), len(request.block_hashes) * self._unit)
            if self._config.store_write == "prompt":
                full = min(full, request.num_prompt_tokens)
            self._collect(t, table, full, block_ids)
        self._ask(True)

    def _collect(self, t: Tracked, table: Table, full: int, held: tuple[list[int], ...] | None) -> None:
        """Blocks of the first ``full`` tokens not offered yet. ``held``: what the request holds at its end."""
        self._follow_store(table)
        if all(full // size <= done for (size, _), done in zip(self._groups, table.offered, strict=True)):
            return
        request = t.request
        variant = vr.variant(request)
        batch, keys = self._batch(request, variant), self._keys()
        chain = Chain(table, list(table.offered), table.rewinds)
        for g, (size, window) in enumerate(self._groups):
            ids = table.groups[g] if held is None else held[g]
            first, last, per = table.offered[g], min(full // size, len(ids)), size // self._unit
            table.offered[g] = max(first, last)
            if window is not None and held is None:
                first = max(first, self._still_held(request.num_computed_tokens, size, window))
            rows = [i for i in range(first, last) if ids[i]]
            room = self._most - self._pinned
            if len(rows) > room:
                refused, rows = len(rows) - max(0, room), rows[: max(0, room)]
                if window is None:  # what comes after them could not be found: begin here again
                    table.offered[g] = rows[-1] + 1 if rows else first
                if window is not None or held is not None:  # they are not offered again
                    self._counters.count("not_stored", "too many copies under way", refused)
            if not rows:
                continue
            # All that may raise first: rows of a batch are of one length, and no block is held that is in none.
            blocks, hashes = [ids[i] for i in rows], request.block_hashes
            whole = [bytes(hashes[(i + 1) * per - 1]) for i in rows]
            keyed, short = keys.of(whole, g, variant), [h[:HASH] for h in whole]
            parents = [bytes(hashes[i * per - 1])[:HASH] if i else NO_PARENT for i in rows]
            labels, raws = {}, []
            if self.events is not None:
                known = enumerate([self.events.label_of(batch.space, g, h) for h in whole], len(batch.blocks))
                labels = {row: label for row, label in known if label is not None}
                raws = self.events.describe(batch.space, request, g, rows)
            self._pool.pin(blocks)
            self._pinned += len(blocks)
            self._held.update(blocks)
            batch.labels |= labels
            batch.groups += [g] * len(rows)
            batch.blocks += blocks
            batch.keys += keyed
            batch.hashes += short
            batch.parents += parents
            batch.raws += raws
            batch.prompts |= rows[0] * size < request.num_prompt_tokens
            batch.step = max(batch.step, self._step)
        batch.chains.setdefault(request.request_id, chain)

    def _follow_store(self, table: Table) -> None:
        """Another store serves, which has nothing of what the one before was offered: all of it goes again."""
        instance = self._tier.instance
        if instance and instance != table.instance:
            if table.instance:
                table.offered, table.rewinds = [0] * len(self._groups), 0
            table.instance = instance

    @staticmethod
    def _still_held(before: int, size: int, window: int) -> int:
        """A windowed group's first block that is certainly still the request's own in a step that begins at token
        ``before``: vLLM has given up those behind the window, and what was filled long ago (the store was not there
        then) may be another request's by now."""
        return min(before // size, max(0, before - window + 1) // size + 1)

    def _batch(self, request: Any, variant: bytes) -> Batch:
        salt = getattr(request, "cache_salt", None)
        tenant = hashlib.blake2b(salt.encode(), digest_size=8).digest() if salt else b""
        key = self._tier.space(variant), tenant
        batch = self._open.get(key)
        if batch is None:
            batch = self._open[key] = Batch(*key, since=self._step)
            if self.events is not None:
                self.events.join(batch.space)  # what is stored there is published, whether or not it was asked for
        return batch

    def _ask(self, now: bool) -> None:
        """Reserve what was collected, as soon as that is worth a message."""
        for key, batch in list(self._open.items()):
            at, after = (limits[0 if batch.prompts else 1] for limits in (ASK_AT, ASK_AFTER))
            if not (now or len(batch.blocks) >= at or self._step - batch.since >= after):
                continue
            if not batch.blocks:
                del self._open[key]
                continue
            instance = self._tier.instance
            pending = self._tier.reserve(
                batch.space, batch.tenant, batch.groups, b"".join(batch.hashes), b"".join(batch.parents)
            )
            with self._quiet:
                self._asked += 1
            del self._open[key]
            heard = functools.partial(self._heard, batch, instance)
            try:
                pending.then(heard)
            except Exception:  # else the blocks would stay pinned for ever
                pending.then(heard)
                raise
            if self.events is not None:
                self.events.tell(batch.space, batch.raws)  # behind the reservation

    def _heard(self, batch: Batch, instance: str, pending: Pending) -> None:
        self._reactor.call_soon(lambda: self._reserved(batch, pending, instance))

    def drain(self) -> None:
        """Unpin what was copied or refused; begin again what the store lost the beginning of, or never heard of."""
        while self._lost:
            self._rewind(self._lost.popleft())
        while self._unheard:
            self._offer_again(self._unheard.popleft())
        while self._free:
            ids = self._free[0]
            self._pool.free(ids)
            self._free.popleft()
            self._pinned -= len(ids)
            for i in ids:
                self._held[i] -= 1
                if not self._held[i]:
                    del self._held[i]

    def _rewind(self, batch: Batch) -> None:
        """The store lost the beginning of these chains: offer them from their beginning.

        A few times: a store that keeps losing them is too small for them.
        """
        for chain in batch.chains.values():
            table = chain.table
            if table.rewinds != chain.rewinds or table.rewinds >= REWINDS:
                continue  # begun again since these were collected
            table.rewinds += 1
            self._back_to(table, [0] * len(self._groups))
            table.due = 0

    def has_frees(self) -> bool:
        return bool(self._free)

    def relieve(self, short: int) -> None:
        """vLLM lacks ``short`` blocks: give up copies that have not begun, newest first, if that makes up for it.

        It mostly does not: what a request still uses is not freed by our letting go of it. And an engine under load
        always has a request that waits for more than all copies hold; nothing would ever be stored there.
        """
        if short <= self._pinned and short <= self._pool.held_once(self._held):
            self._give_up(short)
        self.drain()

    def _give_up(self, short: int) -> None:
        for key in reversed(list(self._open)):
            if short <= 0:
                break
            batch = self._open.pop(key)
            self._free.append(batch.blocks)
            self._offer_again(batch)
            self._counters.count("not_stored", "room for requests", len(batch.blocks))
            short -= self._pool.held_once(batch.blocks)
        if short > 0 and self._pinned and not self._cancelled:
            self._cancelled = True
            self._reactor.call_soon(self._cancel)

    def _offer_again(self, batch: Batch) -> None:
        for chain in batch.chains.values():
            self._back_to(chain.table, chain.firsts)

    def _back_to(self, table: Table, firsts: list[int]) -> None:
        """Offer a chain again from these blocks on: without them, what comes after could not be found."""
        for g, (_, window) in enumerate(self._groups):
            if window is None:  # a windowed group's earlier blocks may be somebody else's by now
                table.offered[g] = min(table.offered[g], firsts[g])

    def settle(self, seconds: float) -> None:
        """Give up what has not begun and wait for the copies that have: vLLM is about to reset its prefix cache,
        which fails while a block is held. Milliseconds, at most ``seconds``."""
        self._give_up(1 << 60)
        with self._quiet:
            self._quiet.wait_for(lambda: not self._asked and not self._flights, seconds)
        self.drain()

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _reserved(self, batch: Batch, pending: Pending, instance: str) -> None:
        reserved, session = pending.outcome, pending.session
        slots = reserved.slots if isinstance(reserved, Reserved) else []
        if len(slots) != len(batch.blocks):
            self._counters.count("not_stored", "no store", len(batch.blocks))
            slots = [NO_ROOM] * len(batch.blocks)
        refused = [i for i, slot in enumerate(slots) if slot <= 0]
        if NO_PARENT_STORED in slots:
            self._lost.append(batch)
        if not isinstance(reserved, Reserved):
            self._unheard.append(batch)
        else:
            for code, reason in _REFUSALS.items():
                n = sum(1 for i in refused if slots[i] == code)
                if n:
                    self._counters.count("not_stored", reason, n)
        for g in sorted(set(batch.groups)):
            rows = [i for i, slot in enumerate(slots) if slot > 0 and batch.groups[i] == g]
            if rows:
                self._order(batch, g, rows, slots, session, instance)
        if batch.labels:
            self.events.tell_again(
                batch.space, [(batch.groups[i], label) for i, label in batch.labels.items() if slots[i] > 0]
            )
        if refused:
            self._free.append([batch.blocks[i] for i in refused])
        with self._quiet:
            self._asked -= 1
            self._quiet.notify_all()
        if refused:
            self._on_free()

    def _order(
        self, batch: Batch, g: int, rows: list[int], slots: list[int], session: int, instance: str
    ) -> None:
        order = next(self._orders)
        self._flights[order] = Flight(
            g, [batch.blocks[i] for i in rows], [slots[i] for i in rows], session, set(self._tier.writers[g])
        )
        self._tell(
            m.StoreBlocks(
                order,
                instance,
                g,
                batch.step,
                np.array([batch.blocks[i] for i in rows], np.int64).tobytes(),
                np.array([batch.keys[i] for i in rows], np.uint64).tobytes(),
                np.array([slots[i] for i in rows], np.int64).tobytes(),
            )
        )

    def stored(self, message: m.Stored) -> None:
        """A rank is through with orders."""
        for complete, orders in ((True, message.done), (False, message.dropped)):
            for order in orders:
                flight = self._flights.get(order)
                if flight is None:
                    continue
                flight.waiting.discard(message.rank)
                flight.complete &= complete
                if not flight.waiting:
                    self._land(order, flight)
        if message.nbytes:
            self._counters.count("stored_bytes", choice.names(self._tier.codecs), message.nbytes)
            self._counters.count("store_seconds", amount=message.seconds)

    def _land(self, order: int, flight: Flight) -> None:
        if flight.complete:
            self._tier.commit(flight.slots, flight.session)
            self._counters.count("stored_blocks", amount=len(flight.slots))
            logical = len(flight.slots) * self._tier.logical[flight.group]
            self._counters.count("stored_logical_bytes", self._tier.codecs[flight.group].name, logical)
        else:
            self._tier.abort(flight.slots, flight.session)
            self._counters.count("not_stored", "copies too slow", len(flight.slots))
        self._free.append(flight.blocks)  # before anybody hears that all is quiet
        with self._quiet:
            del self._flights[order]
            self._quiet.notify_all()
        self._on_free()

    def lost(self) -> None:
        """The store went away, and our reservations with it."""
        self._cancel()

    def _cancel(self) -> None:
        self._cancelled = False
        if self._flights:
            self._tell(m.CancelStores(sorted(self._flights, reverse=True)))

"""The clients of the index, their leases and their reservations, with deadlines. The index interprets them."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvtier.store.index.block_entry import BlockEntry
from vllm_kvtier.store.index.types import BadRequest, GroupShape

MIN_SWEEP = 1024  # in a queue, from which on those that have ended are dropped


@dataclass(slots=True, eq=False)
class Lease:
    name: int
    client: int
    deadline: float
    entries: list[BlockEntry]  # empty: ended


class Client:
    def __init__(self, hash_block_size: int, groups: Sequence[GroupShape]):
        self.hash_block_size = hash_block_size
        self.shapes = list(groups)
        self.leases: dict[int, Lease] = {}
        self.reserved: dict[int, tuple[float, BlockEntry]] = {}  # by slot: (deadline, block)


class LeaseTable:
    """All leases with a deadline have the same duration, and so have all reservations: a queue in order of time is a
    queue in order of deadline. What ended early stays in its queue, without its blocks, until it is first, or until the
    queue is twice as long as after the last sweep."""

    def __init__(self, clock: Callable[[], float], lease_seconds: float, reserve_seconds: float):
        self._clock, self._lease_seconds, self._reserve_seconds = clock, lease_seconds, reserve_seconds
        self.clients: dict[int, Client] = {}
        self._leases: deque[Lease] = deque()
        self._reservations: deque[tuple[float, int, list[int]]] = deque()  # (deadline, client, slots)
        self._sweep_leases_at = self._sweep_reservations_at = MIN_SWEEP
        self._last_lease = 0

    def connect(self, client: int, hash_block_size: int, groups: Sequence[GroupShape]) -> None:
        if client in self.clients:
            raise BadRequest(f"client {client} sent Hello twice")
        self.clients[client] = Client(hash_block_size, groups)

    def known(self, client: int) -> Client:
        known = self.clients.get(client)
        if known is None:
            raise BadRequest(f"client {client} has not sent Hello")
        return known

    def leases(self) -> int:
        return sum(len(client.leases) for client in self.clients.values())

    def lease(self, client: int, entries: list[BlockEntry], forever: bool = False) -> int:
        """Lease entries. Returns the lease's number, never 0. ``forever``: without a deadline."""
        self._last_lease += 1
        lease = Lease(self._last_lease, client, math.inf if forever else self._clock() + self._lease_seconds, entries)
        if not forever:
            self._leases.append(lease)
            if len(self._leases) >= self._sweep_leases_at:
                self._leases = deque(each for each in self._leases if each.entries)
                self._sweep_leases_at = max(MIN_SWEEP, 2 * len(self._leases))
        self.clients[client].leases[lease.name] = lease
        return lease.name

    def end_lease(self, client: int, name: int) -> list[BlockEntry]:
        """End a lease. Returns its entries; none if there is no such lease."""
        lease = self.known(client).leases.pop(name, None)
        if lease is None:
            return []
        entries, lease.entries = lease.entries, []
        return entries

    def reserve(self, client: int, entries: list[BlockEntry], forever: bool = False) -> None:
        deadline = math.inf if forever else self._clock() + self._reserve_seconds
        self.clients[client].reserved.update((entry.slot, (deadline, entry)) for entry in entries)
        if not forever:
            self._reservations.append((deadline, client, [entry.slot for entry in entries]))
            if len(self._reservations) >= self._sweep_reservations_at:
                self._reservations = deque(each for each in self._reservations if self._still_reserved(*each))
                self._sweep_reservations_at = max(MIN_SWEEP, 2 * len(self._reservations))

    def end_reservations(self, client: int, slots: Sequence[int]) -> list[BlockEntry]:
        """End the client's reservations of ``slots``. Returns their entries; other slots are ignored."""
        reserved = self.known(client).reserved
        ended = [held[1] for slot in slots if (held := reserved.pop(slot, None)) is not None]
        for entry in ended:
            entry.client = None
        return ended

    def expired_lease(self) -> Lease | None:
        """The next lease whose deadline has passed; the caller ends it."""
        now = self._clock()
        while self._leases and (not self._leases[0].entries or self._leases[0].deadline <= now):
            lease = self._leases.popleft()
            if lease.entries:
                return lease
        return None

    def expired_reservations(self) -> list[BlockEntry]:
        """Entries reserved beyond their deadline; the caller ends the reservations."""
        now, expired = self._clock(), list[BlockEntry]()
        while self._reservations and self._reservations[0][0] <= now:
            expired += self._still_reserved(*self._reservations.popleft())
        return expired

    def _still_reserved(self, deadline: float, client: int, slots: Sequence[int]) -> list[BlockEntry]:
        """Entries of this reservation. Other slots of it have been reserved anew, perhaps, with a later deadline."""
        known = self.clients.get(client)
        held = [known.reserved[slot] for slot in slots if slot in known.reserved] if known is not None else []
        return [entry for until, entry in held if until <= deadline]

    def next_deadline(self) -> float | None:
        heads = [self._leases[0].deadline] if self._leases else []
        heads += [self._reservations[0][0]] if self._reservations else []
        return min(heads, default=None)

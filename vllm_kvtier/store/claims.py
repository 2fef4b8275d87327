"""Who holds what, until when: clients, their leases and their reservations. What that means is the index's."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvtier.store.entries import Entry, Shape
from vllm_kvtier.store.records import BadRequest, GroupShape


@dataclass(slots=True, eq=False)
class Lease:
    name: int
    client: int
    deadline: float
    entries: list[Entry]  # empty: ended


class Client:
    def __init__(self, unit_tokens: int, groups: Sequence[GroupShape]):
        self.unit_tokens = unit_tokens
        self.shapes = [Shape(g.units, g.window, g.slot_pages) for g in groups]
        self.leases: dict[int, Lease] = {}
        self.reserved: dict[int, Entry] = {}  # by slot


class Claims:
    """All leases with a deadline last equally long, and all reservations: queues in order of time are queues in
    order of deadline.

    What ended early stays in its queue until it is first.
    """

    def __init__(self, clock: Callable[[], float], lease_seconds: float, reserve_seconds: float):
        self._clock, self._lease_seconds, self._reserve_seconds = clock, lease_seconds, reserve_seconds
        self._clients: dict[int, Client] = {}
        self._leases: deque[Lease] = deque()
        self._reservations: deque[tuple[float, list[Entry]]] = deque()
        self._last_lease = 0

    def connect(self, client: int, unit_tokens: int, groups: Sequence[GroupShape]) -> None:
        if client in self._clients:
            raise BadRequest(f"client {client} said hello twice")
        self._clients[client] = Client(unit_tokens, groups)

    def forget(self, client: int) -> None:
        """Of a client that holds nothing any more."""
        del self._clients[client]

    def find(self, client: int) -> Client | None:
        return self._clients.get(client)

    def known(self, client: int) -> Client:
        known = self._clients.get(client)
        if known is None:
            raise BadRequest(f"client {client} has not said hello")
        return known

    def leases(self) -> int:
        return sum(len(client.leases) for client in self._clients.values())

    def lease(self, client: int, entries: list[Entry], forever: bool = False) -> int:
        """Its name, never 0. ``forever``: it has no deadline."""
        self._last_lease += 1
        lease = Lease(self._last_lease, client, math.inf if forever else self._clock() + self._lease_seconds, entries)
        if not forever:
            self._leases.append(lease)
        self._clients[client].leases[lease.name] = lease
        return lease.name

    def end_lease(self, client: int, name: int) -> list[Entry]:
        """What it held; nothing if there is no such lease."""
        lease = self.known(client).leases.pop(name, None)
        if lease is None:
            return []
        entries, lease.entries = lease.entries, []
        return entries

    def reserve(self, client: int, entries: list[Entry], forever: bool = False) -> None:
        self._clients[client].reserved.update((entry.slot, entry) for entry in entries)
        if not forever:
            self._reservations.append((self._clock() + self._reserve_seconds, entries))

    def end_reservations(self, client: int, slots: Sequence[int]) -> list[Entry]:
        """Of those among ``slots`` that the client has reserved; from now on nobody writes them."""
        reserved = self.known(client).reserved
        ended = [entry for slot in slots if (entry := reserved.pop(slot, None)) is not None]
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

    def expired_reservations(self) -> list[Entry]:
        """All that are still being written past their deadline; the caller ends them."""
        now = self._clock()
        expired = []
        while self._reservations and self._reservations[0][0] <= now:
            expired += [entry for entry in self._reservations.popleft()[1] if entry.client is not None]
        return expired

    def next_deadline(self) -> float | None:
        heads = [self._leases[0].deadline] if self._leases else []
        heads += [self._reservations[0][0]] if self._reservations else []
        return min(heads, default=None)

"""The stores of an engine over several nodes, joined: for its scheduler side they are one store.

Each node's store has the parts of the ranks there, in a namespace and slots of its own. A block is there if all of them
have it. The methods are those of ``StoreClient``; here ``pages_limit`` and the directory query are not used.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import Failed, Outcome, Pending, StoreClient

logger = get_logger(__name__)

MAX_ROUNDS = 8  # of a lookup: the stores' answers reach equally far after two, unless blocks are evicted meanwhile


@dataclass(frozen=True)
class _Granted:
    """A lease of each store, as (lease, session), and by group int64[nodes, n]: each store's slots of the hit."""

    leases: list[tuple[int, int]]
    slots: list[np.ndarray]


class JoinedStoreClient:
    """Attributes as of ``StoreClient``. ``connected``: to all stores; ``session`` grows with each change of any
    connection; ``instance`` has those of all stores, with blanks between them, in the order of the nodes."""

    peer_count = 0  # no peer reads GPUs of several nodes

    def __init__(
        self,
        connect: Callable[[int, Callable[[], None]], StoreClient],
        ranks: Sequence[Sequence[int]],
        shapes: Sequence[Sequence[m.GroupShape]],
        on_change: Callable[[], None],
    ):
        """By node: ``connect(node, on_change)`` makes its client, ``ranks`` it has, ``shapes`` of its slots."""
        self.connected, self.reason, self.instance, self.session = False, "not connected yet", "", 0
        self.tiers: tuple[str, ...] = ()  # that any has
        self.only_named: tuple[str, ...] = ()  # with any
        self._ranks, self._shapes, self._on_change = ranks, shapes, on_change
        # Of the namespaces: engines whose ranks are divided otherwise over nodes share nothing.
        self._parts = [repr(sorted(each)).encode() for each in ranks]
        self._limits = [0] * len(ranks)  # pages that all ranks of a node reach
        self._state: list[tuple[Any, ...]] = []
        self._numbers = itertools.count(1)  # of leases and of reserved slots
        self._leases: dict[int, _Granted] = {}
        self._reserved: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # (slots by node, 0: not needed; sessions)
        self._clients = [connect(node, self._changed) for node in range(len(ranks))]

    def start(self) -> None:
        for client in self._clients:
            client.start()

    def reach(self, reached: Mapping[int, tuple[str, int]]) -> int:
        """``reached``: rank -> (instance, bytes of its store's memory that it can use). Returns the pages of the first
        node's store that can be used; 0 unless all ranks reach the stores that serve (reactor's thread)."""
        for node, (client, ranks) in enumerate(zip(self._clients, self._ranks, strict=True)):
            sizes = [reached.get(rank, ("", 0)) for rank in ranks]
            right = client.connected and all(instance == client.instance for instance, _ in sizes)
            self._limits[node] = min(nbytes for _, nbytes in sizes) // m.PAGE if right else 0
        return self._limits[0] if all(self._limits) else 0

    @property
    def places(self) -> dict[str, str]:
        """Of the first node's store, as ``pid``."""
        return self._clients[0].places

    @property
    def pid(self) -> int:
        return self._clients[0].pid

    @property
    def presence(self) -> "JoinedStoreClient | None":
        """As the first node's store, whose table can be read here, for what it lacks."""
        return self if self._clients[0].presence is not None else None

    def may_have(self, namespace_id: bytes, block_hash: bytes) -> bool:
        presence = self._clients[0].presence
        return presence is None or presence.may_have(self._name(namespace_id, 0), block_hash)

    # -- loads ---------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace_id: bytes,
        block_hashes: bytes,
        start: int,
        pages_limit: int,
        wait_seconds: float = 0.0,
        nodes: Sequence[str] = (),
        key_mask: bytes = b"",
        hash_blocks_per_block: int = 1,
    ) -> Pending:
        """Outcome: Found, with the slots of the first node; ``slots_of`` has the others. Where the answers end
        differently, those that reach further are asked again for what all have: of windows and states other blocks."""

        def ask(node: int, hashes: bytes, seconds: float) -> Pending:
            name, limit = self._name(namespace_id, node), self._limits[node]
            return self._clients[node].lookup(name, hashes, start, limit, seconds, nodes)

        def answered(answers: list[Pending], rounds: int, promotion: m.TierQuery | None) -> Outcome | None:
            found = [each.outcome for each in answers if isinstance(each.outcome, m.Found)]
            if len(found) < len(answers) or self.session != joined.session:
                self._release_answers(answers)
                return self._failure(answers)
            ends = [each.num_hash_blocks if each.lease else start for each in found]
            end = min(ends)
            if rounds == MAX_ROUNDS:
                promotion = _promotion(found, ends)
            if end <= start or not rounds:
                self._release_answers(answers)
                return m.Found(0, 0, start, [], promotion)
            if end == max(ends):
                return self._grant(answers, found, promotion)
            again = list(answers)
            for node in range(len(ends)):
                if ends[node] > end:  # the new lease is granted before the old one ends: a store answers in order
                    again[node] = ask(node, block_hashes[: end * m.HASH_BYTES], 0.0)
                    self._release_answer(node, answers[node])
            self._join(joined, again, lambda: answered(again, rounds - 1, promotion))
            return None

        joined = Pending(self.session, 0.0)
        first = [ask(node, block_hashes, wait_seconds) for node in range(len(self._clients))]
        return self._join(joined, first, lambda: answered(first, MAX_ROUNDS, None))

    def _grant(self, answers: list[Pending], found: list[m.Found], promotion: m.TierQuery | None) -> m.Found:
        """Raises ValueError for slots that do not match or cannot be reached."""
        table = []
        for g in range(len(self._shapes[0])):
            slots = np.array([each.slots[g] for each in found], np.int64)
            pages = np.array([shapes[g].slot_pages for shapes in self._shapes])
            if ((slots == 0).any(0) != (slots == 0).all(0)).any():
                raise ValueError("the stores of the nodes have different blocks of one prefix")
            if (slots.max(1, initial=0) + pages > self._limits).any():
                raise ValueError("slots that this engine cannot reach")
            table.append(slots)
        lease = next(self._numbers)
        leases = [(each.lease, answer.session) for each, answer in zip(found, answers, strict=True)]
        self._leases[lease] = _Granted(leases, table)
        return m.Found(0, lease, found[0].num_hash_blocks, found[0].slots, promotion)

    def slots_of(self, lease: int, group: int, slots: np.ndarray, node: int = 0) -> np.ndarray:
        """int64[nodes, n]: the slots of all nodes, for ``slots`` of one of them. Raises KeyError for a lease that has
        ended, ValueError for slots that it does not have."""
        table = self._leases[lease].slots[group]
        order = np.argsort(table[node], kind="stable")
        at = np.searchsorted(table[node], slots, sorter=order)
        columns = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(0, np.int64)
        if len(columns) != len(slots) or (table[node, columns] != slots).any():
            raise ValueError("slots that are not of this lease")
        return table[:, columns]

    def release(self, lease: int, session: int | None = None) -> None:
        granted = self._leases.pop(lease, None)
        if granted is not None:
            for client, (number, its_session) in zip(self._clients, granted.leases, strict=True):
                client.release(number, its_session)

    def discard_at(self, node: int, namespace_id: bytes, group: int, block_hash: bytes, slot: int, lease: int) -> None:
        """``slot``: of this node."""
        session = self._leases[lease].leases[node][1]
        self._clients[node].discard(self._name(namespace_id, node), group, block_hash, slot, session)

    def touch(self, namespace_id: bytes, block_hashes: bytes) -> None:
        for node, client in enumerate(self._clients):
            client.touch(self._name(namespace_id, node), block_hashes)

    def warm(self, namespace_id: bytes, block_hashes: bytes, pages_limit: int, nodes: Sequence[str] = ()) -> None:
        for node, client in enumerate(self._clients):
            client.warm(self._name(namespace_id, node), block_hashes, self._limits[node], nodes)

    # -- stores (reactor's thread) -----------------------------------------------------------------------------------

    def reserve(
        self, namespace_id: bytes, tenant: bytes, groups: Sequence[int], hashes: bytes, parents: bytes, pages_limit: int
    ) -> Pending:
        """Outcome: Reserved. A slot is a number of our own; ``reserved_slots`` has each node's."""

        def answered() -> Outcome:
            given = [each.outcome.slots for each in answers if isinstance(each.outcome, m.Reserved)]
            if {len(each) for each in given} != {len(groups)} or len(given) < len(answers):
                self._release_answers(answers)
                return self._failure(answers)
            if self.session != joined.session:
                self._release_answers(answers)
                return Failed(self.reason or "a node's store was away")
            sessions, slots, reserved = [each.session for each in answers], list[int](), {}
            refused: list[list[int]] = [[] for _ in answers]
            for each in zip(*given, strict=True):
                cause = next((slot for slot in each if slot <= 0 and slot != m.EXISTS), m.EXISTS)
                if cause == m.EXISTS and max(each) > 0:
                    slots.append(next(self._numbers))
                    reserved[slots[-1]] = tuple(max(0, slot) for slot in each), sessions
                    continue
                slots.append(cause)
                for node, slot in enumerate(each):
                    if slot > 0:
                        refused[node].append(slot)
            for client, some, session in zip(self._clients, refused, sessions, strict=True):
                if some:
                    client.abort(some, session)
            self._reserved |= reserved
            return m.Reserved(0, slots)

        joined = Pending(self.session, 0.0)
        answers = [
            client.reserve(self._name(namespace_id, node), tenant, groups, hashes, parents, self._limits[node])
            for node, client in enumerate(self._clients)
        ]
        return self._join(joined, answers, answered)

    def reserved_slots(self, slots: Sequence[int]) -> np.ndarray:
        """int64[nodes, n]; 0: the node's store has the block."""
        return np.transpose(np.array([self._reserved[slot][0] for slot in slots], np.int64))

    def lacking(self, slot: int) -> tuple[bool, ...]:
        """By node, whether its store lacks the block of this reserved slot."""
        return tuple(each > 0 for each in self._reserved[slot][0])

    def commit(self, slots: Sequence[int], session: int | None = None) -> None:
        self._end(slots, "commit")

    def abort(self, slots: Sequence[int], session: int | None = None) -> None:
        self._end(slots, "abort")

    def _end(self, slots: Sequence[int], how: str) -> None:
        """Reservations of a connection that has ended are gone with it, and those of the others are ended."""
        ended: dict[tuple[int, int], list[int]] = {}  # (node, session) -> its slots
        for number in slots:
            each, sessions = self._reserved.pop(number, ((), []))
            for node, slot in enumerate(each):
                if slot:
                    ended.setdefault((node, sessions[node]), []).append(slot)
        for (node, its_session), some in ended.items():
            getattr(self._clients[node], how)(some, its_session)

    # -- questions -----------------------------------------------------------------------------------------------

    def pin(self, namespace_id: bytes, block_hashes: bytes, pinned: bool = True) -> Pending:
        return self._least("count", "pin", namespace_id, block_hashes, pinned)

    def names_of(self, namespace_id: bytes) -> list[bytes]:
        return [self._name(namespace_id, node) for node in range(len(self._clients))]

    def leave(self, namespace_id: bytes) -> Pending:
        return self._least("count", "leave", namespace_id)

    def inspect(self, namespace_id: bytes, block_hashes: bytes) -> Pending:
        return self._least("num_hash_blocks", "inspect", namespace_id, block_hashes)

    def explain(
        self,
        namespace_id: bytes,
        block_hashes: bytes,
        wait_seconds: float,
        key_mask: bytes = b"",
        hash_blocks_per_block: int = 1,
    ) -> Pending:
        return self._least("num_hash_blocks", "explain", namespace_id, block_hashes, wait_seconds)

    def _least(self, of: str, method: str, namespace_id: bytes, *args: object) -> Pending:
        """The answer of the node that has least, by the attribute ``of``."""

        def answered() -> Outcome:
            failed = [each.outcome for each in answers if isinstance(each.outcome, Failed)]
            outcomes = [each.outcome for each in answers if each.outcome is not None]
            return failed[0] if failed else min(outcomes, key=lambda outcome: getattr(outcome, of))

        answers = [
            getattr(client, method)(self._name(namespace_id, node), *args) for node, client in enumerate(self._clients)
        ]
        return self._join(Pending(self.session, 0.0), answers, answered)

    # -- inside --------------------------------------------------------------------------------------------------

    def _name(self, namespace_id: bytes, node: int) -> bytes:
        return hashlib.blake2b(namespace_id + self._parts[node], digest_size=m.HASH_BYTES).digest()

    def _changed(self) -> None:
        clients = self._clients
        state = [(each.connected, each.session, each.instance) for each in clients]
        if state != self._state:
            self._state = state
            self.session += 1
        self.connected = all(each.connected for each in clients)
        self.reason = next((each.reason for each in clients if not each.connected), "")
        self.instance = " ".join(each.instance for each in clients) if self.connected else ""
        self.tiers = tuple(dict.fromkeys(name for each in clients for name in each.tiers))
        asked = {name for each in clients for name in each.tiers if name not in each.only_named}
        self.only_named = tuple(name for name in self.tiers if name not in asked)
        self._on_change()

    def _join(self, joined: Pending, answers: list[Pending], answered: Callable[[], Outcome | None]) -> Pending:
        """``joined`` gets what ``answered`` returns when all have answered; nothing if it returns None."""
        joined.deadline = max(each.deadline for each in answers)
        left = itertools.count(len(answers) - 1, -1)

        def one(_: Pending) -> None:
            if next(left):
                return
            try:
                outcome = answered()
            except Exception as error:  # of a malformed answer, for example: the request goes on
                logger.warning("kvtier: stores of several nodes: an answer could not be used: %r", error)
                self._release_answers(answers)
                outcome = Failed(f"an answer could not be used: {error}")
            if outcome is not None:
                joined.resolve(outcome)

        for each in answers:
            each.then(one)
        return joined

    def _failure(self, answers: list[Pending]) -> Failed:
        failed = (each.outcome for each in answers if isinstance(each.outcome, Failed))
        return next(failed, Failed(self.reason or "the stores of the nodes changed meanwhile"))

    def _release_answers(self, answers: list[Pending]) -> None:
        for node, each in enumerate(answers):
            self._release_answer(node, each)

    def _release_answer(self, node: int, answer: Pending) -> None:
        """What this answer grants, now or when it comes."""

        def end(_: Pending) -> None:
            if isinstance(answer.outcome, m.Found) and answer.outcome.lease:
                self._clients[node].release(answer.outcome.lease, answer.session)
            if isinstance(answer.outcome, m.Reserved):
                self._clients[node].abort([slot for slot in answer.outcome.slots if slot > 0], answer.session)

        answer.then(end)


def _promotion(found: list[m.Found], ends: list[int]) -> m.TierQuery | None:
    """What all stores will have in memory: as far as the shortest, when the last one has it."""
    promotions = [each.promotion for each in found if each.promotion is not None]
    if not promotions:
        return None
    reach = min(
        end if each.promotion is None else each.promotion.num_hash_blocks for each, end in zip(found, ends, strict=True)
    )
    asking = max(each.asking for each in promotions)
    if reach <= min(ends) and not asking:
        return None
    return m.TierQuery(reach, max(each.seconds for each in promotions), asking)

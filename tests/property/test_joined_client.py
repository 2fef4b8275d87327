"""The joined client of an engine over several nodes, over stores that answer late, lose their connections and lie."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_kvtier.store.client import Failed, Pending
from vllm_kvtier.store.joined_client import JoinedStoreClient
from vllm_kvtier.store.protocol import (
    EXISTS,
    HASH_BYTES,
    NO_PARENT_STORED,
    NO_ROOM,
    PAGE,
    Explained,
    Found,
    GroupShape,
    Reserved,
    TierQuery,
)

NAME = b"the engine's own"
FULL, WINDOW = GroupShape(1, slot_pages=2), GroupShape(1, slot_pages=1, window=2)
BLOCKS = 8
LIMIT = 10_000  # pages


def hashes_of(prompt: int, count: int = BLOCKS) -> list[bytes]:
    return [bytes([prompt, i]) * (HASH_BYTES // 2) for i in range(count)]


class Node:
    """A ``StoreClient`` and its store, which handles messages in order, when the test lets it."""

    def __init__(self, number, on_change, groups):
        self.number, self.on_change, self.groups = number, on_change, groups
        self.connected, self.instance, self.session, self.reason = False, "", 0, "not yet"
        self.tiers, self.only_named, self.presence, self.lives = (), (), None, 0
        self.stored = {}  # (namespace, group, hash) -> slot
        self.reserved, self.leases = {}, {}  # slot -> block, lease -> slots
        self.queue, self.numbers = [], 0
        self.full = False
        self.ended = []  # slots of reservations that ended

    def connect(self):
        self.lives += 1
        self.connected, self.instance, self.session, self.reason = True, f"n{self.number}", self.session + 1, ""
        self.on_change()

    def lose(self):
        self.connected, self.instance, self.reason = False, "", "gone"
        self.leases, self.reserved = {}, {}
        queue, self.queue = self.queue, []
        for pending, _ in queue:
            if pending is not None:
                pending.resolve(Failed("gone"))
        self.on_change()

    def handle(self):
        """The next message."""
        pending, act = self.queue.pop(0)
        outcome = act()
        if pending is not None:
            pending.resolve(outcome)

    def ask(self, act):
        pending = Pending(self.session, 1.0)
        if self.connected:
            self.queue.append((pending, act))
        else:
            pending.resolve(Failed("gone"))
        return pending

    def tell(self, act, session):
        if self.connected and session in (None, self.session):
            self.queue.append((None, act))

    def number_of(self):
        self.numbers += 1
        return self.numbers

    def has(self, name, group, block_hash):
        return (name, group, block_hash) in self.stored

    def needed(self, group, end, i):
        window = self.groups[group].window
        return window is None or i >= end - window

    def valid(self, name, hashes, end):
        pairs = [(g, i) for g in range(len(self.groups)) for i in range(end) if self.needed(g, end, i)]
        return all(self.has(name, g, hashes[i]) for g, i in pairs)

    # -- as StoreClient --------------------------------------------------------------------------------------------

    def lookup(self, name, packed, start, limit, seconds, nodes):
        hashes = [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]

        def act():
            end = next((e for e in range(len(hashes), start, -1) if self.valid(name, hashes, e)), start)
            if end == start:
                return Found(0, 0, start, [])
            slots = [
                [self.stored[name, g, hashes[i]] if self.needed(g, end, i) else 0 for i in range(start, end)]
                for g in range(len(self.groups))
            ]
            lease = self.number_of()
            self.leases[lease] = slots
            return Found(0, lease, end, slots)

        return self.ask(act)

    def release(self, lease, session=None):
        def act():
            del self.leases[lease]  # exactly once

        self.tell(act, session)

    def reserve(self, name, tenant, groups, packed, parents, limit):
        names = [(name, g, packed[i * HASH_BYTES : (i + 1) * HASH_BYTES]) for i, g in enumerate(groups)]

        def act():
            slots = []
            for block in names:
                if block in self.stored or block in self.reserved.values():
                    slots.append(EXISTS)
                elif self.full:
                    slots.append(NO_ROOM)
                else:
                    slots.append(3 * self.number_of())
                    self.reserved[slots[-1]] = block
            return Reserved(0, slots)

        return self.ask(act)

    def commit(self, slots, session=None):
        def act():
            for slot in slots:
                self.stored[self.reserved.pop(slot)] = slot  # exactly once

        self.tell(act, session)

    def abort(self, slots, session=None):
        def act():
            for slot in slots:
                del self.reserved[slot]  # exactly once

        self.tell(act, session)


def joined_over(groups, number=2):
    nodes = []

    def connect(node, on_change):
        nodes.append(Node(node, on_change, groups))
        return nodes[-1]

    ranks = [[2 * node, 2 * node + 1] for node in range(number)]
    made = JoinedStoreClient(connect, ranks, [groups] * number, lambda: None)
    for node in nodes:
        node.connect()
    reach(made, nodes)
    return made, nodes


def reach(made, nodes):
    ranks = {rank: node for node in nodes for rank in (2 * node.number, 2 * node.number + 1)}
    return made.reach({rank: (node.instance, LIMIT * PAGE) for rank, node in ranks.items()})


def run(rng, nodes):
    while busy := [node for node in nodes if node.queue]:
        rng.choice(busy).handle()


def names(made, nodes):
    return [made._name(NAME, node.number) for node in nodes]


def fill(rng, made, nodes, groups, hashes):
    """Random blocks, most of them at every node."""
    for g, block_hash in ((g, h) for g in range(len(groups)) for h in hashes):
        common = rng.random() < 0.8
        for node, name in zip(nodes, names(made, nodes), strict=True):
            if common or rng.random() < 0.5:
                node.stored[name, g, block_hash] = 3 * node.number_of()


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]], ids=["full", "window"])
def test_joined_lookup_finds_the_longest_prefix_that_all_stores_have(groups, seed):
    rng = random.Random(f"lookup {seed}")
    made, nodes = joined_over(groups, rng.choice((2, 3)))
    hashes = hashes_of(1)
    fill(rng, made, nodes, groups, hashes)
    start = rng.randrange(2)
    pending = made.lookup(NAME, b"".join(hashes), start, LIMIT)
    run(rng, nodes)
    found = pending.outcome
    valid = lambda end: all(n.valid(name, hashes, end) for n, name in zip(nodes, names(made, nodes), strict=True))  # noqa: E731
    expected = next((end for end in range(len(hashes), start, -1) if valid(end)), start)
    assert (found.num_hash_blocks, bool(found.lease)) == (expected, expected > start)
    if found.lease:
        for g, row in enumerate(found.slots):
            wanted = np.array([slot for slot in row if slot])
            table = made.slots_of(found.lease, g, wanted)
            at = [start + i for i, slot in enumerate(row) if slot]
            assert at == [i for i in range(start, expected) if nodes[0].needed(g, expected, i)]
            for node, name, slots in zip(nodes, names(made, nodes), table, strict=True):
                assert slots.tolist() == [node.stored[name, g, hashes[i]] for i in at]
                assert (made.slots_of(found.lease, g, slots, node.number) == table).all()
        assert [len(node.leases) for node in nodes] == [1] * len(nodes)
        made.release(found.lease)
        made.release(found.lease)
        run(rng, nodes)
    assert not any(node.leases for node in nodes)


@pytest.mark.parametrize("seed", range(150))
def test_joined_client_ends_each_lease_and_reservation_once_whatever_dies(seed):
    """``Node`` raises for what is ended twice. What is found was committed for each node's ranks."""
    rng = random.Random(f"lives {seed}")
    groups = [FULL, WINDOW]
    made, nodes = joined_over(groups, rng.choice((2, 3)))
    lookups, reservations = [], []  # (pending, hashes), (pending, blocks)
    prompts = [hashes_of(number) for number in range(3)]
    for _ in range(200):
        act = rng.random()
        if act < 0.45 and any(node.queue for node in nodes):
            rng.choice([node for node in nodes if node.queue]).handle()
        elif act < 0.55:
            hashes = rng.choice(prompts)
            lookups.append((made.lookup(NAME, b"".join(hashes), 0, LIMIT), hashes))
        elif act < 0.7:
            hashes, (first, last) = rng.choice(prompts), sorted(rng.sample(range(BLOCKS + 1), 2))
            blocks = [(g, hashes[i]) for i in range(first, last) for g in range(len(groups))]
            packed = b"".join(h for _, h in blocks)
            asked = made.reserve(NAME, b"", [g for g, _ in blocks], packed, packed, LIMIT)
            reservations.append((asked, blocks))
        elif act < 0.85:
            for pending, hashes in [each for each in lookups if each[0].outcome is not None]:
                lookups.remove((pending, hashes))
                if isinstance(pending.outcome, Found) and pending.outcome.lease:
                    made.release(pending.outcome.lease, pending.session)
            for pending, blocks in [each for each in reservations if each[0].outcome is not None]:
                reservations.remove((pending, blocks))
                slots = [slot for slot in getattr(pending.outcome, "slots", []) if slot > 0]
                kept = rng.randrange(len(slots) + 1) if pending.session == made.session else 0
                if slots:
                    assert made.reserved_slots(slots).shape == (len(nodes), len(slots))
                made.commit(slots[:kept], pending.session)
                made.abort(slots[kept:], pending.session)
        elif act < 0.9:
            rng.choice(nodes).full ^= True
        elif act < 0.94:
            node = rng.choice(nodes)
            for block in rng.sample(sorted(node.stored), len(node.stored) // 4):
                if not any(node.stored[block] in row for slots in node.leases.values() for row in slots):
                    del node.stored[block]
        else:
            node = rng.choice(nodes)
            node.lose() if node.connected else node.connect()
            assert made.connected == all(each.connected for each in nodes)
            assert bool(reach(made, nodes)) == made.connected
    run(rng, nodes)
    for pending, _ in lookups:
        assert pending.outcome is not None
        if isinstance(pending.outcome, Found) and pending.outcome.lease:
            made.release(pending.outcome.lease)
    for pending, _ in reservations:
        assert pending.outcome is not None
        made.abort([slot for slot in getattr(pending.outcome, "slots", []) if slot > 0])
    run(rng, nodes)
    assert not any(node.leases or node.reserved for node in nodes)
    assert not made._leases and not made._reserved


@pytest.mark.parametrize("answers, expected, aborted", [
    ((EXISTS, EXISTS), EXISTS, ([], [])),
    ((7, 9), (7, 9), ([], [])),
    ((EXISTS, 9), (0, 9), ([], [])),
    ((7, NO_ROOM), NO_ROOM, ([7], [])),
    ((NO_PARENT_STORED, 9), NO_PARENT_STORED, ([], [9])),
    ((EXISTS, NO_ROOM), NO_ROOM, ([], [])),
    ((7, 0), 0, ([7], [])),
])  # fmt: skip
def test_joined_reservation_needs_every_store(answers, expected, aborted):
    made, nodes = joined_over([FULL])
    pending = made.reserve(NAME, b"", [0], hashes_of(1)[0], hashes_of(1)[0], LIMIT)
    for node, slot in zip(nodes, answers, strict=True):
        node.abort = lambda slots, session, node=node: node.ended.extend(slots)
        node.queue.pop()[0].resolve(Reserved(0, [slot]))
    [slot] = pending.outcome.slots
    if isinstance(expected, tuple):
        assert made.reserved_slots([slot]).T.tolist() == [list(expected)]
        assert made.lacking(slot) == tuple(each > 0 for each in expected)
    else:
        assert slot == expected
    assert tuple(node.ended for node in nodes) == aborted


@pytest.mark.parametrize("what", ["lookup", "reserve"])
def test_joined_answer_is_void_if_a_store_that_answered_has_reconnected(what):
    """What it granted has ended, and another block may have the slot."""
    made, nodes = joined_over([FULL])
    [block_hash] = hashes_of(1, 1)
    if what == "lookup":
        for node, name in zip(nodes, names(made, nodes), strict=True):
            node.stored[name, 0, block_hash] = 3
        pending = made.lookup(NAME, block_hash, 0, LIMIT)
    else:
        pending = made.reserve(NAME, b"", [0], block_hash, block_hash, LIMIT)
    nodes[0].handle()
    nodes[0].lose()
    nodes[0].connect()
    run(random.Random(0), nodes)
    assert isinstance(pending.outcome, Failed)
    assert not any(node.leases or node.reserved for node in nodes)


def lies(right):
    yield Found(0, right.lease, right.num_hash_blocks, [[LIMIT - 1] * 3])
    yield Found(0, right.lease, right.num_hash_blocks, [[5, 0, 6]])
    yield Found(0, right.lease, right.num_hash_blocks, [[5, 6]])
    yield Found(0, right.lease, right.num_hash_blocks, [])
    yield Reserved(0, [5])
    yield Failed("late")


@pytest.mark.parametrize("number", range(6))
def test_joined_lookup_with_a_malformed_answer_is_a_miss(number):
    made, nodes = joined_over([FULL])
    for node, name in zip(nodes, names(made, nodes), strict=True):
        node.stored |= {(name, 0, h): 3 * node.number_of() for h in hashes_of(1, 3)}
    pending = made.lookup(NAME, b"".join(hashes_of(1, 3)), 0, LIMIT)
    nodes[0].handle()
    asked, act = nodes[1].queue.pop()
    right = act()
    nodes[1].abort = lambda slots, session: None
    lie = list(lies(right))[number]
    asked.resolve(lie)
    run(random.Random(0), nodes)
    assert isinstance(pending.outcome, Failed) and not nodes[0].leases
    assert bool(nodes[1].leases) == (not isinstance(lie, Found))


def test_joined_namespaces_depend_on_the_ranks_of_each_node():
    """Else one engine's first rank would load what another's second rank stored on this node."""
    names = set()
    for ranks in ([[0], [1]], [[1], [0]], [[0, 1], [2, 3]], [[0, 1, 2], [3]]):
        made = JoinedStoreClient(lambda *_: SimpleNamespace(), ranks, [[FULL]] * 2, lambda: None)
        assert made.names_of(NAME) == [made._name(NAME, 0), made._name(NAME, 1)]
        names |= {*made.names_of(NAME), NAME}
    assert len(names) == 7, "the second has the first one's, on other nodes"


def test_joined_promotion_ends_where_the_shortest_does():
    made, nodes = joined_over([FULL])
    for first, second, expected in (
        (TierQuery(6, 0.5, 0.0), None, None),  # the second has nothing, and nothing comes
        (TierQuery(6, 0.5, 0.0), TierQuery(4, 0.1, 0.0), TierQuery(4, 0.5, 0.0)),
        (TierQuery(6, 0.5, 0.0), TierQuery(0, 0.1, 0.2), TierQuery(0, 0.5, 0.2)),
    ):
        pending = made.lookup(NAME, b"".join(hashes_of(1)), 0, LIMIT)
        for node, promotion in zip(nodes, (first, second), strict=True):
            node.queue.pop()[0].resolve(Found(0, 0, 0, [], promotion))
        assert (pending.outcome.lease, pending.outcome.promotion) == (0, expected)


def test_joined_questions_are_answered_by_the_store_that_has_least():
    made, nodes = joined_over([FULL])
    for node, count in zip(nodes, (5, 3), strict=True):
        node.explain = lambda *args, node=node, count=count: node.ask(lambda: Explained(0, count, [count]))
    pending = made.explain(NAME, b"", 0.0)
    run(random.Random(0), nodes)
    assert pending.outcome.num_hash_blocks == 3
    pending = made.explain(NAME, b"", 0.0)
    nodes[1].lose()
    run(random.Random(0), nodes)
    assert pending.outcome == Failed("gone")

"""What engines publish of tiers, whatever happens to blocks, tiers, connections and the store: when all was delivered,
a router's view is what the store serves."""

import hashlib

import pytest
from events_model import FakeTier, Loop, Router, Wire, fake_request, places_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import WITHOUT_SHRINKING, Clock
from vllm.distributed.kv_events import AllBlocksCleared

from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.block_entry import READY
from vllm_kvtier.store.index.index import HASH_BYTES, Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import NO_PARENT, GroupShape
from vllm_kvtier.store.server import event_feed as event_feed_module
from vllm_kvtier.store.server.event_feed import EventFeed

HASH_BLOCK_SIZE, PAGES, EVERYTHING = 4, 40, 1 << 30
NAMESPACE_IDS = [bytes([n]) * HASH_BYTES for n in range(1, 4)]
SHAPES = [
    GroupShape(hash_blocks_per_block=1, slot_pages=3),
    GroupShape(hash_blocks_per_block=2, slot_pages=2, window=16),
]
GROUPS = [(HASH_BLOCK_SIZE, None), (2 * HASH_BLOCK_SIZE, 16)]
ENGINES = (1, 2)
TIERS = ["disk", "nodes", "object", "mooncake"]
WRITTEN = {0: "disk", 2: "object", 3: "mooncake"}


def tokens_of(branch: int) -> list[int]:
    """Chains of 8 units that share their first 4."""
    return [1] * (4 * HASH_BLOCK_SIZE) + [branch + 2] * (4 * HASH_BLOCK_SIZE)


def hashes_of(tokens: list[int]) -> list[bytes]:
    found, last = [], b""
    for at in range(0, len(tokens), HASH_BLOCK_SIZE):
        last = hashlib.sha256(last + bytes(tokens[at : at + HASH_BLOCK_SIZE])).digest()
        found.append(last)
    return found


class Machine(RuleBasedStateMachine):
    @initialize(most_waiting=st.sampled_from([3, 1000]), batch=st.sampled_from([1, 4, 512]), take=st.integers(1, 40))
    def begin(self, most_waiting, batch, take):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(event_feed_module, "MAX_WAITING", most_waiting)
        self.patch.setattr(event_feed_module, "BATCH_BLOCKS", batch)
        self.patch.setattr(event_feed_module, "RECHECK_LABELS", 2)
        self.patch.setattr(event_feed_module, "MAX_AWAITED_LABELS", 3)
        self.most, self.clock, self.loop = take, Clock(), Loop()
        self.events, self.wires, self.routers, self.woken = {}, {}, {}, {}
        for number in ENGINES:
            events = Events(GROUPS, HASH_BLOCK_SIZE, self.loop, lambda number=number: self.woken.update({number: True}))
            events.join(NAMESPACE_IDS[0])
            self.events[number] = events
            self.wires[number] = Wire(number, events, TIERS)
            # One takes everything as it is meant, one knows no localities, one clears the GPU's blocks alone.
            self.routers[number] = [Router(), Router(localities=False), Router(clears=False)]
        self.namespaces = {number: [NAMESPACE_IDS[0]] for number in ENGINES}
        self.start_store()

    def start_store(self):
        self.index = Index(SlotPool(PAGES, PAGES), None, self.clock)
        self.index.grow(PAGES)
        self.tiers = [FakeTier(name) for name in TIERS]
        self.changes = EventFeed(self.index, self.tiers, self.send, self.loop.call_soon)
        self.reserved = {number: [] for number in ENGINES}
        self.labelled = set()
        for number, wire in self.wires.items():
            self.index.connect(number, HASH_BLOCK_SIZE, SHAPES)
            wire.connect(self.changes)

    def send(self, number, message):
        self.wires[number].to_engine.append(m.encode(message))

    def teardown(self):
        if hasattr(self, "wires"):
            self.settle()
            self.patch.undo()

    # -- blocks --------------------------------------------------------------------------------------------------

    @rule(
        number=st.sampled_from(ENGINES), branch=st.integers(0, 2), num_hash_blocks=st.integers(1, 8),
        group=st.integers(0, 1),
        labels=st.booleans(), ends=st.sampled_from(["commit", "abort", "later"]),
    )  # fmt: skip
    def store(self, number, branch, num_hash_blocks, group, labels, ends):
        if not self.wires[number].connected:
            return
        namespace_id, per = self.namespaces[number][-1], SHAPES[group].hash_blocks_per_block
        tokens = tokens_of(branch)
        hashes = hashes_of(tokens)
        rows = range(num_hash_blocks // per)
        if not rows:
            return
        cut = [hashes[(i + 1) * per - 1][:HASH_BYTES] for i in rows]
        parents = [hashes[i * per - 1][:HASH_BYTES] if i else NO_PARENT for i in rows]
        slots = self.index.reserve(
            number, namespace_id, b"", [group] * len(rows), b"".join(cut), b"".join(parents), EVERYTHING
        )
        if labels:
            events = self.events[number]
            events.send_labels(namespace_id, events.describe(namespace_id, fake_request(tokens, hashes), group, rows))
        given_slots = [slot for slot in slots if slot > 0]
        if ends == "commit":
            self.index.commit(number, given_slots)
        elif ends == "abort":
            self.index.abort(number, given_slots)
        else:
            self.reserved[number] += given_slots

    @rule(number=st.sampled_from(ENGINES))
    def commit_later(self, number):
        self.index.commit(number, self.reserved[number])
        self.reserved[number] = []

    @rule(seconds=st.sampled_from([1.0, 200.0]))
    def pass_time(self, seconds):
        self.clock.now += seconds
        self.index.tick()

    @rule(data=st.data())
    def discard(self, data):
        names = self.names()
        if names:
            name = data.draw(st.sampled_from(names))
            self.index.remove(*name)
            for tier in self.tiers:
                tier.lose(name)

    @rule(namespace_id=st.sampled_from([None, *NAMESPACE_IDS]))
    def clear(self, namespace_id):
        self.index.clear(namespace_id)
        for tier in self.tiers:
            for name in list(tier.kept):
                if namespace_id in (None, name[0]):
                    tier.lose(name)

    @rule(data=st.data(), where=st.sampled_from([[0], [2], [0, 2], [3], [0, 2, 3]]))
    def write_down(self, data, where):
        names = [name for name in self.names() if self.index.find(*name).state is READY]
        name = data.draw(st.sampled_from(names)) if names else None
        for which in where if names else ():
            if self.tiers[which].usable:
                self.tiers[which].put(name)

    @rule(data=st.data(), which=st.sampled_from(sorted(WRITTEN)))
    def give_up_below(self, data, which):
        if self.tiers[which].kept:
            self.tiers[which].lose(data.draw(st.sampled_from(sorted(self.tiers[which].kept))))

    @rule(which=st.sampled_from(sorted(WRITTEN)), usable=st.booleans())
    def turn(self, which, usable):
        self.tiers[which].turn(usable)

    # -- engines -------------------------------------------------------------------------------------------------

    @rule(number=st.sampled_from(ENGINES), namespace_id=st.sampled_from(NAMESPACE_IDS))
    def join(self, number, namespace_id):
        """As for a request with another adapter."""
        if namespace_id not in self.namespaces[number]:
            self.namespaces[number].append(namespace_id)
            self.events[number].join(namespace_id)

    @rule(number=st.sampled_from(ENGINES), namespace_id=st.sampled_from(NAMESPACE_IDS))
    def renew(self, number, namespace_id):
        self.namespaces[number] = [namespace_id]
        self.events[number].leave()
        self.events[number].join(namespace_id)

    @rule(number=st.sampled_from(ENGINES))
    def reset(self, number):
        """Of vLLM's own prefix cache; its event is published with or before ours."""
        for router in self.routers[number]:
            router.hear([AllBlocksCleared()])
        self.events[number].publish_again()

    @rule(number=st.sampled_from(ENGINES))
    def reconnect(self, number):
        self.wires[number].lose()
        self.index.disconnect(number)
        self.reserved[number] = []
        self.index.connect(number, HASH_BLOCK_SIZE, SHAPES)
        self.wires[number].connect(self.changes)

    @rule(data=st.data(), keeps=st.booleans())
    def restart_store(self, data, keeps):
        before = self.tiers
        for wire in self.wires.values():
            wire.lose()
        self.start_store()
        if keeps:  # the disk's content is found again, but without labels
            for old, new in zip(before, self.tiers, strict=True):
                new.kept = old.kept

    # -- time ----------------------------------------------------------------------------------------------------

    @rule(number=st.sampled_from(ENGINES), count=st.integers(1, 5), way=st.sampled_from(["store", "engine", "soon"]))
    def deliver(self, number, count, way):
        wire = self.wires[number]
        for _ in range(count):
            if way == "soon":
                self.run()
            elif way == "store":
                wire.to_store and self.deliver_to_store(wire)
            else:
                wire.deliver_to_engine()

    @rule(number=st.sampled_from(ENGINES))
    def take(self, number):
        self.woken.pop(number, None)
        said = self.events[number].take(self.most)
        for router in self.routers[number]:
            router.said(said)

    @rule()
    def settle(self):
        """All that is under way arrives, and each engine publishes what it has to say. No engine waits for a call that
        does not come: a store with something to publish has woken the engine."""
        busy = True
        while busy:
            self.run()
            busy = any([self.deliver_to_store(w) | w.deliver_to_engine() for w in self.wires.values()])
            for number in ENGINES:
                while self.woken.get(number):
                    self.woken.pop(number)
                    self.publish_idle(number)
                    busy = True
        for number in ENGINES:
            assert not self.events[number].take(1000), "no call would have fetched this"
            self.check(number)

    def publish_idle(self, number):
        while self.events[number].behind:  # some blocks that are compared have no event
            said = self.events[number].take(self.most)
            for router in self.routers[number]:
                router.said(said)

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self, number):
        namespaces = self.namespaces[number]
        served = {each: set() for each in ("memory", *WRITTEN.values())}
        labelled = {each: set() for each in served}
        for namespace_id in namespaces:
            for branch in range(3):
                hashes = hashes_of(tokens_of(branch))
                for group, shape in enumerate(SHAPES):
                    for whole in hashes[shape.hash_blocks_per_block - 1 :: shape.hash_blocks_per_block]:
                        name = namespace_id, group, whole[:HASH_BYTES]
                        entry = self.index.find(*name)
                        there = {"memory": entry is not None and entry.state is READY}
                        there |= {each: self.tiers[i].keeps(*name) for i, each in WRITTEN.items()}
                        for each in served:
                            if there[each]:
                                served[each].add((whole, group))
                                if name in self.labelled:
                                    labelled[each].add((whole, group))
        least, most = places_of(labelled), places_of(served)
        for router in self.routers[number]:
            for where in most:
                if router.localities:
                    seen, must, may = router.view.get(where, set()), least[where], most[where]
                else:
                    seen = router.view.get((where[0], None), set())
                    must, may = (set().union(*(x[w] for w in x if w[0] == where[0])) for x in (least, most))
                assert must <= seen <= may, (where, router.localities, router.clears)
            self.check_prefixes(router, namespaces)

    def check_prefixes(self, router, namespaces):
        """What a router takes for a prefix in memory, a lookup finds (full attention alone: the other group's windows
        are for routers that look at groups)."""
        memory = router.blocks("CPU", "LOCAL")
        for branch in range(3):
            hashes = hashes_of(tokens_of(branch))
            run = next((i for i, each in enumerate(hashes) if (each, 0) not in memory), len(hashes))
            found = 0
            for namespace_id in namespaces:
                rows = [self.index.find(namespace_id, 0, each[:HASH_BYTES]) for each in hashes]
                here = [entry is not None and entry.state is READY for entry in rows]
                found = max(found, here.index(False) if False in here else len(here))
            assert run <= found or len(namespaces) > 1

    def run(self):
        self.loop.run()

    def deliver_to_store(self, wire):
        if wire.to_store:
            request = m.decode_request(wire.to_store[0])
            if isinstance(request, m.Labels) and request.namespace_id in self.following(wire.number):
                for i, group in enumerate(request.groups):
                    name = request.namespace_id, group, request.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                    if self.exists(name):
                        self.labelled.add(name)
        return wire.deliver_to_store()

    def following(self, number):
        follower = self.changes._followers.get(number)
        return follower.namespaces if follower is not None else ()

    def exists(self, name):
        return self.index.find(*name) is not None or any(tier.keeps(*name) for tier in self.tiers)

    def names(self):
        found = []
        for namespace_id in NAMESPACE_IDS:
            for branch in range(3):
                for group, shape in enumerate(SHAPES):
                    for whole in hashes_of(tokens_of(branch))[
                        shape.hash_blocks_per_block - 1 :: shape.hash_blocks_per_block
                    ]:
                        if self.index.find(namespace_id, group, whole[:HASH_BYTES]) is not None:
                            found.append((namespace_id, group, whole[:HASH_BYTES]))
        return sorted(set(found))

    @invariant()
    @precondition(lambda self: hasattr(self, "changes"))
    def forget_labels_of_what_is_gone(self):
        self.labelled = {name for name in self.labelled if self.exists(name)}

    @invariant()
    @precondition(lambda self: hasattr(self, "changes"))
    def nothing_grows(self):
        labels, nbytes = self.changes.labelled
        assert (labels == 0) == (nbytes == 0)
        for follower in self.changes._followers.values():
            assert all(len(each) <= event_feed_module.MAX_WAITING for each in follower.waiting.values())


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, phases=WITHOUT_SHRINKING)
TestEvents = Machine.TestCase

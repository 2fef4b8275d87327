"""The real Offloader and BlockTables in lives of a small engine, with a store and workers that do as they like.

The model knows what each block of the cache holds: for every cell the whole prefix of tokens that its KV depends on.
When a worker copies a block, possibly long after it was ordered, the block must still hold what its hash says: a
checksum made then would make anything else pass for right. Every block pinned is given back exactly once, and not
before the store refused it or all its writers are through.
"""

import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import WITHOUT_SHRINKING, FakePool, make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier import codecs
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler import offloading
from vllm_kvtier.scheduler.ledger import Keys
from vllm_kvtier.scheduler.offloading import Offloader
from vllm_kvtier.scheduler.tables import BlockTables, Growth
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.messages import EXISTS, HASH, MAX_ITEMS, NO_PARENT, NO_PARENT_STORED, NO_ROOM, Reserved
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.wire import messages as m

UNIT = 4
BLOCKS = 100
KEYS = Keys(0x51A7)


class FakeReactor:
    """Queued calls, run when the test says so."""

    def __init__(self):
        self.queue = []

    def call_soon(self, callback):
        self.queue.append(callback)

    def run(self):
        while self.queue:
            self.queue.pop(0)()


class FakePending:
    """``store.client.Pending`` as far as it is used here."""

    def __init__(self, session):
        self.session, self.outcome, self._callbacks = session, None, []

    def then(self, callback):
        if self.outcome is None:
            self._callbacks.append(callback)
        else:
            callback(self)

    def resolve(self, outcome):
        assert self.outcome is None
        self.outcome = outcome
        for callback in self._callbacks:
            callback(self)


class FakeTier:
    """A store that answers when told to; it remembers of each slot what it was given for."""

    def __init__(self, writers):
        self.writers, self.instance, self.session = writers, "s1", 1
        self.logical, self.codecs = [100 * (g + 1) for g in range(len(writers))], [codecs.get("raw")] * len(writers)
        self.codecs, self.logical = [SimpleNamespace(name="none") for _ in writers], [100 for _ in writers]
        self.up = True
        self.asked = []  # (pending, items, limit)
        self.entries = {}  # (space, group, hash) -> slot
        self.items = {}  # slot -> SimpleNamespace
        self.next_slot = 0

    def limit(self):
        return 1 << 30 if self.up else 0

    def space(self, variant):
        return b"space".ljust(HASH) if not variant else variant[:8].ljust(HASH)

    def reserve(self, space, tenant, groups, hashes, parents):
        assert len(groups) * HASH == len(hashes) == len(parents) and groups
        assert len(groups) <= MAX_ITEMS
        pending = FakePending(self.session)
        items = [
            SimpleNamespace(
                space=space, tenant=tenant, group=g, hash=hashes[i * HASH : (i + 1) * HASH],
                parent=parents[i * HASH : (i + 1) * HASH], session=self.session, fate=None, copied=set(),
            )
            for i, g in enumerate(groups)
        ]  # fmt: skip
        if self.up:
            self.asked.append((pending, items))
        else:
            pending.resolve(Failed("gone"))
        return pending

    def answer(self, at, full_groups, room=lambda: True):
        """Answer one question as the index would."""
        pending, items = self.asked.pop(at)
        out = []
        for item in items:
            key, parent = (item.space, item.group, item.hash), (item.space, item.group, item.parent)
            if key in self.entries:
                out.append(EXISTS)
            elif item.group in full_groups and item.parent != NO_PARENT and parent not in self.entries:
                out.append(NO_PARENT_STORED)
            elif not room():
                out.append(NO_ROOM)
            else:
                self.next_slot += 1
                self.entries[key] = self.next_slot
                self.items[self.next_slot] = item
                out.append(self.next_slot)
        pending.resolve(Reserved(1, out))

    def forget(self, slots):
        """Evicted, or its writer gave up."""
        for key in [k for k, slot in self.entries.items() if slot in slots]:
            del self.entries[key]

    def die(self, instance):
        """All connections end; what was asked fails."""
        self.up = False
        asked, self.asked = self.asked, []
        for pending, _ in asked:
            pending.resolve(Failed("gone"))
        if instance != self.instance:
            self.entries.clear()
        self.next_instance = instance

    def live(self):
        self.up, self.instance, self.session = True, self.next_instance, self.session + 1

    def end(self, slots, session, fate):
        for slot in slots:
            item = self.items[slot]
            assert item.fate is None, f"slot {slot} ends twice"
            assert item.session == session, "a slot is only of use on the connection that reserved it"
            item.fate = fate
            if fate == "committed":
                assert item.copied == self.writers[item.group], "committed before every part was written"

    def commit(self, slots, session):
        self.end(slots, session, "committed")

    def abort(self, slots, session):
        self.end(slots, session, "aborted")
        self.forget(set(slots))


class Running:
    def __init__(self, name, plan, prompt, groups, salt):
        self.request = make_request(name, plan[:prompt], UNIT, salt=salt)
        self.plan, self.prompt = plan, prompt
        self.tables = [[] for _ in groups]
        self.status = "waiting"  # waiting, running, preempted
        self.unread = 0  # tokens sampled whose output was not read yet


class Engine:
    """A small vLLM with asynchronous scheduling, if ``lag`` is 1: tokens are known a step after they are scheduled."""

    def __init__(self, groups, seed, lag, write="all", share=0.5):
        self.rng = random.Random(seed)
        self.groups, self.lag = groups, lag
        self.full = {g for g, (_, window) in enumerate(groups) if window is None}
        self.fake = FakePool(BLOCKS, UNIT)
        self.reactor, self.counters = FakeReactor(), Counters()
        self.tier = FakeTier([{0} if g % 2 else {0, 1} for g in range(len(groups))])
        self.orders = {0: [], 1: []}  # by rank: StoreBlocks not reported yet
        self.woken = 0
        self.offloader = Offloader(
            KVTierConfig(store_write=write, store_hold_share=share), self.tier, BlockPool(self.fake), lambda: KEYS,
            groups, self.counters, self.reactor, self.told, self.wake,
        )  # fmt: skip
        self.most = int(BLOCKS * share)
        self.tables = BlockTables(groups, UNIT, lambda ids: None, lambda t: self.offloader.wanted())
        self.requests, self.made, self.step_number = {}, 0, 0
        self.content = [[None] * (4 * UNIT) for _ in range(BLOCKS)]
        self.meaning = {}  # (hash, salt) -> (full hash, tokens of the prefix)
        self.copies = self.restarts = 0

    def wake(self):
        self.woken += 1

    def told(self, message):
        """To all workers."""
        if isinstance(message, m.StoreBlocks):
            assert m.decode_link(m.encode(message)) == message
            for rank in self.orders:
                if rank in self.tier.writers[message.group]:
                    self.orders[rank].append(message)
        else:
            for rank, orders in self.orders.items():
                gone = [o.order for o in orders if o.order in message.orders and self.rng.random() < 0.8]
                self.report(rank, [], gone)

    # -- vLLM ------------------------------------------------------------------------------------------------------

    def new_request(self, plan=None, prompt=None, salt=None):
        rng = self.rng
        if plan is None:
            plan = [1] * (rng.randint(0, 4) * UNIT) + [int(rng.random() < 0.3) for _ in range(rng.randint(2, 9 * UNIT))]
            prompt, salt = rng.randint(1, len(plan)), rng.choice([None, None, "tenant"])
        self.made += 1
        r = Running(f"r{self.made}", plan, prompt, self.groups, salt)
        r.tracked = SimpleNamespace(request=r.request)
        for i, full in enumerate(make_request("all", plan, UNIT, salt=salt).block_hashes):
            self.meaning[bytes(full)[:HASH]] = bytes(full), (salt, *plan[: (i + 1) * UNIT])
        self.requests[r.request.request_id] = r
        return r

    def slide(self, r):
        for g, (size, window) in enumerate(self.groups):
            if window is not None:
                for i in range(min(len(r.tables[g]), max(0, r.request.num_computed_tokens - window + 1) // size)):
                    self.give_back([r.tables[g][i]])
                    r.tables[g][i] = 0

    def give_back(self, ids):
        self.fake.free_blocks([self.fake.blocks[i] for i in ids if i])

    def release(self, r):
        for ids in r.tables:
            self.give_back(ids)
        r.tables = [[] for _ in self.groups]

    def grow(self, r, tokens):
        """Blocks for ``tokens``; None if there are not enough."""
        sizes = [size for size, _ in self.groups]
        lacking = sum(max(0, -(-tokens // n) - len(ids)) for n, ids in zip(sizes, r.tables, strict=True))
        free = len(self.fake.free_ids())
        if lacking > free:
            self.offloader.relieve(lacking - free)
            if lacking > len(self.fake.free_ids()):
                return None
        new = []
        for g, (size, _) in enumerate(self.groups):
            fresh = []
            while len(r.tables[g]) < -(-tokens // size):
                fresh.append(self.fake.take(self.rng.choice(self.fake.free_ids())))
                r.tables[g].append(fresh[-1])
            new.append(fresh)
        return tuple(new)

    def hit(self, r):
        """Blocks of another request with the same beginning, as a prefix cache finds them."""
        for other in self.requests.values():
            n = min(r.request.num_tokens - 1, other.request.num_computed_tokens - other.unread)
            n = n // (2 * UNIT) * (2 * UNIT)
            same = other.request.cache_salt == r.request.cache_salt and other.plan[:n] == r.plan[:n]
            if other is r or other.status != "running" or not n or not same:
                continue
            tables = []
            for g, (size, window) in enumerate(self.groups):
                skipped = 0 if window is None else max(0, n - window + 1) // size
                tables.append([0] * skipped + other.tables[g][skipped : n // size])
            needed = [
                ids[0 if window is None else max(0, n - window + 1) // size :]
                for ids, (size, window) in zip(tables, self.groups, strict=True)
            ]
            if all(all(ids) for ids in needed):
                return n, tables
        return 0, [[] for _ in self.groups]

    def step(self, every=0.8):
        rng, new, cached, scheduled = self.rng, [], [], {}
        self.read_outputs()
        self.offloader.drain()
        for name, r in list(self.requests.items()):
            request = r.request
            if rng.random() >= every:
                continue
            if r.status != "running":
                request.num_computed_tokens, tables = self.hit(r)
                for ids in tables:
                    self.fake.touch([self.fake.blocks[i] for i in ids if i])
                r.tables = [list(ids) for ids in tables]
            known = min(len(r.plan), request.num_tokens + r.unread)
            chunk = min(known - request.num_computed_tokens, rng.randint(1, 5 * UNIT))
            if chunk <= 0:
                continue
            before = request.num_computed_tokens
            if r.status == "running":
                self.slide(r)
            fresh = self.grow(r, before + chunk)
            if fresh is None:
                self.preempt(r)
                continue
            whole = tuple(list(ids) for ids in r.tables)
            if r.status == "running":
                cached.append((name, fresh, before, False))
            elif r.status == "preempted" and rng.random() < 0.5:
                cached.append((name, whole, before, True))
            else:
                new.append(SimpleNamespace(req_id=name, block_ids=whole, num_computed_tokens=before))
            r.status, scheduled[name] = "running", chunk
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[c[0] for c in cached],
                new_block_ids=[c[1] if any(c[1]) else None for c in cached],
                num_computed_tokens=[c[2] for c in cached],
                resumed_req_ids={c[0] for c in cached if c[3]},
            ),
            num_scheduled_tokens=scheduled,
        )
        self.step_number += 1
        growth = self.tables.begin_step(output, lambda name: self.requests[name].tracked)
        self.offloader.begin_step(self.step_number, growth)
        for name, chunk in scheduled.items():
            r = self.requests[name]
            first = r.request.num_computed_tokens
            self.forward(r, first, first + chunk)
            r.request.num_computed_tokens += chunk
            if r.request.num_computed_tokens == r.request.num_tokens + r.unread < len(r.plan):
                r.unread += 1
        if not self.lag:
            self.read_outputs()

    def forward(self, r, first, last):
        """In the model it runs at once; orders of the step may be copied from now on."""
        for g, (size, _) in enumerate(self.groups):
            for at in range(first, last):
                block = r.tables[g][at // size]
                if block:
                    self.content[block][at % size] = (r.request.cache_salt, *r.plan[: at + 1])

    def read_outputs(self):
        for r in self.requests.values():
            while r.unread:
                r.request.append_output_token_ids(r.plan[r.request.num_tokens])
                r.unread -= 1

    def preempt(self, r=None):
        running = [r for r in self.requests.values() if r.status == "running"] if r is None else [r]
        if running:
            r = self.rng.choice(running)
            self.release(r)
            while r.unread:
                r.request.append_output_token_ids(r.plan[r.request.num_tokens])
                r.unread -= 1
            r.status, r.request.num_computed_tokens = "preempted", 0

    def finish(self, r=None, well=None):
        if r is None and self.requests:
            r = self.rng.choice(list(self.requests.values()))
        if r is None:
            return
        well = self.rng.random() < 0.7 if well is None else well
        done = r.status == "running" and r.request.num_computed_tokens >= r.request.num_prompt_tokens
        r.request.status = (
            RequestStatus.FINISHED_STOPPED if well and done and not r.unread else RequestStatus.FINISHED_ABORTED
        )
        name = r.request.request_id
        self.offloader.finished(r.tracked, self.tables.forget(name), tuple(list(ids) for ids in r.tables))
        self.release(r)
        del self.requests[name]

    # -- the store and the workers -----------------------------------------------------------------------------------

    def store_answers(self):
        tier, rng = self.tier, self.rng
        if not tier.asked:
            return
        at = rng.randrange(len(tier.asked))
        how = rng.random()
        if how < 0.05:
            tier.asked.pop(at)[0].resolve(Failed("too slow"))
        elif how < 0.1:
            tier.asked.pop(at)[0].resolve(Reserved(1, [EXISTS]) if rng.random() < 0.5 else Reserved(1, []))
        else:
            tier.answer(at, self.full, lambda: rng.random() < 0.9)

    def store_forgets(self):
        ready = [slot for slot, item in self.tier.items.items() if item.fate == "committed"]
        self.tier.forget(set(self.rng.sample(ready, min(len(ready), 3))))

    def store_restarts(self):
        if self.tier.up:
            self.restarts += 1
            self.tier.die(self.rng.choice([self.tier.instance, f"s{self.restarts + 1}"]))
        else:
            self.tier.live()

    def worker_acts(self):
        rank = self.rng.choice([0, 1])
        ready = [o for o in self.orders[rank] if o.step <= self.step_number]
        if not ready:
            return
        order = self.rng.choice(ready)
        if order.instance != self.tier.instance or self.rng.random() < 0.1:
            self.report(rank, [], [order.order])
            return
        self.copy(rank, order)
        self.report(rank, [order.order], [])

    def copy(self, rank, order):
        self.copies += 1
        size = self.groups[order.group][0]
        blocks, slots = np.frombuffer(order.blocks, np.int64).tolist(), np.frombuffer(order.slots, np.int64).tolist()
        keys = np.frombuffer(order.keys, np.uint64).tolist()
        assert len(blocks) == len(keys) == len(slots) == len(set(slots)) > 0
        for block, key, slot in zip(blocks, keys, slots, strict=True):
            item = self.tier.items[slot]
            full, prefix = self.meaning[item.hash]
            assert item.group == order.group and key == KEYS.key(full, order.group, b"")
            assert self.fake.blocks[block].ref_cnt > 0, "a block that is copied belongs to somebody else"
            tokens = len(prefix) - 1  # without the salt
            assert tokens % size == 0
            expected = [prefix[: tokens - size + j + 2] for j in range(size)]
            assert self.content[block][:size] == expected, "this is not what the hash says"
            if tokens > size:
                assert self.meaning[item.parent][1] == prefix[: tokens - size + 1]
            else:
                assert item.parent == NO_PARENT
            assert bool(item.tenant) == (prefix[0] is not None)
            item.copied.add(rank)

    def report(self, rank, done, dropped):
        self.orders[rank] = [o for o in self.orders[rank] if o.order not in (*done, *dropped)]
        message = m.Stored(rank, done, dropped, 100 * len(done), 0.1)
        self.reactor.call_soon(lambda: self.offloader.stored(message))

    # -- what always holds -------------------------------------------------------------------------------------------

    def bounds(self):
        assert 0 <= self.offloader.pinned <= self.most
        held = sum(b.ref_cnt for b in self.fake.blocks)
        ours = sum(1 for r in self.requests.values() for ids in r.tables for i in ids if i)
        assert held == ours + self.offloader.pinned
        waiting = {i for orders in self.orders.values() for o in orders for i in np.frombuffer(o.blocks, np.int64)}
        for block in waiting:
            assert self.fake.blocks[block].ref_cnt > 0

    def settle_down(self):
        """Everybody answers."""
        for _ in range(100):
            self.reactor.run()
            while self.tier.asked:
                self.tier.answer(0, self.full)
            self.reactor.run()
            for rank in (0, 1):
                for order in list(self.orders[rank]):
                    if order.instance == self.tier.instance:
                        self.copy(rank, order)
                        self.report(rank, [order.order], [])
                    else:
                        self.report(rank, [], [order.order])
            self.offloader.drain()
            if not (self.reactor.queue or self.tier.asked or any(self.orders.values())):
                return
        raise AssertionError("it never becomes quiet")

    def end(self):
        for r in list(self.requests.values()):
            self.finish(r, False)
        if not self.tier.up:
            self.tier.live()
        self.settle_down()
        self.bounds()
        assert self.offloader.pinned == 0 and not self.offloader.has_frees() and not len(self.tables)
        assert all(b.ref_cnt == 0 for b in self.fake.blocks)
        assert all(item.fate for item in self.tier.items.values()), "a reservation was forgotten"


GROUPS = {
    "full": [(UNIT, None)],
    "windows": [(UNIT, None), (UNIT, 6)],
    "sizes": [(2 * UNIT, None), (UNIT, 9), (UNIT, None)],
}


@pytest.mark.parametrize("lag", [0, 1], ids=["", "asynchronous"])
@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_a_life_of_an_engine(groups, lag, seed, share):
    engine = Engine(GROUPS[groups], seed, lag, share=share)
    events = {
        engine.step: 8, engine.new_request: 2, engine.finish: 1.2, engine.preempt: 0.7, engine.reactor.run: 6,
        engine.store_answers: 6, engine.store_forgets: 0.5, engine.store_restarts: 0.5, engine.worker_acts: 12,
        lambda: engine.offloader.relieve(engine.rng.randint(1, 9)): 0.5, lambda: engine.offloader.settle(0): 0.1,
    }  # fmt: skip
    for _ in range(300):
        engine.rng.choices(list(events), list(events.values()))[0]()
        engine.bounds()
    engine.end()


# -- single cases ----------------------------------------------------------------------------------------------------


def run(engine, r, steps=40):
    """Schedule it until all its tokens are computed."""
    for _ in range(steps):
        engine.step(every=1.1)
        if r.request.num_computed_tokens == len(r.plan):
            return
    raise AssertionError("not computed")


def flush(engine, r):
    """Ask for all that was collected so far, as the end of any request does."""
    engine.offloader.finished(r.tracked, None, ())


def stored(engine, r, g=0):
    """Numbers of the blocks of the plan that the store has."""
    size = engine.groups[g][0]
    hashes = make_request("x", r.plan, UNIT, salt=r.request.cache_salt).block_hashes
    ready = {(item.group, item.hash) for item in engine.tier.items.values() if item.fate == "committed"}
    present = {(group, h) for (_, group, h) in engine.tier.entries} & ready
    blocks = range(len(r.plan) // size)
    return [i for i in blocks if (g, bytes(hashes[(i + 1) * size // UNIT - 1])[:HASH]) in present]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("write, tokens", [("all", 50), ("prompt", 20), ("off", 0)])
def test_what_is_written(write, tokens, lag):
    engine = Engine(GROUPS["full"], 1, lag, write)
    r = engine.new_request([i % 7 for i in range(50)], 21)
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(tokens // UNIT))
    assert engine.tier.asked == [] and engine.offloader.pinned == 0
    assert not len(engine.tables)


def test_what_the_store_lost_the_beginning_of_is_offered_again():
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(60)], 24)
    for _ in range(6):
        engine.step(every=1.1)
    engine.settle_down()
    engine.tier.forget(set(engine.tier.items))
    assert stored(engine, r) == []
    for _ in range(100):  # it generates on
        engine.step(every=1.1)
        engine.settle_down()
    assert stored(engine, r) == list(range(15))


@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_a_store_that_was_started_anew_is_offered_everything(groups):
    """With the next block that fills, as often as that happens; no refusal is needed for it."""
    engine = Engine(GROUPS[groups], 1, 0, share=1.0)
    r = engine.new_request([i % 7 for i in range(60 * UNIT)], 24)
    align = max(size for size, _ in engine.groups)
    for life in range(2 + offloading.REWINDS):
        engine.tier.die(f"s{life + 2}")
        engine.settle_down()
        for _ in range(10):
            engine.step(every=1.1)
        engine.tier.live()
        begun = r.request.num_computed_tokens
        while r.request.num_computed_tokens < begun + 2 * align:
            engine.step(every=1.1)
        flush(engine, r)
        engine.settle_down()
        for g, (size, window) in enumerate(engine.groups):
            full = r.request.num_computed_tokens // align * align // size
            needed = 0 if window is None else max(0, full * size - window + 1) // size
            assert set(range(needed, full)) <= set(stored(engine, r, g)), f"group {g}: it could not be loaded"
    assert not any("beginning not stored" in key for key in engine.counters.take())
    engine.end()


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_store_that_hung_never_heard_of_is_offered_again(ends):
    """It comes back with what it had: no more than that is offered anew, also if the request ends just then."""
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(64)], 24)
    for at_least in (24, 36):
        while r.request.num_computed_tokens < at_least:
            engine.step(every=1.1)
        flush(engine, r)
        if at_least == 24:
            engine.settle_down()
    assert engine.tier.asked
    had = stored(engine, r)
    engine.tier.die(engine.tier.instance)
    engine.reactor.run()
    engine.tier.live()
    before = len(engine.tier.items)
    if ends:
        engine.step(every=1.1)
        engine.finish(r, True)
    else:
        run(engine, r)
        flush(engine, r)
    engine.settle_down()
    last = 9 if ends else 16
    assert 0 < len(had) < 9 and stored(engine, r) == list(range(last))
    assert len(engine.tier.items) - before == last - len(had)
    assert not any("beginning not stored" in key for key in engine.counters.take())


def test_a_store_that_keeps_forgetting_is_not_offered_everything_for_ever():
    engine = Engine(GROUPS["full"], 1, 0)
    engine.new_request([i % 7 for i in range(40 * UNIT)], 4)
    for _ in range(40 * UNIT + 9):
        engine.step(every=1.1)
        engine.settle_down()
        engine.tier.forget(set(engine.tier.items))
    offered = len(engine.tier.items)
    assert offered <= 40 * (1 + offloading.REWINDS)


def test_one_lost_beginning_costs_one_rewind():
    """Several batches of a chain are under way when the first refusal comes."""
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(200)], 8)
    while r.request.num_computed_tokens < 8:
        engine.step(every=1.1)
    flush(engine, r)
    engine.settle_down()
    assert stored(engine, r) == [0, 1]
    engine.tier.forget(set(engine.tier.items))
    for _ in range(3 * offloading.ASK_AFTER):
        engine.step(every=1.1)
    assert len(engine.tier.asked) >= 2
    table = engine.tables._tables[r.request.request_id]
    engine.settle_down()
    assert table.rewinds == 1


@pytest.mark.parametrize("window", [6, 9])
def test_a_store_that_comes_late_gets_no_block_of_a_window_that_has_passed(window):
    """vLLM gave these up long ago; they are another request's by now."""
    engine = Engine([(UNIT, None), (UNIT, window)], 3, 0)
    engine.tier.die("s2")
    r = engine.new_request([i % 7 for i in range(60)], 30)
    while r.request.num_computed_tokens < 44:
        engine.step(every=1.1)
    other = engine.new_request([3] * 40, 39)  # takes what was given up
    engine.step(every=1.1)
    engine.tier.live()
    while r.request.num_computed_tokens < len(r.plan):
        engine.step(every=1.1)
        flush(engine, r)
        engine.settle_down()  # each copy compares the block with its hash
    assert stored(engine, r, 0) == list(range(15)) and stored(engine, r, 1)[-1] == 14
    assert engine.copies and other.request.num_computed_tokens


def test_pins_are_bounded_and_the_rest_follows():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(100)], 80)
    for _ in range(200):
        engine.step(every=1.1)
        engine.bounds()
        engine.settle_down()
        if stored(engine, r) == list(range(25)):
            break
    else:
        # What was left when it had all its blocks goes when it ends, as far as there is room then.
        assert stored(engine, r) == list(range(len(stored(engine, r)))) != []


TOO_MANY = "not_stored|too many copies under way"


@pytest.mark.parametrize("groups", ["full", "windows"])
def test_what_finds_no_room_is_counted_once_if_it_is_never_stored(groups):
    """In each step what is needed of the beginning is offered again: that is not another block. A window's is not: by
    then it may be another request's."""
    engine = Engine(GROUPS[groups], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(102)], 80)
    run(engine, r, 200)
    engine.read_outputs()
    early = engine.counters.take().get(TOO_MANY, 0)
    assert early == sum(25 - collected(engine, g) for g in range(len(GROUPS[groups])) if g not in engine.full)
    engine.finish(r, True)
    refused = early + engine.counters.take()[TOO_MANY]
    engine.settle_down()
    assert refused == sum(25 - len(stored(engine, r, g)) for g in range(len(GROUPS[groups])))
    assert stored(engine, r)


def collected(engine, g):
    """Blocks of the group that were collected and not asked for yet, or asked for and not answered."""
    asked = sum(item.group == g for _, items in engine.tier.asked for item in items)
    return asked + sum(batch.groups.count(g) for batch in engine.offloader._open.values())


def test_what_finds_room_later_is_not_counted():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(102)], 80)
    run(engine, r, 200)
    engine.read_outputs()
    while len(stored(engine, r)) < 25 - engine.most:
        engine.offloader.begin_step(99, [Growth(r.tracked, engine.tables._tables[r.request.request_id], 100)])
        flush(engine, r)
        engine.settle_down()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(25)) and TOO_MANY not in engine.counters.take()


def test_what_gives_way_to_requests_is_offered_again():
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(40)], 8)
    engine.tier.up = True
    while r.request.num_computed_tokens < 24:
        engine.step(every=1.1)
        engine.offloader.relieve(1)  # before anything was asked for
    assert engine.offloader.pinned == 0 or engine.tier.asked
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(10))


def test_relieve_gives_up_no_more_than_is_needed():
    engine = Engine(GROUPS["full"], 5, 0)
    for salt in (None, "tenant"):
        engine.new_request([5] * 12, 12, salt)
    while any(r.request.num_computed_tokens < 12 for r in engine.requests.values()):
        engine.step(every=1.1)
    assert not engine.tier.asked and engine.offloader.pinned == 6, "two tenants, two batches"
    engine.offloader.relieve(1)
    assert engine.offloader.pinned == 6, "their requests use these blocks: letting go of them frees none"
    for r in list(engine.requests.values()):
        engine.release(r)
    engine.offloader.relieve(7)
    assert engine.offloader.pinned == 6, "not enough, whatever is given up"
    engine.offloader.relieve(1)
    assert engine.offloader.pinned == 3
    engine.offloader.relieve(0)
    assert engine.offloader.pinned == 3


def test_settle_waits_for_copies_and_returns_with_nothing_pinned():
    """vLLM resets its prefix cache right after, which fails if a block is held."""
    for seed in range(5):
        engine = Engine(GROUPS["full"], seed, 0)
        commit = engine.tier.commit
        # The other thread may lose the interpreter at any moment, here too.
        engine.tier.commit = lambda *args, commit=commit: (time.sleep(0.02), commit(*args))
        r = engine.new_request([i % 7 for i in range(40)], 40)
        run(engine, r)
        flush(engine, r)
        assert engine.offloader.pinned == 10

        def others(engine=engine):
            engine.tier.answer(0, engine.full)
            engine.reactor.run()
            for rank in (0, 1):
                for order in list(engine.orders[rank]):
                    engine.copy(rank, order)
                    engine.report(rank, [order.order], [])
            engine.reactor.run()

        thread = threading.Thread(target=others)
        thread.start()
        engine.offloader.settle(10.0)
        assert engine.offloader.pinned == 0
        thread.join()


def test_settle_is_bounded():
    engine = Engine(GROUPS["full"], 0, 0)
    r = engine.new_request([i % 7 for i in range(40)], 40)
    run(engine, r)
    flush(engine, r)
    began = time.monotonic()
    engine.offloader.settle(0.05)
    assert time.monotonic() - began < 2 and engine.offloader.pinned == 10, "the copies may still run"
    engine.end()


def test_an_adapter_has_a_space_of_its_own():
    engine = Engine(GROUPS["full"], 0, 0)
    r = engine.new_request([i % 7 for i in range(12)], 12)
    r.request.lora_request = SimpleNamespace(lora_name="a", lora_path="")
    run(engine, r)
    engine.new_request([i % 7 for i in range(12)], 12)
    engine.step(every=1.1)
    engine.step(every=1.1)
    flush(engine, r)
    spaces = {items[0].space for _, items in engine.tier.asked}
    assert len(spaces) == len(engine.tier.asked) == 2


def test_a_step_of_many_that_only_generate_is_cheap():
    """256 requests: what a step costs the scheduler's thread beside the requests that fill a block."""
    engine = Engine(GROUPS["full"], 0, 0)
    tracked = {}
    for i in range(256):
        request = make_request(f"d{i}", [1] * (3 * UNIT + 1), UNIT)
        request.num_computed_tokens = 3 * UNIT + 1
        tracked[request.request_id] = SimpleNamespace(request=request)
    rows = [SimpleNamespace(req_id=n, block_ids=([1, 2, 3, 4],), num_computed_tokens=0) for n in tracked]
    nobody = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    names = list(tracked)
    output = SimpleNamespace(
        scheduled_new_reqs=rows, scheduled_cached_reqs=nobody, num_scheduled_tokens=dict.fromkeys(names, 1)
    )
    engine.tables.begin_step(output, tracked.get)
    cached = SimpleNamespace(
        req_ids=names, new_block_ids=[None] * 256, num_computed_tokens=[13] * 256, resumed_req_ids=set()
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens=dict.fromkeys(names, 1)
    )
    took = []
    for _ in range(20):
        began = time.perf_counter()
        growth = engine.tables.begin_step(output, tracked.get)
        engine.offloader.begin_step(1, growth)
        took.append(time.perf_counter() - began)
    assert not growth and min(took) < 2e-3, f"{min(took) * 1e6:.0f} us a step"

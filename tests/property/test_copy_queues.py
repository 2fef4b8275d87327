"""The offload engine with a copier that ends copies in any order, or fails: every order ends exactly once, nothing is
in use after it ended, bounds hold, each order makes progress, and nothing touches another store's memory."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import Clock

from vllm_kvtier.jobs.results import ABORTED
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StoreJob
from vllm_kvtier.worker.store.copy_engine import MAX_CALLS, CopyEngine
from vllm_kvtier.worker.store.copy_queues import LoadQueue, StoreQueue

BLOCK_BYTES = [100, 250, 30]
PIECE_BYTES = 400
GROUPS = range(len(BLOCK_BYTES))


class FakeCopy:
    def __init__(self, memory, kind, group, blocks, keys, slots, after):
        self.memory, self.kind, self.group, self.after = memory, kind, group, after
        self.blocks, self.keys, self.slots = blocks.tolist(), keys.tolist(), slots.tolist()
        self.nbytes = len(blocks) * BLOCK_BYTES[group]
        self.bad, self.error, self.over = None, None, False

    def done(self):
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.over


class FakeMemory:
    """A backing and its copier in one."""

    piece_bytes, on_model_stream = PIECE_BYTES, False

    def __init__(self, instance):
        self.instance, self.copier = instance, self
        self.running, self.refuse, self.at_once, self.users, self.retired = [], False, False, 0, False

    def take(self):
        if self.retired and not self.users:  # not asserted here: an exception would be the caller's
            self.wrong.append("taken after it was retired")
        self.users += 1

    def give(self):
        assert self.users > 0
        self.users -= 1

    def _call(self, *arguments):
        if self.retired:
            self.wrong.append("a copy began on memory that was retired")
        if self.refuse:
            raise ValueError("a slot outside the memory")
        copy = FakeCopy(self, *arguments)
        if not copy.blocks:
            self.wrong.append("an empty copy")
        if self.at_once:
            copy.over, copy.bad = True, np.zeros(len(copy.blocks), dtype=bool) if copy.kind == "load" else None
            self.began.append(copy)
        else:
            self.running.append(copy)
        return copy

    def store(self, *arguments):
        return self._call("store", *arguments)

    def load(self, *arguments):
        return self._call("load", *arguments)


class Engine(RuleBasedStateMachine):
    """Slots are numbered so that each names its order: the model needs nothing else."""

    @initialize()
    def start(self):
        self.clock = Clock()
        self.number = 0
        self.memory = None
        self.copies = []  # all that ever began
        self.wrong = []  # what must not happen and did
        self.current = None  # what a Pool has
        self.offload = CopyEngine(self, BLOCK_BYTES, store_timeout=10.0, clock=self.clock)
        self.step, self.next_id, self.next_block = 0, 0, 1
        self.stores = {}  # id -> (order, slots in turn)
        self.loads = {}  # request id -> (order, fence)
        self.good = defaultdict(set)  # request id -> blocks that arrived
        self.written = defaultdict(list)  # store id -> slots written
        self.asked = defaultdict(list)  # store id -> slots that the copier was asked to write, in turn
        self.spoiled = {}  # id of a store that had a copy fail -> the first of its slots that may be wrong
        self.owner = {}  # slot -> the order's id
        self.remap()

    # -- what happens ------------------------------------------------------------------------------------------

    @rule()
    def remap(self):
        if self.current is not None:
            self.current.retired = True
        self.number += 1
        self.current = FakeMemory(f"life {self.number}")
        self.current.began, self.current.wrong = self.copies, self.wrong

    @rule()
    def unmap(self):
        if self.current is not None:
            self.current.retired = True
            self.current = None

    @rule(gap=st.integers(1, 3))
    def launch(self, gap):
        self.step += gap
        self.offload.step_launched(self.step, ("fence", self.step))

    def instance(self, wrong):
        return "life 0" if wrong or self.current is None else self.current.instance

    def arrays(self, count, owner):
        blocks = np.arange(self.next_block, self.next_block + count)
        self.next_block += count
        for block in blocks.tolist():
            self.owner[block + 10_000] = owner
        return dict(blocks=blocks, keys=blocks.astype(np.uint64) * 7, slots=blocks + 10_000)

    @rule(group=st.sampled_from(GROUPS), count=st.integers(0, 20), ahead=st.integers(-2, 2), wrong=st.booleans())
    def store(self, group, count, ahead, wrong):
        self.next_id += 1
        arrays = self.arrays(count, self.next_id)
        order = StoreJob(
            self.next_id, group, **arrays, after_step=self.step + ahead, instance=self.instance(wrong and ahead == 2)
        )
        self.stores[order.id] = order
        self.offload.submit_store(order)

    @rule(
        parts=st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(0, 12)), max_size=3),
        timeout=st.integers(1, 10),
        wrong=st.booleans(),
        fence=st.booleans(),
    )
    def load(self, parts, timeout, wrong, fence):
        self.next_id += 1
        name = f"r{self.next_id}"
        groups = [GroupLoad(g, **self.arrays(n, name)) for g, n in parts]
        order = LoadJob(name, groups, float(timeout), self.instance(wrong and timeout == 1))
        after = ("fence", self.step) if fence else None
        self.loads[name] = order, after
        self.offload.submit_load(order, after)

    @rule(data=st.data())
    def cancel(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.stores) or [0]), max_size=3))
        self.offload.stores.cancel([*((id, data.draw(st.integers(0, 20))) for id in ids), (-5, 0)])

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def abort(self, data):
        gone = data.draw(st.sampled_from(sorted(self.loads)))
        self.offload.cancel_loads(lambda job: job.request_id == gone, ABORTED)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), how=st.sampled_from(["well", "well", "well", "bad", "error"]))
    def end_a_copy(self, data, how):
        copy = data.draw(st.sampled_from(self.running()))
        self.finish(copy, how, data.draw(st.integers(1, 2 ** len(copy.blocks) - 1)) if how == "bad" else 0)

    @rule(seconds=st.sampled_from([0.0001, 0.003, 0.03, 1.5]))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(refuse=st.booleans(), at_once=st.booleans())
    def moods(self, refuse, at_once):
        if self.current is not None:
            self.current.refuse, self.current.at_once = refuse and at_once, at_once and not refuse

    @rule()
    def poll(self):
        pause = self.offload.next_poll()
        if pause is None:
            assert not self.stores and not self.loads, "an order waits for nothing"
        ended = self.offload.poll()
        self.check_new_copies()
        for result in ended.loads:
            self.check_load(result)
        for id in ended.stored:
            order = self.stores.pop(id)
            assert id not in self.spoiled, "stored, although a copy of it failed"
            assert sorted(self.written.pop(id, [])) == order.slots.tolist()
            assert self.asked.pop(id, []) == order.slots.tolist()
            self.unused(order.slots.tolist())
        for id, kept in ended.cut:
            slots = self.stores.pop(id).slots.tolist()
            written, asked = set(self.written.pop(id, [])), self.asked.pop(id, [])
            assert asked == slots[: len(asked)] and kept <= len(asked), "from the beginning on"
            assert written >= set(slots[:kept]), "a gap"
            assert id not in self.spoiled or self.spoiled[id] not in slots[:kept]
            self.unused(slots)

    # -- what must hold ----------------------------------------------------------------------------------------

    def running(self):
        memories = {copy.memory for copy in self.copies} | ({self.current} if self.current else set())
        return [copy for memory in sorted(memories, key=lambda m: m.instance) for copy in memory.running]

    def finish(self, copy, how, bits=0):
        copy.memory.running.remove(copy)
        if how == "error":
            copy.error = "the device failed"
            for slot in copy.slots if copy.kind == "store" else ():
                self.spoiled[self.owner[slot]] = min(slot, self.spoiled.get(self.owner[slot], slot))
            return
        copy.over = True
        if copy.kind == "store":
            self.note_written(copy)
        else:
            copy.bad = np.array([bool(bits >> i & 1) for i in range(len(copy.blocks))])
            for block, slot, bad in zip(copy.blocks, copy.slots, copy.bad, strict=True):
                if not bad:
                    self.good[self.owner[slot]].add(block)

    def note_written(self, copy):
        for slot in copy.slots:
            self.written[self.owner[slot]].append(slot)

    def check_new_copies(self):
        """Copies that began in this drive: whether they were allowed to."""
        assert not self.wrong
        began = [c for c in self.copies if not hasattr(c, "seen")]
        began += [c for c in self.running() if not hasattr(c, "seen")]
        for copy in began:
            copy.seen = True
            if copy not in self.copies:
                self.copies.append(copy)
            assert copy.keys == [b * 7 for b in copy.blocks] and copy.slots == [b + 10_000 for b in copy.blocks]
            owners = {self.owner[slot] for slot in copy.slots}
            assert copy.nbytes <= max(PIECE_BYTES, BLOCK_BYTES[copy.group])
            if copy.kind == "store":
                orders = [self.stores[id] for id in owners]  # KeyError: it has ended
                steps = [o.after_step for o in orders]
                assert all(o.group == copy.group and o.instance == copy.memory.instance for o in orders)
                assert max(steps) <= self.step
                for slot in copy.slots:
                    self.asked[self.owner[slot]].append(slot)
                if copy.after is None:
                    assert max(steps) <= 0  # before any step that was launched
                else:
                    assert max(steps) <= copy.after[1] <= self.step
                if copy.over:
                    self.note_written(copy)
            else:
                for name in owners:
                    order, after = self.loads[name]
                    assert order.instance == copy.memory.instance and copy.after is after
                if copy.over:
                    for block, slot in zip(copy.blocks, copy.slots, strict=True):
                        self.good[self.owner[slot]].add(block)

    def check_load(self, result):
        order, _ = self.loads.pop(result.request_id)
        blocks = {b for g in order.groups for b in g.blocks.tolist()}
        assert result.bad_blocks == blocks - self.good.pop(result.request_id, set())
        assert result.failed == bool(result.bad_blocks) == bool(result.reason)
        wrong = {
            (copy.group, slot)
            for copy in self.copies
            if copy.kind == "load" and copy.bad is not None and copy.error is None
            for slot, bad in zip(copy.slots, copy.bad, strict=True)
            if bad and self.owner[slot] == result.request_id
        }
        assert set(result.corrupt) == wrong and len(result.corrupt) == len(wrong)
        assert 0 <= result.queued <= result.seconds
        self.unused([b + 10_000 for b in blocks])

    def unused(self, slots):
        busy = {slot for copy in self.running() for slot in copy.slots}
        assert busy.isdisjoint(slots), "reported while a copy uses its blocks"

    @invariant()
    def bounded(self):
        if not hasattr(self, "offload"):
            return
        ordered = sum(len(o.blocks) * BLOCK_BYTES[o.group] for o in self.stores.values())
        assert self.offload.stores.nbytes <= ordered
        for kind in ("load", "store"):
            assert len([c for c in self.running() if c.kind == kind]) <= MAX_CALLS
        if not self.offload.active and self.offload.next_poll() is None:
            assert not self.running()

    def teardown(self):
        """However things stand: when copies end and time passes, every order is reported and nothing is in use."""
        if not hasattr(self, "offload"):
            return
        for _ in range(200):
            for copy in self.running():
                self.finish(copy, "well")
            self.poll()
            self.clock.now += 0.5
        assert not self.stores and not self.loads
        assert self.offload.next_poll() is None and not self.offload.active
        assert self.offload.stores.nbytes == 0 == self.offload.queued_load_bytes
        assert all(copy.memory.users == 0 for copy in self.copies)


TestEngine = Engine.TestCase


def load_order(name, counts, timeout=1e9):
    groups = []
    for group, count in counts:
        blocks = np.arange(1, count + 1)
        groups.append(GroupLoad(group, blocks, blocks.astype(np.uint64), blocks))
    return LoadJob(name, groups, timeout, "")


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 60)), min_size=2, max_size=12),
    piece=st.sampled_from([100, 300]),
)
def test_load_queue_prefers_short_loads_without_starvation(arrivals, piece):
    rate = 1000.0
    queue = LoadQueue([100])
    waiting, now = {}, 0.0
    coming = sorted(arrivals)
    while coming or waiting:
        while coming and (coming[0][0] <= now or not waiting):
            at, count = coming.pop(0)
            now = max(now, at)
            name = f"r{len(coming)}"
            queue.add(load_order(name, [(0, count)]), object(), now)  # no two behind the same fence: none are joined
            waiting[name] = [now, count, count * 100 / rate]
        work = queue.next_batch(piece, rate, now)
        (entry, _, count), = work.spans
        since, left, alone = waiting[entry.job.request_id]
        for other, (other_since, other_left, other_alone) in waiting.items():
            if other == entry.job.request_id:
                continue
            # After it has waited for as long as it takes alone, nothing that comes later overtakes a load.
            assert since <= other_since + other_alone
            if since == other_since:
                assert left <= other_left
        waiting[entry.job.request_id][1] -= count
        now += work.nbytes / rate
        queue.ended(work, np.zeros(count, dtype=bool), now)
        for result in queue.take_results():
            assert not result.failed and waiting.pop(result.request_id)[1] == 0


@given(
    orders=st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=20),
)
def test_store_queue_keeps_order_per_group_and_loses_no_block(orders):
    queue = StoreQueue(BLOCK_BYTES, batch_delay=0.0, timeout=1e9)
    step, taken, block, first_block = 0, [], 1, {}
    for id, (group, count, gap) in enumerate(orders):
        step += gap
        blocks = np.arange(block, block + count)
        first_block[id] = block
        block += count
        queue.add(StoreJob(id, group, blocks, blocks.astype(np.uint64), blocks, step, ""), float(id))
    done = []
    for launched in range(step + 1):
        numbers = []
        while (piece := queue.next_batch(launched, PIECE_BYTES, 1e6)) is not None:
            assert piece.after_step == max(orders[e.job.id][2] * 0 + e.job.after_step for e, _, _ in piece.spans)
            assert piece.after_step <= launched
            numbers.append(piece.spans[0][0].job.id)
            taken += piece.blocks.tolist()
            queue.ended(piece, ok=True)
            done += queue.take_results()[0]
        assert numbers == sorted(numbers)  # the oldest that may go leads each piece
    assert sorted(done) == list(range(len(orders))) and queue.nbytes == 0 == len(queue.ids())
    for group in GROUPS:
        mine = [id for id, (g, _, _) in enumerate(orders) if g == group]
        expected = [b for id in mine for b in range(first_block[id], first_block[id] + orders[id][1])]
        assert [b for b in taken if b in set(expected)] == expected


def test_store_queue_duplicate_job_id_raises():
    queue = StoreQueue(BLOCK_BYTES, batch_delay=0.0, timeout=1.0)
    blocks = np.arange(1, 3)
    order = StoreJob(7, 0, blocks, blocks.astype(np.uint64), blocks, 0, "")
    queue.add(order, 0.0)
    with pytest.raises(ValueError, match="store job 7"):
        queue.add(order, 0.0)

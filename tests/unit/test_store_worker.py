"""StoreWorker: when it looks after copies, and behind which step they are begun."""

import functools
import itertools
import random
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from pull_fakes import cache
from support import eventually
from tier_fakes import group_view
from worker_halves import worker_without_threads

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StepWork
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import part_layout
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.copy.host_copier import HostCopier
from vllm_kvtier.worker.integrity.sync_load_tracker import SyncLoadTracker
from vllm_kvtier.worker.store import copy_engine as offload
from vllm_kvtier.worker.store import store_worker
from vllm_kvtier.worker.store.store_worker import NextLaunch, StoreWorker


class FakeCopier:
    """Copies end after ``polls`` looks."""

    piece_bytes, on_model_stream = 1 << 20, False

    def __init__(self):
        self.calls, self.polls, self.ended, self.held = [], 3, False, []
        self.slots = []

    def end(self):
        """All of them, now."""
        self.ended = True

    def _copy(self, way, group, blocks, keys, slots, after):
        self.calls.append((way, blocks.tolist(), after))
        self.slots.append(slots.tolist())
        left = [self.polls]

        def done():
            left[0] -= 1
            return left[0] < 0 or self.ended

        wait = lambda: self.held.append(blocks.tolist())  # noqa: E731
        return SimpleNamespace(done=done, make_stream_wait=wait, bad=np.zeros(len(blocks), bool), nbytes=len(blocks))

    def store(self, *args):
        return self._copy("store", *args)

    def load(self, *args):
        return self._copy("load", *args)


@pytest.fixture
def worker(monkeypatch):
    copier = FakeCopier()
    backing = SimpleNamespace(instance="life", copier=copier, users=0, give=lambda: None)

    class FakePool:
        def __init__(self, *args, **options):
            self.current, self.instance, self.registered_pages = backing, "life", 1000

        def start(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr(store_worker, "StoreMemory", FakePool)
    reactor = Reactor("test-tiering")
    told, finished = [], []
    view = SimpleNamespace(groups=[group_view(0, 16)], device=SimpleNamespace(type="cpu"))
    setup = m.PoolSetup("/nowhere", [[0]], [[True]], ["raw"])
    made = StoreWorker(RankContext(0, reactor, told.append, finished.append), view, setup)
    reactor.start()
    yield SimpleNamespace(
        tier=made, reactor=reactor, copier=copier, told=told, finished=finished, pool_backing=backing
    )
    reactor.stop()


def blocks(*numbers):
    return np.array(numbers, np.int64)


def store(worker, order, step):
    array = blocks(1, 2).tobytes()
    message = m.StoreBlocks(order, "life", 0, step, array, array, array)
    done = threading.Event()
    worker.reactor.call_soon(lambda: (worker.tier.store(message), done.set()))
    assert done.wait(5)


class Before(str):
    """An event that has passed when it is polled."""

    def query(self):
        return True


def load(name):
    group = GroupLoad(0, blocks(3, 4), blocks(7, 8).astype(np.uint64), blocks(5, 6))
    return LoadJob(name, [group], 60.0, "life")


def test_store_job_ordered_before_its_step_is_copied_after_it(worker):
    """The order overtakes the step that writes the blocks; nothing else comes to remind us."""
    store(worker, 1, step=5)
    time.sleep(0.02)
    assert not worker.copier.calls
    worker.tier.step(5, "fence 5")
    eventually(lambda: worker.told, 5.0, "stored")
    assert worker.copier.calls == [("store", [1, 2], "fence 5")]
    assert (worker.told[0].done, worker.told[0].cut) == ([1], [])


def test_worker_of_an_engine_over_several_nodes_copies_slots_of_its_own(worker):
    worker.tier._node = 1
    worker.tier.step(1, None)
    for order, (theirs, ours) in enumerate((((7, 8), (5, 6)), ((0, 0), (9, 10)), ((11, 12), (0, 0)))):
        slots, array = blocks(*theirs, *ours).tobytes(), blocks(1, 2).tobytes()
        message = m.StoreBlocks(order, "another life", 0, 1, array, array, slots)
        worker.reactor.call_soon(lambda message=message: worker.tier.store(message))
    eventually(lambda: sum(len(each.done) for each in worker.told) == 2, 5.0, "not the third: its store has the blocks")
    [group], job = (made := load("r")).groups, made
    group.slots, group.by_node = blocks(3, 4), blocks(3, 4, 15, 16).reshape(2, 2)
    job.instance = "another life"
    worker.tier.load([job], None)
    eventually(lambda: worker.finished, 5.0, "loaded")
    assert (worker.finished[0].failed, worker.finished[0].node) == (False, 1)
    assert sorted(sum(worker.copier.slots, [])) == [5, 6, 9, 10, 15, 16]
    assert sorted(each for message in worker.told for each in message.done) == [0, 1]
    assert group.slots.tolist() == [3, 4], "the job is the scheduler's too"
    worker.tier.load_now([job], None)
    worker.tier.wait_until_done(5.0)
    eventually(lambda: len(worker.finished) == 2, 5.0)
    assert not worker.finished[1].failed and worker.copier.slots[-1] == [15, 16]


TWO = [0, 0, 1, 1]  # nodes of the ranks


@pytest.mark.parametrize(
    "late, ours", [((TWO, 2), (TWO, 0)), ((TWO, 2), ([], 0)), (([], 0, "stage 0"), ([], 0))],
    ids=["both over two nodes", "one over two nodes", "pipeline and tensor parallel"],
)  # fmt: skip
def test_late_copy_of_other_parts_of_the_same_block_is_found_to_be_wrong(worker, late, ours):
    """In a slot that was given to this rank's engine since."""
    memory, reactor, finished = np.zeros(1 << 20, np.uint8), worker.reactor, []

    def rank_of(nodes, rank, layer="all"):
        view = cache(8, seed=rank)
        view.groups = [
            msgspec.structs.replace(
                group, regions=tuple(msgspec.structs.replace(region, layer=layer) for region in group.regions)
            )
            for group in view.groups
        ]
        setup = m.PoolSetup("/nowhere", [[0]] * 4, [[True]] * 4, ["raw"], nodes)
        made = StoreWorker(RankContext(rank, reactor, worker.told.append, finished.append), view, setup)
        pool = memory.ctypes.data, len(memory), SimpleNamespace(buffer=memory)
        copier = HostCopier(view, pool, [part_layout(group) for group in view.groups], [0])
        copier.register(0, len(memory))
        worker.pool_backing.copier = copier
        made.step(1, None)
        return made

    def load_now(tier, key):
        group = GroupLoad(0, blocks(3), key.view(np.uint64), blocks(5), blocks(5, 5).reshape(2, 1))
        tier.load_now([LoadJob("r", [group], 60.0, "life" if tier._node is None else "life life")], None)
        tier.wait_until_done(5.0)
        return finished.pop()

    key, writer = blocks(77), rank_of(*late)
    slots, life = (blocks(5), "life") if writer._node is None else (blocks(9, 5), "life life")
    message = m.StoreBlocks(1, life, 0, 1, blocks(1).tobytes(), key.tobytes(), slots.tobytes())
    reactor.call_soon(lambda: writer.store(message))
    eventually(lambda: worker.told, 5.0)
    assert not load_now(rank_of(*late), key).failed
    assert load_now(rank_of(*ours), key).checksum_mismatch


def test_load_is_polled_while_a_store_waits_for_its_step(worker):
    worker.tier.step(1, None)
    store(worker, 1, step=9)
    worker.tier.load([load("r")], None)
    eventually(lambda: worker.finished, 5.0, "loaded")
    assert worker.finished[0].request_id == "r" and not worker.finished[0].failed
    assert not worker.told


def test_load_waits_for_its_own_event(worker):
    """And not behind the fences of steps, which mark what is launched later."""
    for number in range(20):
        worker.tier.step(number, f"fence {number}")
        if number % 3 == 0:
            store(worker, number, step=number)
        worker.tier.load([load(f"r{number}")], Before(f"before {number + 1}"))
    eventually(lambda: len(worker.finished) == 20, 5.0)
    loads = [after for way, _, after in worker.copier.calls if way == "load"]
    assert loads == [f"before {number + 1}" for number in range(20)]


def test_step_call_without_step_number_is_ignored(worker):
    worker.tier.step(3, "fence 3")
    worker.tier.step(-1, None)
    store(worker, 1, step=3)
    eventually(lambda: worker.told, 5.0)
    assert [after for *_, after in worker.copier.calls] == ["fence 3"]


def test_store_job_of_part_written_by_other_rank_is_skipped(worker):
    worker.tier._writes = [False]
    store(worker, 1, step=0)
    worker.tier.step(0, None)
    time.sleep(0.02)
    assert not worker.copier.calls and not worker.told


def test_stores_wait_while_a_forward_is_launched(worker):
    """But loads do; and a launch that is not ended blocks stores for a moment only."""
    worker.tier.on_device = True
    worker.tier.step(1, "fence 1")
    NextLaunch.since = began = time.monotonic()
    store(worker, 1, step=1)
    worker.tier.load([load("r")], None)
    eventually(lambda: worker.finished, 5.0, "loaded")
    if time.monotonic() < began + store_worker.MAX_LAUNCH_SECONDS:
        assert [call[0] for call in worker.copier.calls] == ["load"]
    eventually(lambda: worker.told, 5.0, "stored after all")
    NextLaunch.since = time.monotonic()
    worker.tier.step(2, "fence 2")
    assert not worker.tier._launches()


def test_lone_step_begins_no_stores(worker):
    """Its output is as late as its launch. The step behind it does, or the reactor if none comes."""
    worker.tier.on_device, worker.copier.piece_bytes = True, 2 * BLOCK_BYTES
    store(worker, 1, step=9)
    assert not worker.tier.step(1, "fence 1", lone=True)
    assert worker.tier.step(2, "fence 2")


def test_stores_wait_for_the_step_of_a_lone_request(worker):
    """From when vLLM has it, not only from when its forward is launched."""
    worker.tier.on_device = True
    worker.tier.step(1, "fence")
    assert not worker.tier._launches()
    connector = object.__new__(KVTierConnector)
    connector._scheduler = SimpleNamespace(on_new_request=lambda request: None, has_requests=True)
    KVTierConnector.on_new_request.__wrapped__(connector, None)
    assert not worker.tier._launches(), "a long step may run, with many requests to come"
    connector._scheduler.has_requests = False
    KVTierConnector.on_new_request.__wrapped__(connector, None)
    assert worker.tier._launches()
    worker.tier.step(2, "fence")
    assert not worker.tier._launches()


def test_empty_step_leaves_stores_to_the_reactor(worker, monkeypatch):
    """The output of the step before it waits for this thread."""
    threads, poll = [], worker.tier._engine.poll
    monkeypatch.setattr(
        worker.tier._engine, "poll", lambda *args: threads.append(threading.current_thread()) or poll(*args)
    )
    worker.tier.on_device, worker.copier.piece_bytes = True, 2 * BLOCK_BYTES
    worker.tier.step(1, "fence")
    store(worker, 1, step=2)
    worker.tier.step(2, "fence")
    worker.tier.collect(idle=True)
    eventually(lambda: worker.told, 5.0, "stored")
    assert threading.current_thread() not in threads


def test_device_copies_are_polled_without_next_step(worker):
    """Their order came before its step was launched, and that step was the last one."""
    worker.tier.on_device = True
    worker.tier.step(1, "fence 1")
    worker.tier.collect()
    time.sleep(2 * store_worker.STEP_POLL_SECONDS[1])  # the reactor polls, and finds that it is too soon
    store(worker, 1, step=2)
    worker.tier.step(2, "fence 2")
    worker.tier.collect()
    eventually(lambda: worker.told, 5.0, "stored")
    assert worker.copier.calls == [("store", [1, 2], "fence 2")]


def test_stores_are_not_polled_in_every_step(worker, monkeypatch):
    """Orders wait for the next ones, then all are copied at once; each poll would cost a step."""
    worker.tier._engine.stores._batch_delay = 3600.0
    worker.tier.on_device, worker.copier.piece_bytes = True, 6 * BLOCK_BYTES
    polls, poll = [], worker.tier._engine.poll
    monkeypatch.setattr(worker.tier._engine, "poll", lambda *args: polls.append(1) or poll(*args))
    store(worker, 1, step=1)
    eventually(lambda: polls, 5.0, "no step came before: the reactor polls")
    for number in range(1, 12):
        assert not worker.tier.step(number, f"fence {number}")
        if number == 6:
            store(worker, 2, step=6)
    assert len(polls) == 1
    store(worker, 3, step=6)
    assert worker.tier.step(12, "fence 12")
    eventually(lambda: worker.tier.collect() or sum(len(told.done) for told in worker.told) == 3, 5.0)
    assert worker.copier.calls == [("store", 3 * [1, 2], "fence 6")]


@pytest.mark.parametrize("least, most", [(0.0, 0.008), (0.01, 0.05)])
def test_stores_go_on_while_steps_of_any_length_follow_each_other(worker, least, most):
    """The model runner polls behind steps; the reactor relies on that, and looks less and less often."""
    worker.tier.on_device = True
    rng, orders = random.Random(1), 0
    until = time.monotonic() + 2.0
    while time.monotonic() < until or orders < 40:
        orders += 1
        NextLaunch.since = time.monotonic()
        time.sleep(2e-3)
        if worker.tier.step(orders, f"fence {orders}"):
            worker.tier.collect()
        store(worker, orders, step=orders)
        time.sleep(rng.uniform(least, most))
    assert sum(len(told.done) for told in worker.told) >= orders / 2


def test_end_of_stores_is_polled_with_later_step(worker):
    worker.tier.on_device, worker.copier.piece_bytes, worker.copier.polls = True, 2 * BLOCK_BYTES, 1
    worker.tier.step(1, "fence 1")
    store(worker, 1, step=2)
    assert worker.tier.step(2, "fence 2"), "a batch is complete"
    worker.tier.collect()
    assert [call[0] for call in worker.copier.calls] == ["store"] and not worker.told
    assert not worker.tier.step(3, "fence 3")
    time.sleep(offload.ENDING_STORES_PAUSE)
    assert worker.tier.step(4, "fence 4")


def test_reactor_polls_stores_after_idle_step(worker):
    """Perhaps the engine's last one; the reactor left stores to the steps until then."""
    worker.tier.on_device, worker.tier._step_poll_seconds = True, 3600.0
    worker.tier.step(1, "fence 1")
    store(worker, 1, step=2)
    worker.tier.step(2, "fence 2")
    time.sleep(2 * store_worker.STEP_POLL_SECONDS[1])
    worker.tier.step(3, "fence 3")
    worker.tier.collect(idle=True)
    eventually(lambda: worker.told, 5.0, "stored")


def test_reactor_wakes_less_and_less_often_while_steps_come(worker, monkeypatch):
    worker.tier.on_device = True
    worker.tier._engine.stores._batch_delay = 3600.0
    woken, ran = [], worker.tier._timer_ran
    monkeypatch.setattr(worker.tier, "_timer_ran", lambda: woken.append(time.monotonic()) or ran())
    worker.tier.step(1, "fence 1")
    store(worker, 1, step=1)
    end = time.monotonic() + 1.0
    for number in itertools.count(2):
        worker.tier.step(number, f"fence {number}")
        if time.monotonic() > end:
            break
        time.sleep(3e-3)
    assert 1 <= len(woken) <= 1.0 / store_worker.MAX_STEP_POLL_SECONDS + 4
    worker.reactor.call_soon(lambda: (worker.tier._engine.stores._waiting[0].clear(), ran()))
    eventually(lambda: worker.tier._step_poll_seconds == store_worker.STEP_POLL_SECONDS[1], 5.0, "no step comes")


def test_waiting_stores_are_polled_in_next_step(worker):
    """Their order came while the step before theirs was launched; small lots do not wait then."""
    worker.tier.on_device = True
    worker.tier.step(1, "fence 1")
    store(worker, 1, step=2)
    worker.tier.collect()
    end = time.monotonic() + 2 * offload.STORE_BATCH_DELAY
    for number in itertools.count(2):  # with steps all the time the reactor's thread does not look
        worker.tier.step(number, "fence 2" if number == 2 else "a later one")
        worker.tier.collect()
        if time.monotonic() > end:
            break
        time.sleep(8e-3)
    assert worker.copier.calls == [("store", [1, 2], "fence 2")]


@pytest.mark.parametrize("on_device", [False, True])
def test_idle_collect_polls_loads(worker, on_device):
    """The reactor's thread may not get the interpreter, and is not needed: here it sleeps all the time."""
    worker.tier.on_device = on_device
    worker.tier.step(1, "fence 1")
    worker.copier.polls = 1 << 30  # longer than any poll
    worker.tier.load([load("r")], None)
    eventually(lambda: worker.copier.calls, 5.0, "begun")
    asleep, wake = threading.Event(), threading.Event()
    worker.reactor.call_soon(lambda: (asleep.set(), wake.wait(10)))
    assert asleep.wait(5)
    begun = time.monotonic()
    worker.tier.collect(idle=True)
    assert time.monotonic() - begun < 5.0 and not worker.finished, "it stays for a moment, not until the end"
    worker.tier.collect()
    assert not worker.finished, "and not where something is computed"
    worker.copier.end()
    worker.tier.collect(idle=True)
    assert [result.request_id for result in worker.finished] == ["r"]
    wake.set()


class Link:
    """A device's copies: one after the other at 50 GB/s, each behind its fence (the time when the forward ends)."""

    piece_bytes, on_model_stream = 64 << 20, False

    def __init__(self):
        self.free = 0.0

    def store(self, group, blocks, keys, slots, after):
        nbytes = len(blocks) * BLOCK_BYTES
        self.free = max(self.free, after, time.monotonic()) + nbytes / 50e9
        end = self.free
        return SimpleNamespace(done=lambda: time.monotonic() >= end, bad=None, nbytes=nbytes)


BLOCK_BYTES = part_layout(group_view(0, 16)).nbytes


def test_stores_keep_pace_with_long_prefills(worker):
    """Each of one request alone. The model runner sleeps in each step of a prefill: the reactor must fetch the backlog
    of the step before meanwhile, although the first thing it sees is a copy that takes as long as a forward."""
    link, step_seconds, nbytes = Link(), 0.15, 4 * 10**8
    worker.tier.on_device = True
    worker.tier._engine._backing = None
    worker.pool_backing.copier = link
    worker.tier._engine._storing._min_batches = store_worker.DEVICE_BATCHES[1]
    n = nbytes // BLOCK_BYTES
    array = np.arange(1, n + 1).tobytes()
    ends = {}
    for step in range(1, 5):
        message = m.StoreBlocks(step, "life", 0, step, array, array, array)
        worker.reactor.call_soon(lambda message=message: worker.tier.store(message))
        ends[step] = time.monotonic() + step_seconds
        if worker.tier.step(step, ends[step], lone=True):
            worker.tier.collect()
        time.sleep(step_seconds)
    eventually(lambda: sum(len(told.done) for told in worker.told) == 4, 5.0, "stored")
    assert not any(told.cut for told in worker.told)
    late = time.monotonic() - ends[4]
    assert late < 3 * step_seconds, f"the last step's blocks were stored {late:.2f} s after it; they take 0.008 s"


def test_stores_keep_pace_with_lone_steps(worker):
    """As of requests of one token each, one at a time: no other step polls behind."""
    worker.tier.on_device = True
    for step in range(1, 51):
        store(worker, step, step=step)
        if worker.tier.step(step, f"fence {step}", lone=True):
            worker.tier.collect()
        time.sleep(20e-3)
    assert sum(len(told.done) for told in worker.told) > 25


@pytest.mark.parametrize("on_device", [False, True])
def test_sync_load_starts_whole_and_stores_follow_verification(worker, on_device):
    """All of it is begun at once, behind its fence; the step's own stores begin after its verdict."""
    worker.tier.on_device, worker.copier.polls = on_device, 20
    many = np.arange(100, 1100)
    long = LoadJob("r", [GroupLoad(0, many, many.astype(np.uint64), many % 900 + 1)], 60.0, "life")
    worker.tier.step(1, "fence 1")
    worker.tier.load_now([long, load("s")], Before("fence 2"))
    assert sorted(block for _, blocks, _ in worker.copier.calls for block in blocks) == [3, 4, *many]
    assert len(worker.copier.calls) == len(worker.copier.held) == 1, "as few calls as can be"
    assert worker.copier.calls[0][2] == "fence 2"
    store(worker, 1, step=1)
    worker.tier.wait_until_done(10.0)
    assert sorted(result.request_id for result in worker.finished) == ["r", "s"]
    ways = [way for way, _, _ in worker.copier.calls]
    assert "store" not in ways or not on_device, "the reactor may have begun it, this thread has not"
    worker.tier.collect()
    eventually(lambda: worker.told, 5.0, "stored")


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("faulty", "at"),
    [
        ("_engine.submit_load", 1), ("_engine.submit_load", 2), ("_engine.loads._finish_if_done", 1),
        ("_engine.loads._finish_if_done", 2), ("_engine.loads.next_batch", 1), ("_engine.load_now", 1),
        ("_engine._reap", 1),
    ],
)  # fmt: skip
def test_load_now_error_copies_nothing_after_reported_failure(worker, monkeypatch, faulty, at, on_device):
    """By then the blocks may be another request's. What was begun is waited for."""
    tier, copier, synchronous, calls = worker.tier, worker.copier, SyncLoadTracker(), []
    tier.on_device, copier.piece_bytes, copier.polls = on_device, BLOCK_BYTES, 20 if on_device else 0
    *path, name = faulty.split(".")
    owner = functools.reduce(getattr, path, tier)
    real = getattr(owner, name)

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            raise RuntimeError("on purpose")
        return real(*arguments)

    monkeypatch.setattr(owner, name, fails)
    orders = [load("r"), load("s")]
    synchronous.begin(orders, lambda orders: tier.load_now(orders, Before("fence")))
    assert len(calls) >= at
    monkeypatch.setattr(owner, name, real)
    synchronous.due += orders
    synchronous.wait_until_done(LoadJob, tier)
    assert not tier._sync_loads and not tier.under_way(), "it waited for the end, and not for more"
    others, verified = synchronous.split(worker.finished)
    assert not others and all(result.bad_blocks == {3, 4} for result in verified) and len(verified) == 2
    told = list(copier.calls)
    for _ in range(5):
        with tier._lock:
            assert not tier._poll().loads
    assert copier.calls == told and len(told) == (name == "_reap"), "only what had been begun"


def test_load_now_wait_is_bounded_and_result_arrives_later(worker):
    worker.copier.polls = 1 << 60
    worker.tier.load_now([load("r")], None)
    begun = time.monotonic()
    worker.tier.wait_until_done(0.05)
    assert 0.04 < time.monotonic() - begun < 5.0 and not worker.finished
    worker.copier.end()
    eventually(lambda: worker.finished, 5.0, "seen later")
    worker.tier.wait_until_done(10.0)  # nothing to wait for


@pytest.mark.parametrize("on_device", [False, True])
def test_cancelled_load_ends_after_its_started_copies(worker, on_device):
    """Only then are its blocks vLLM's again. Another request's load goes on."""
    worker.tier.on_device, worker.copier.polls, worker.copier.piece_bytes = on_device, 1 << 60, BLOCK_BYTES
    many = np.arange(100, 1100)
    long = LoadJob("gone", [GroupLoad(0, many, many.astype(np.uint64), many)], 60.0, "life")
    offload = worker.tier._engine
    worker.tier.load([long], None)
    eventually(lambda: worker.copier.calls)
    worker.tier.cancel_loads(["gone", "unknown"])
    eventually(lambda: not offload.loads.nbytes, 5.0, "nothing waits")
    begun = [block for _, blocks, _ in worker.copier.calls for block in blocks]
    assert 0 < len(begun) < 100 and offload.loads and not worker.finished, "copies write into its blocks"
    worker.tier.load([load("stays")], None)
    worker.copier.polls = 0
    with worker.tier._lock:
        for call in offload._loading.calls:
            call.copy.done = lambda: True
    eventually(lambda: len(worker.finished) == 2, 5.0, "both ended")
    gone, stays = worker.finished
    assert gone.request_id == "gone" and gone.failed and "aborted" in gone.reason and not gone.checksum_mismatch
    assert gone.bad_blocks == set(many.tolist()) - set(begun)
    assert not stays.failed and [b for _, blocks, _ in worker.copier.calls for b in blocks] == [*begun, 3, 4]


def test_step_loads_are_submitted_before_cancellations():
    done = []
    half = worker_without_threads()
    half._store = SimpleNamespace(
        load=lambda loads, after: done.extend(loads),
        cancel_loads=done.extend,
        step=lambda step, fence, lone: done.append(step),
    )
    order = load("r")
    half.submit(StepWork(7, loads=[order], aborted=["aborted"]))
    assert done == [order, "aborted", 7]


def test_no_copy_touches_cache_while_suspended(worker, monkeypatch):
    """Its memory is unmapped then: a copy would cost the engine its device."""
    worker.tier.on_device, worker.copier.polls = True, 1 << 60
    worker.tier.step(1, "fence 1")
    worker.tier.load([load("aborted")], None)
    assert len(worker.copier.calls) == 1 and not worker.finished
    ends = []

    def synchronize(device):
        ends.append(device)
        worker.copier.polls = 0
        for call in worker.tier._engine._loading.calls:
            call.copy.done = lambda: True

    monkeypatch.setattr(store_worker.torch.cuda, "synchronize", synchronize)
    worker.tier.suspend()
    assert len(ends) == 1 and [r.request_id for r in worker.finished] == ["aborted"]
    store(worker, 7, step=1)
    # It was on its way to the reactor.
    worker.reactor.call_soon(lambda: worker.tier._load([load("late")], Before("fence 1")))
    eventually(lambda: worker.told and len(worker.finished) == 2, 5.0, "a message")
    assert worker.told[0].cut == [(7, 0)] and worker.finished[1].failed
    assert len(worker.copier.calls) == 1
    worker.tier.load([load("awake")], None)
    eventually(lambda: len(worker.finished) == 3, 5.0, "loaded")
    assert not worker.finished[2].failed


def test_polling_error_fails_neither_engine_nor_load(worker, monkeypatch, caplog):
    worker.tier.on_device = True
    worker.tier.step(1, "fence 1")
    drive, left = worker.tier._engine.poll, [3]

    def failing(stores=True):
        left[0] -= 1
        if left[0] >= 0:
            raise KeyError("an unexpected error")
        return drive(stores)

    monkeypatch.setattr(worker.tier._engine, "poll", failing)
    worker.tier.load([load("r")], None)  # on the model runner's thread, as the next
    worker.tier.collect()
    eventually(lambda: worker.finished, 5.0, "loaded")
    assert not worker.finished[0].failed
    assert caplog.text.count("polling copies failed") == 1
    assert worker.reactor.errors == 3, "the worker side looks for what was lost by it"


def test_collect_error_after_load_still_reports_result(worker, monkeypatch):
    worker.tier.on_device, worker.copier.polls = True, 1 << 60
    worker.tier.step(1, "fence 1")
    worker.tier.load([load("r")], None)
    worker.copier.end()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), worker.tier._lock:
        patch.setattr(worker.tier._engine, "next_poll", lambda **_: 1 / 0)
        worker.tier.collect()
    assert [result.request_id for result in worker.finished] == ["r"]


@pytest.mark.parametrize("late", [False, True])
def test_store_job_that_cannot_be_queued_is_reported_not_stored(worker, monkeypatch, late):
    """Its blocks would be held for ever. ``late``: the fault comes when the order is queued already."""
    submit = worker.tier._engine.submit_store

    def fails(order):
        if late:
            submit(order)
        raise RuntimeError("on purpose")

    monkeypatch.setattr(worker.tier._engine, "submit_store", fails)
    worker.tier.step(5, None)
    store(worker, 1, step=5)
    eventually(lambda: worker.told, 5.0, "a message")
    assert [(message.done, message.cut) for message in worker.told] == [([], [(1, 0)])] and not worker.copier.calls


def test_finished_stores_are_reported_again_after_error(worker, monkeypatch):
    send, left = worker.tier._send, [RuntimeError("on purpose")]

    def fails(message):
        if left:
            raise left.pop()
        send(message)

    monkeypatch.setattr(worker.tier, "_send", fails)
    worker.tier.step(5, None)
    store(worker, 1, step=5)
    eventually(lambda: worker.told, 5.0, "a message")
    assert [(message.done, message.cut) for message in worker.told] == [([1], [])] and not left
    assert worker.told[0].nbytes > 0, "and what was copied counts"

"""The offload engine against a modelled link, and once with the real copier."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import Clock
from worker_fakes import LIFE, MIB, CpuLink, Link, arrays, cache, engine, load, run, run_real, store

from vllm_kvtier.jobs.results import ABORTED
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StoreJob
from vllm_kvtier.wire.slots import PAGE, part_layout, slot_layout
from vllm_kvtier.worker.copy.base import make_copier
from vllm_kvtier.worker.store import copy_engine as module
from vllm_kvtier.worker.store.copy_engine import CopyEngine


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def link(clock):
    return Link(clock)


# -- loads that a request waits for ----------------------------------------------------------------------------------


def test_copy_engine_load_now_issues_whole_load(link, clock):
    """Behind what is under way; and if it was not polled in time, its duration says nothing about the link."""
    offload = engine(link, clock)
    offload.submit_load(load("before", 2000), None)
    offload.poll()
    under_way, rate = len(link.calls), offload.rates[0]
    offload.submit_load(load("now", 3000), clock.now)
    offload.load_now()
    assert all(call.held for call in link.calls) and offload.queued_load_bytes == 5000 * MIB
    assert sum(call.nbytes for call in link.calls) == 5000 * MIB and len(link.calls) <= under_way + 2
    clock.now += 10.0
    ended = offload.poll()
    assert {result.request_id: result.timed for result in ended.loads} == {"before": False, "now": False}
    assert offload.rates[0] == rate and not offload.loads
    offload.submit_load(load("later", 10), None)
    [later] = run(offload, clock, 10).loads
    assert later.timed and offload.rates[0] != rate


class ModelStreamLink(Link):
    """Gathers stores on a stream that it is given, in a ring with ``room`` for so many calls under way."""

    on_model_stream, room = True, 2

    def __init__(self, clock):
        super().__init__(clock)
        self.streams, self.stores = [], []

    def free_pieces(self, stream):
        return self.room - sum(not call.done() for call in self.stores)

    def store(self, *arguments, stream=None):
        self.streams.append(stream)
        self.stores.append(call := super().store(*arguments))
        return call


def test_copy_engine_stores_on_the_models_stream_only_what_its_ring_has_room_for(clock):
    """What has waited for long since its step ended is gathered beside the model; nothing polls meanwhile in vain."""
    link = ModelStreamLink(clock)
    offload = engine(link, clock)
    ended = SimpleNamespace(query=lambda: True)
    offload.poll()
    assert offload.on_model_stream
    offload.model_stream = "the model's"
    link.rate = 320 * MIB  # a call takes 0.1 s
    for _ in range(20):
        offload.submit_store(store(32, step=1))
    offload.step_launched(1, None)
    offload.step_launched(2, ended)
    offload.poll(stores=False)
    offload.poll()
    assert not link.streams and offload.next_poll() == pytest.approx(module.QUIET_SECONDS)
    clock.now += module.QUIET_SECONDS
    offload.poll()
    assert link.streams == ["the model's"] * 2
    assert 0 < offload.next_poll() <= module.STORES_PAUSE, "for calls that end"
    clock.now += 0.15
    stored = offload.poll().stored
    assert link.streams == ["the model's"] * 3
    clock.now += module.MODEL_STREAM_SECONDS
    stored += offload.poll().stored
    assert link.streams[3:] and set(link.streams[3:]) == {None}
    assert len(stored + run(offload, clock, 60).stored) == 20


def test_copy_engine_stores_on_the_models_stream_at_once_behind_a_launched_step(clock):
    link = ModelStreamLink(clock)
    offload = engine(link, clock)
    offload.poll()
    offload.model_stream = "the model's"
    offload.step_launched(1, SimpleNamespace(query=lambda: True))
    offload.poll()
    offload.submit_store(store(320, step=1))
    offload.poll()
    assert not link.streams
    offload.step_launched(2, SimpleNamespace(query=lambda: True))  # so small a model that it has ended already
    offload.poll()
    assert link.streams == ["the model's"]


def test_copy_engine_stores_beside_the_model_once_a_copier_does_not_use_its_stream(clock):
    """Each copier reads the tuning anew: of a machine that was measured meanwhile."""
    offload = engine(ModelStreamLink(clock), clock)
    offload.poll()
    offload.model_stream = "the model's"
    offload._pool.current = Link(clock)
    offload.submit_store(job := store(32, step=1))
    offload.step_launched(1, None)
    assert run(offload, clock, 60).stored == [job.id]


def test_copy_engine_load_now_on_host_ends_at_once(clock):
    offload = engine(CpuLink(clock), clock)
    offload.submit_load(load("now", 30), None)
    offload.load_now()
    [now] = offload.poll().loads
    assert now.timed and now.seconds > 0


# -- stores ----------------------------------------------------------------------------------------------------------


def test_copy_engine_store_waits_for_its_step_event(link, clock):
    offload = engine(link, clock)
    order = store(40, step=3)
    offload.submit_store(order)
    offload.step_launched(2, clock.now)
    offload.poll()
    assert not link.calls and not offload.active
    offload.step_launched(3, fence := clock.now + 0.05)
    offload.poll()
    assert link.calls and link.calls[0].over > fence
    assert run(offload, clock, 1).stored == [order.id] and clock.now > fence


def test_copy_engine_store_uses_later_step_event_if_own_is_dropped(link, clock):
    offload = engine(link, clock)
    offload.submit_store(store(40, step=5))
    for step in range(5, 8 + module.STEP_EVENTS):
        offload.step_launched(step, clock.now + step)
    offload.poll()
    # The oldest that is kept.
    assert link.calls[0].over == pytest.approx(clock.now + 8 + link.piece_bytes / link.rate)
    with pytest.raises(ValueError, match="step 4 was launched after step 23"):
        offload.step_launched(4, None)


def test_small_stores_are_batched_within_deadline(link, clock):
    offload = engine(link, clock)
    for step in range(4):
        offload.step_launched(step, None)
        offload.submit_store(store(1, step, first=1 + step))
        offload.poll()
    assert not link.calls and not offload.active
    assert offload.next_poll() == pytest.approx(module.STORE_BATCH_DELAY)
    clock.now += module.STORE_BATCH_DELAY
    offload.poll()
    assert [call.blocks for call in link.calls] == [[1, 2, 3, 4]]
    offload.submit_store(store(31, step=3, first=10))
    offload.poll()
    assert len(link.calls) == 1
    offload.submit_store(store(1, step=3, first=50))  # now it is a piece
    offload.poll()
    assert len(link.calls) == 2


def test_cancelled_store_does_not_fill_a_batch(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, None)
    gone = store(31)
    offload.submit_store(gone)
    offload.stores.cancel([(gone.id, 0)])
    offload.submit_store(store(1, first=100))
    offload.poll()
    assert not link.calls and offload.next_poll() == pytest.approx(module.STORE_BATCH_DELAY)


def test_copy_engine_stores_waiting_for_steps_are_not_dropped(link, clock):
    """Two steps of 2.4 GB each are ordered before the first of them has run, and a third before its copies have ended;
    nothing is in want of time."""
    offload = engine(link, clock)
    steps = 5
    for n in range(steps):
        offload.submit_store(store(2400, step=n, first=1 + 2400 * n))
        if n:
            offload.step_launched(n - 1, clock.now + 0.4)  # a long forward
            offload.poll()
    assert offload.stores.nbytes == steps * 2400 * MIB
    offload.step_launched(steps - 1, clock.now + 0.4)
    ended = run(offload, clock, 10)
    assert len(ended.stored) == steps and not ended.cut and not offload.stores.nbytes


def test_copy_engine_cancelled_stores_end_after_running_copies(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, clock.now + 0.1)
    small, large, waiting = store(32), store(4000, first=100), store(40, first=5000)
    for order in (small, large, waiting):
        offload.submit_store(order)
    assert offload.poll() == ([], [], [])
    begun = len(link.calls)
    assert begun > 1
    copied = sum(len(call.blocks) for call in link.calls)
    offload.stores.cancel([(small.id, 0), (large.id, 0), (waiting.id, 0)])
    assert offload.poll() == ([], [], [(waiting.id, 0)])
    ended = run(offload, clock, 3)
    assert ended.stored == [small.id] and ended.cut == [(large.id, copied - 32)]
    assert len(link.calls) == begun  # nothing more began


def test_copy_engine_cancel_cuts_store_at_lowest_count(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, clock.now + 0.1)
    order = store(1000)
    offload.submit_store(order)
    offload.poll()
    begun = sum(len(call.blocks) for call in link.calls)
    for count in (900, 700, 800):
        offload.stores.cancel([(order.id, count)])
    assert begun < 700 and run(offload, clock, 3).cut == [(order.id, 700)]
    assert [block for call in link.calls for block in call.blocks] == list(range(1, 701))


def test_copy_engine_failed_store_keeps_blocks_before_failure(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, clock.now + 0.1)
    order = store(4000)
    offload.submit_store(order)
    offload.poll()
    failed = link.calls[1]
    done = link._done

    def broken(call):
        if call is failed:
            raise RuntimeError("an ECC error")
        return done(call)

    link._done = broken
    assert run(offload, clock, 3).cut == [(order.id, failed.blocks[0] - 1)]


@pytest.mark.parametrize(("seen_after", "measured"), [(1e-3, True), (0.05, False)])
def test_copy_engine_store_seen_late_does_not_change_the_rate(link, clock, seen_after, measured):
    offload = engine(link, clock)
    offload.step_launched(0, None)
    offload.submit_store(store(32))
    offload.poll()
    rate = offload.rates[1]
    clock.now += seen_after
    assert len(offload.poll().stored) == 1 and (offload.rates[1] != rate) == measured


def test_copy_engine_store_that_never_starts_is_dropped_at_timeout(link, clock):
    offload = engine(link, clock, store_timeout=5.0)
    order = store(40, step=7)
    offload.submit_store(order)
    assert offload.next_poll() == pytest.approx(5.0) and not offload.active
    assert run(offload, clock, 10).cut == [(order.id, 0)] and not link.calls


# -- loads -----------------------------------------------------------------------------------------------------------


def test_copy_engine_load_passes_queued_stores(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, None)
    for n in range(20):
        offload.submit_store(store(100, first=1 + 100 * n))
    offload.poll()
    clock.now += 0.001
    before = len(link.calls)
    offload.submit_load(load("r", 64), None)
    offload.poll()
    assert [c.kind for c in link.calls[before:]].count("load") == 2
    result, = run(offload, clock, 0.003).loads
    assert not result.failed and result.bytes == 64 * MIB
    assert result.seconds < 64 * MIB / link.rate + 2 * module.LOADS_PAUSE and result.queued == 0.0


def test_copy_engine_one_thread_alternates_loads_and_stores(clock):
    link = CpuLink(clock, rate=2e9, piece_bytes=4 * MIB)
    offload = engine(link, clock)
    offload.step_launched(0, None)
    offload.submit_store(store(400))
    began = clock.now
    offload.poll()
    assert clock.now - began < module.MAX_RUN + 2 * link.piece_bytes / link.rate  # sockets have their turn
    assert offload.active and offload.next_poll() == 0.0
    offload.submit_load(load("r", 100), None)
    before = len(link.calls)
    loads = run(offload, clock, 10).loads
    kinds = [c.kind for c in link.calls[before:]]
    last = max(i for i, kind in enumerate(kinds) if kind == "load")
    assert not loads[0].failed and kinds.count("load") == 25
    assert 20 <= kinds[: last + 1].count("store") <= 25


def test_copy_engine_short_load_passes_long_one(link, clock):
    offload = engine(link, clock)
    offload.submit_load(load("long", 10_000), None)
    run(offload, clock, 0.02)
    offload.submit_load(load("short", 64), None)
    first, = run(offload, clock, 0.02).loads
    assert first.request_id == "short"
    # What was given ahead, itself, and a poll.
    assert first.seconds < module.LOADS_AHEAD[1] + 2 * 64 * MIB / link.rate + 2 * module.LOADS_PAUSE
    second, = run(offload, clock, 1).loads
    assert second.request_id == "long" and second.seconds < 1.02 * 10_064 * MIB / link.rate + 0.002


def test_copy_engine_end_of_short_load_is_seen_within_150_us(link, clock):
    offload = engine(link, clock)
    offload.submit_load(load("long", 19_000), None)
    run(offload, clock, 0.05)
    for n in range(10):
        run(offload, clock, 0.0013 * n)
        began, loads = clock.now, []
        offload.submit_load(load("short", 10 + n, first=20_000), None)
        while not loads:
            loads = run(offload, clock, 1e-9).loads
        over = max(c.over for c in link.calls if c.blocks[0] >= 20_000)
        assert began + loads[0].seconds - over < 0.15e-3


def test_copy_engine_loads_of_one_step_share_calls(link, clock):
    offload = engine(link, clock)
    fence = clock.now + 0.01
    for n in range(6):
        offload.submit_load(load(f"r{n}", 3, 2, first=1 + 10 * n), fence)
    offload.submit_load(load("later", 3, first=100), clock.now + 0.02)
    ended = run(offload, clock, 1)
    assert len(ended.loads) == 7 and not any(r.failed for r in ended.loads)
    sizes = [(c.group, len(c.blocks)) for c in link.calls]
    assert sorted(sizes) == [(0, 3), (0, 18), (1, 12)]


def test_copy_engine_running_calls_are_bounded(link, clock):
    offload = engine(link, clock)
    for n in range(40):
        offload.submit_load(load(f"r{n}", 1, first=1 + n), clock.now + 0.01 + 1e-6 * n)
    for _ in range(3):
        offload.poll()
    assert len(link.calls) == module.MAX_CALLS == link.users
    assert len(run(offload, clock, 1).loads) == 40


def test_copy_engine_bad_block_in_shared_call_fails_its_request_only(link, clock):
    offload = engine(link, clock)
    link.bad = {12, 21}
    for n in range(3):
        offload.submit_load(load(f"r{n}", 3, first=1 + 10 * n), None)
    results = {r.request_id: r for r in run(offload, clock, 1).loads}
    assert len(link.calls) == 1
    assert [results[f"r{n}"].bad_blocks for n in range(3)] == [set(), {12}, {21}]
    assert [results[f"r{n}"].corrupt for n in range(3)] == [[], [(0, 12 * 256)], [(0, 21 * 256)]]


def test_copy_engine_queued_time_ends_with_first_copy(clock):
    link = CpuLink(clock, rate=2e9, piece_bytes=4 * MIB)
    offload = engine(link, clock)
    for name, fence in (("first", 1.0), ("second", 2.0)):
        offload.submit_load(load(name, 100), fence)
    first, second = run(offload, clock, 10).loads
    alone = 100 * MIB / link.rate
    assert first.queued == 0.0 and first.seconds == pytest.approx(alone, rel=0.01)
    assert second.queued == pytest.approx(alone, rel=0.01) and second.seconds == pytest.approx(2 * alone, rel=0.01)


def test_copy_engine_bad_block_stops_its_group_only(link, clock):
    offload = engine(link, clock)
    link.bad = {11}
    offload.submit_load(load("r", 2000, 0), None)
    order = LoadJob(
        "two", [GroupLoad(0, **arrays(2000)), GroupLoad(1, **arrays(64, first=5000))], 10.0, LIFE
    )
    offload.submit_load(order, None)
    one, two = run(offload, clock, 1).loads
    for result in (one, two):
        copied = result.bytes // MIB - (64 if result is two else 0)
        assert copied < 500  # what was given ahead of the first check
        assert result.bad_blocks == {11, *range(copied + 1, 2001)} and result.corrupt == [(0, 11 * 256)]
        assert result.failed and result.checksum_mismatch
        total = 2064 if result is two else 2000
        assert result.reason == f"1 of {total} blocks from the node store have a wrong checksum"


def test_copy_engine_late_load_fails_after_its_copies_ended(link, clock):
    offload = engine(link, clock)
    stuck = clock.now + 5.0
    offload.submit_load(load("late", 1000, timeout=0.5), stuck)
    assert run(offload, clock, 3).loads == []
    begun = sum(len(c.blocks) for c in link.calls)
    assert 0 < begun < 1000 and offload.next_poll() > 0.0
    result, = run(offload, clock, 10).loads
    assert clock.now > stuck and sum(len(c.blocks) for c in link.calls) == begun
    assert result.bad_blocks == set(range(begun + 1, 1001))
    assert result.reason == "the load did not end within 0.5 s" and not result.checksum_mismatch
    # All of it under way in time and right in the end is no failure.
    offload.submit_load(load("slow", 10, timeout=0.5), clock.now + 1.0)
    result, = run(offload, clock, 10).loads
    assert result.seconds > 1.0 and not result.failed and result.reason == ""


def test_copy_engine_load_reports_time_waiting_for_step(link, clock):
    offload = engine(link, clock)
    stuck = clock.now + 0.5
    offload.submit_load(load("behind", 1000), stuck, lambda: clock.now >= stuck)
    offload.submit_load(load("free", 10), None)
    results = {result.request_id: result for result in run(offload, clock, 10).loads}
    assert 0.4 < results["behind"].fenced < 0.5 < results["behind"].seconds
    assert results["free"].fenced == 0.0


def test_copy_engine_late_load_does_not_busy_poll(link, clock):
    offload = engine(link, clock)
    stuck = clock.now + 5.0
    for name, timeout in (("late", 0.5), ("patient", 10.0)):
        offload.submit_load(load(name, 1000, timeout=timeout), stuck)
    run(offload, clock, 1.0)
    assert offload.next_poll() > 0.0 and link.polls < 10_000


def test_copy_engine_cancelled_load_stops(link, clock):
    offload = engine(link, clock)
    offload.submit_load(load("gone", 10_000), None)
    offload.poll()
    offload.cancel_loads(lambda job: job.request_id in ("gone", "never seen"), ABORTED)
    result, = run(offload, clock, 1).loads
    assert result.failed and "aborted" in result.reason and result.bytes < 1000 * MIB
    assert clock.now < 1000.05


def test_copy_engine_empty_load_ends_at_once(link, clock):
    offload = engine(link, clock)
    offload.submit_load(load("empty", 0, 0), None)
    assert offload.active and offload.next_poll() == 0.0
    result, = offload.poll().loads
    assert not result.failed and not offload.active and offload.next_poll() is None


# -- pace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("rate", [2e9, 25e9, 55e9, 200e9])
def test_copy_engine_keeps_link_busy_with_few_polls(clock, kind, rate):
    link = Link(clock, rate=rate)
    offload = engine(link, clock)
    offload.step_launched(0, None)
    count = int(rate * 0.5 / link.block_bytes)
    if kind == "load":
        offload.submit_load(load("r", count, timeout=100.0), None)
    else:
        offload.submit_store(store(count))
    began = clock.now
    drives = run(offload, clock, 10).drives
    seconds = clock.now - began
    assert seconds < 0.51 + 0.02  # whose rate takes a moment to learn
    assert drives < seconds / (0.25e-3 if kind == "load" else 1e-3)


def test_copy_engine_keeps_link_busy_when_polled_late(clock):
    link = Link(clock, rate=55e9)
    offload = engine(link, clock)
    offload.step_launched(0, None)
    offload.submit_store(store(55_000))

    def stall():
        clock.now += 5e-3

    began = clock.now
    run(offload, clock, 10, stall)
    assert 55_000 * MIB / link.rate / (clock.now - began) > 0.7


def test_copy_engine_waiting_for_long_step_polls_rarely(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, clock.now + 0.3)
    offload.submit_store(store(40))
    assert run(offload, clock, 10).drives < 100


# -- with the real copier --------------------------------------------------------------------------------------------


def test_copy_engine_round_trip_with_real_copier_names_bad_blocks():
    view, memory = cache(64, 1)
    layouts = [part_layout(g) for g in view.groups]
    pages = [slot_layout([part]).pages for part in layouts]
    pool = torch.zeros(200 * PAGE + PAGE, dtype=torch.uint8)
    address = -(-pool.data_ptr() // PAGE) * PAGE
    base = address - pool.data_ptr()
    buffer = pool[base : base + 200 * PAGE].numpy()
    mapping = SimpleNamespace(buffer=memoryview(buffer))
    copier = make_copier(view, (address, 200 * PAGE, mapping), layouts, [0, 0])
    copier.register(0, 200 * PAGE)
    backing = SimpleNamespace(instance=LIFE, copier=copier, users=0, give=lambda: None)
    offload = CopyEngine(SimpleNamespace(current=backing), [part.nbytes for part in layouts])

    slot, orders = 1, []
    for group in (0, 1):
        blocks = np.arange(1 + 30 * group, 26 + 30 * group)
        slots = slot + pages[group] * np.arange(25)
        slot = int(slots[-1]) + pages[group]
        keys = blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        orders.append(StoreJob(100 + group, group, blocks, keys, slots, 0, LIFE))
        offload.submit_store(orders[-1])
    offload.step_launched(0, None)
    real = run_real(offload, lambda ended: len(ended.stored) == 2)
    assert sorted(real.stored) == [100, 101]

    before = memory.clone()
    memory.zero_()
    groups = [GroupLoad(o.group, o.blocks, o.keys, o.slots) for o in orders]
    offload.submit_load(LoadJob("r", groups, 10.0, LIFE), None)
    result, = run_real(offload, lambda ended: ended.loads).loads
    assert not result.failed and result.bytes == sum(25 * part.nbytes for part in layouts)
    for layer in range(5):
        group = 0 if layer < 3 else 1
        assert torch.equal(memory[layer, orders[group].blocks], before[layer, orders[group].blocks])

    buffer[int(orders[1].slots[20]) * PAGE + 77] ^= 4
    offload.submit_load(LoadJob("r", groups, 10.0, LIFE), None)
    result, = run_real(offload, lambda ended: ended.loads).loads
    assert int(orders[1].blocks[20]) in result.bad_blocks <= set(orders[1].blocks[20:].tolist())
    assert result.corrupt == [(1, int(orders[1].slots[20]))] and result.checksum_mismatch

    outside = LoadJob("r", [GroupLoad(0, orders[0].blocks, orders[0].keys, orders[0].slots + 10_000)], 10.0, LIFE)
    offload.submit_load(outside, None)
    result, = run_real(offload, lambda ended: ended.loads).loads
    assert result.bad_blocks == set(orders[0].blocks.tolist())
    copier.close()

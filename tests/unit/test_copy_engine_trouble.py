"""The offload engine when something raises: the copier, the device, its own code; and when the store changes."""

import logging
from types import SimpleNamespace

import pytest
from support import Clock
from worker_fakes import LIFE, MIB, Link, engine, load, run, store

from vllm_kvtier.worker.store import copy_queues
from vllm_kvtier.worker.store.copy_engine import CopyEngine


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def link(clock):
    return Link(clock)


def once(function):
    """``function``, but that its first call raises."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("on purpose")
        return function(*arguments)

    return call


@pytest.mark.parametrize("faulty", ["loads.expire", "stores.expire", "_issue_load", "_issue_store"])
def test_copy_engine_poll_error_returns_results_next_time(link, clock, monkeypatch, faulty):
    """Its request would wait for ever: nothing else knows of it any more."""
    offload = engine(link, clock)
    offload.submit_load(load("r", 3), None)
    offload.submit_store(order := store(3))
    offload.step_launched(1, None)
    for _ in range(2):
        clock.now += 1.0
        offload._issue_load(), offload._issue_store()
    assert len(link.calls) == 2
    clock.now += 1.0
    *owner, name = faulty.split(".")
    owner = getattr(offload, owner[0]) if owner else offload
    monkeypatch.setattr(owner, name, once(getattr(owner, name)))
    with pytest.raises(RuntimeError, match="on purpose"):
        offload.poll()
    ended = offload.poll()
    assert [result.request_id for result in ended.loads] == ["r"] and ended.stored == [order.id]
    assert not offload.poll().loads and not link.users


def test_copy_engine_load_with_unreadable_checksums_fails(link, clock):
    """The device failed after the copy had ended."""
    offload = engine(link, clock)
    offload.submit_load(load("r", 3), None)
    offload.poll()
    [call] = link.calls
    del call.bad
    clock.now += 1.0
    [result] = offload.poll().loads
    assert result.bad_blocks == {1, 2, 3} and "failed" in result.reason and not link.users


def test_copy_engine_error_before_copies_begin_ends_their_jobs(link, clock, monkeypatch):
    """A batch that is in no lane and has not ended would keep its load's request waiting for ever."""
    offload = engine(link, clock)
    offload.submit_load(load("r", 3), None)
    offload.submit_store(order := store(3))
    offload.step_launched(1, None)
    for lane in (offload._loading, offload._storing):
        monkeypatch.setattr(lane, "add", once(lane.add))
    clock.now += 1.0
    ended = offload.poll()
    (result,) = ended.loads
    assert result.bad_blocks == {1, 2, 3} and "on purpose" in result.reason
    assert ended.cut == [(order.id, 0)] and not link.calls and not link.users


def test_copy_engine_copier_error_fails_its_jobs_only(link, clock, caplog):
    offload = engine(link, clock)
    offload.step_launched(0, None)
    call, link._call = link._call, lambda *a: (_ for _ in ()).throw(ValueError("slot 9 outside the memory"))
    for n in range(2):
        offload.submit_load(load(f"r{n}", 3, 2), None)
    order = store(40)
    offload.submit_store(order)
    with caplog.at_level(logging.WARNING, "vllm.kvtier.worker.store.copy_engine"):
        ended = offload.poll()
    assert ended.cut == [(order.id, 0)] and len(ended.loads) == 2
    for result in ended.loads:
        assert result.bad_blocks == {1, 2, 3} and "slot 9 outside the memory" in result.reason
        assert not result.checksum_mismatch
    assert len(caplog.records) == 2  # once each way
    link._call = call
    offload.submit_load(load("fine", 3), None)
    assert not run(offload, clock, 1).loads[0].failed


def test_copy_engine_device_error_fails_all_jobs(link, clock):
    offload = engine(link, clock)
    offload.step_launched(0, None)
    offload.submit_load(load("r", 100), None)
    offload.submit_store(store(64))
    offload.poll()

    def broken(call):
        raise RuntimeError("CUDA error: unspecified launch failure")

    link._done = broken
    ended = run(offload, clock, 1)
    assert ended.loads[0].failed and "unspecified launch failure" in ended.loads[0].reason
    assert len(ended.cut) == 1 and link.users == 0


def test_copy_engine_store_change_ends_waiting_jobs_only(link, clock):
    pool = SimpleNamespace(current=link)
    offload = CopyEngine(pool, [MIB, MIB], clock=clock)
    offload.step_launched(0, clock.now + 0.05)
    offload.submit_load(load("r", 1000), clock.now + 0.05)
    begun_store, waiting_store = store(32), store(1000, first=100)
    offload.submit_store(begun_store)
    offload.submit_store(waiting_store)
    offload.poll()
    begun, old = len(link.calls), link.users
    assert old == begun > 2
    pool.current = new = Link(clock)
    new.instance = "life 2"
    assert offload.poll() == ([], [], [])
    loads = sum(len(c.blocks) for c in link.calls if c.kind == "load")
    other = load("new", 5, instance="life 2")
    offload.submit_load(other, None)
    for wrong in ("", LIFE):
        offload.submit_load(load("stale", 5, instance=wrong), None)
    stale = store(5)
    offload.submit_store(stale)
    ended = run(offload, clock, 1)
    results = {r.request_id: r for r in ended.loads}
    assert results["r"].bad_blocks == set(range(loads + 1, 1001)) and "restarted" in results["r"].reason
    assert not results["new"].failed and "another instance" in results["stale"].reason
    assert sorted(ended.cut) == [(o.id, 0) for o in (begun_store, waiting_store, stale)] and not ended.stored
    assert len(link.calls) == begun and link.users == 0 and new.users == 0
    pool.current = None
    offload.submit_load(load("unmapped", 5), None)
    assert "not mapped" in offload.poll().loads[0].reason


@pytest.mark.parametrize("where", ["_copy_batch", "_urgency", "LoadQueue._joinable", "_Load.current", "_Load.at"])
def test_copy_engine_load_batch_error_is_retried_and_all_loads_end(link, clock, monkeypatch, where):
    offload = engine(link, clock)
    owner, name = (
        (copy_queues, where) if "." not in where else (getattr(copy_queues, where.split(".")[0]), where.split(".")[1])
    )
    before, raised = getattr(owner, name), []

    def once(*args):
        if not raised:
            raised.append(where)
            raise RuntimeError(where)
        return before.fget(*args) if isinstance(before, property) else before(*args)

    monkeypatch.setattr(owner, name, property(once) if isinstance(before, property) else once)
    offload.submit_load(load("first", 1000), None)
    with pytest.raises(RuntimeError):
        offload.poll()
    assert raised
    offload.submit_load(load("second", 10), None)
    results = {result.request_id: result for result in run(offload, clock, 10).loads}
    assert set(results) == {"first", "second"} and not any(result.failed for result in results.values())
    assert not offload.loads and offload.loads.nbytes == 0


def test_copy_engine_store_batch_error_is_retried(link, clock, monkeypatch):
    offload = engine(link, clock)
    monkeypatch.setattr(copy_queues, "_copy_batch", once(copy_queues._copy_batch))
    offload.submit_store(order := store(1000))
    offload.step_launched(order.after_step, None)
    with pytest.raises(RuntimeError, match="on purpose"):
        offload.poll()
    assert run(offload, clock, 10).stored == [order.id]
    assert not offload.stores.ids() and offload.stores.nbytes == 0

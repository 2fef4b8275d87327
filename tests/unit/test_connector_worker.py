"""The worker side while it is being set up, and when vLLM takes the cache's memory away."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pull_fakes import batch_of, pull_of
from support import Uncontained, eventually
from worker_halves import contain_with, worker_without_threads

from vllm_kvtier.containment import Containment
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import PullResult
from vllm_kvtier.jobs.transfer_jobs import PullJob, StepWork
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.link import LinkPlace, LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker import peer_exchange
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import Pending
from vllm_kvtier.worker.peer_fetch.fetch_worker import IDLE_SECONDS
from vllm_kvtier.worker.store.store_worker import NextLaunch


@pytest.fixture
def half():
    return worker_without_threads()


def ready(half, device="cpu"):
    """Set up by now; returns the fences that sums were made behind."""
    step_events = []
    half._exchange.memory = SimpleNamespace(
        compute_checksums=lambda batches, after: step_events.append(after) or Pending(None)
    )
    half._exchange.memory.close = lambda: None
    half._exchange.pulls = SimpleNamespace(active=False, stop=lambda why: [])
    half._exchange.view = SimpleNamespace(device=torch.device(device))
    return step_events


def test_checksums_of_step_before_memory_existed_are_computed_later(half, monkeypatch):
    marked = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=marked.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    half._device = 0
    half.submit(StepWork(3, [batch_of([1])]))
    step_events = ready(half)
    half.queued.pop()()
    (first,) = step_events
    assert first is not None and marked == ["stream of 0"]
    half._exchange.view = SimpleNamespace(device=torch.device("cuda", 0))
    half.submit(StepWork(4, [batch_of([2])]))
    half.queued[-1]()
    assert len(step_events) == 2 and step_events[1] is not first and marked == 2 * ["stream of 0"]


def test_worker_of_cpu_cache_uses_no_step_events(half, monkeypatch):
    half._device = 0
    step_events = ready(half, "cpu")
    half.submit(StepWork(3, [batch_of([1])]))
    half.queued.pop()()
    assert step_events == [None]


def test_worker_without_device_uses_no_step_events(half):
    half.submit(StepWork(3, [batch_of([1])]))
    step_events = ready(half)
    half.queued.pop()()
    assert step_events == [None]


NO_WORK = ("step", "idle", "lone", "urgent", "generation")
BRINGS = [each.name for each in dataclasses.fields(StepWork) if each.name not in NO_WORK]


@pytest.mark.parametrize("name", [*BRINGS, "outstanding", "due", ""])
def test_worker_step_is_short_only_without_work_and_jobs(half, monkeypatch, name):
    work, submitted = StepWork(3), []
    monkeypatch.setattr(half, "submit", lambda work, drafts_follow: submitted.append(work))
    if name in BRINGS:
        setattr(work, name, {"r": []} if name == "new_peers" else ["r"])
    job = PullJob("r", "s/1", [pull_of([1], [1])], 1.0)
    if name == "outstanding":
        half._jobs.outstanding["r"] = job
    if name == "due":
        half._jobs.sync_loads.due.append(job)
    results = half.end_step(work)
    assert (submitted, results is None) == (([], True) if not name else ([work], False))


def test_worker_step_without_work_polls_stores_when_due(half):
    calls = []
    half._store = SimpleNamespace(
        step=lambda step, event, lone: calls.append(step) or step == 2, collect=lambda idle: calls.append(idle)
    )
    for step in (1, 2):
        NextLaunch.since = 0.0
        half.begin(StepWork(step))
        assert NextLaunch.since > 0, "the reactor begins no store while the forward is launched"
        assert half.end_step(StepWork(step)) is None
    half.end_step(StepWork(3, idle=True))
    assert calls == [1, 2, False, 3, True]


@pytest.mark.parametrize(("idle", "young", "polls"), [(True, 1, 3), (False, 1, 1), (True, 0, 1)])
def test_worker_idle_step_waits_for_young_pull_only(half, monkeypatch, idle, young, polls):
    """vLLM hears of its end with this step instead of the next one."""
    clock, pull = [100.0], ["r"]
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(peer_exchange, "time", fake)
    seen = []

    def poll(quick):
        seen.append(quick)
        return [PullResult(pull.pop(), set(), False, "", 1, 0.1)] if len(seen) == 3 else []

    ready(half)
    half._exchange.memory.on_device = True
    half._exchange.pulls = SimpleNamespace(active=True, poll=poll, num_young=lambda: young and len(pull))
    half._exchange.collect(idle)
    assert len(seen) == polls and all(seen)
    assert [result.request_id for result in half._jobs._done] == ["r"][: polls == 3]


def test_worker_idle_step_waits_no_longer_than_its_time(half, monkeypatch):
    clock, seen = [100.0], []
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(peer_exchange, "time", fake)
    ready(half)
    half._exchange.memory.on_device = True
    poll = lambda quick: seen.append(quick) or []  # noqa: E731
    half._exchange.pulls = SimpleNamespace(active=True, poll=poll, num_young=lambda: 1)
    half._exchange.collect(True)
    assert 100 + IDLE_SECONDS <= clock[0] < 100 + IDLE_SECONDS + 2 * peer_exchange.POLL_SECONDS
    assert len(seen) == round((clock[0] - 100) / peer_exchange.POLL_SECONDS) + 1


def test_worker_suspended_runs_no_queued_copy(half, monkeypatch):
    step_events = ready(half, "cuda")
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    order = PullJob("r", "s/1", [pull_of([1, 2], [1, 2])], 1.0)
    work = StepWork(5, [batch_of([3])], [order])
    half._exchange.pulls.connected = lambda source: False
    half.submit(work)
    half._device = 0

    @contextlib.contextmanager
    def taken_meanwhile():
        half._exchange.lock = threading.Lock()
        half.suspend()
        with half._exchange.lock:
            yield

    half._exchange.lock = taken_meanwhile()
    half.queued.pop()()
    assert not step_events and waited == [0]
    (result,) = half._jobs._done
    assert result.failed and result.bad_blocks == {1, 2} and "sleep" in result.reason
    assert np.array_equal(order.groups[0].local, [1, 2])


PARTS = ["NIXL", "copies", "fetches", "device", "memory"]


def parted(half, monkeypatch):
    """Set up; returns (what was ended, in order; how often each part of sleep is to raise from now on)."""
    ended, left = [], dict.fromkeys(PARTS, 0)

    def part(name, *_):
        if left[name]:
            left[name] -= 1
            raise RuntimeError(f"{name}, on purpose")
        ended.append(name)
        return []

    contain_with(half, Containment(Counters()))
    half._device, half._exchange.transport = 0, object()
    half._exchange.pulls = SimpleNamespace(active=False, stop=lambda why: part("NIXL"), under_way=lambda: {"r"})
    half._store = SimpleNamespace(suspend=lambda: part("copies"), under_way=set)
    half._exchange.fetching = SimpleNamespace(stop=lambda why: part("fetches"))
    half._exchange.memory = SimpleNamespace(close=lambda: part("memory"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: part("device"))
    return ended, left


@pytest.mark.parametrize("faulty", [[name] for name in PARTS] + [PARTS])
def test_worker_suspend_error_in_one_part_stops_all_others(half, monkeypatch, faulty):
    """vLLM unmaps the memory next, whatever we do: what NIXL has registered must not outlive it."""
    told = []
    half._link, half._when_connected, half._set_up = SimpleNamespace(send=told.append), lambda begin: None, None
    ended, left = parted(half, monkeypatch)
    left.update(dict.fromkeys(faulty, 1))
    half.suspend()
    assert ended == PARTS, "each is tried again at once, NIXL before all else"
    half.suspend()
    assert ended == PARTS and half._contain.errors == len(faulty)
    half.resume()
    ended, left = parted(half, monkeypatch)
    left.update(dict.fromkeys(faulty, 2))
    half.suspend()
    assert ended == [name for name in PARTS if name not in faulty]
    exchange = half._exchange
    assert exchange.suspended and exchange.transport is exchange.pulls is exchange.memory is exchange.fetching is None
    half.suspend()
    assert sorted(ended) == sorted(PARTS)
    for call in half.queued:
        call()
    assert told == [m.Asleep(0)] * 2 and not half._exchange._retiring


def test_worker_suspend_with_pending_pulls_reports_them_later(half, monkeypatch):
    """Their blocks may be written yet: vLLM must not give them to others."""
    _, left = parted(half, monkeypatch)
    half._jobs.outstanding["r"] = PullJob("r", "s/1", [pull_of([1, 2], [1, 2])], 1.0)
    half._exchange.pulls.active, half._exchange.pulls.poll, later = True, list, []
    half._reactor.call_later = lambda pause, callback: later.append(callback)
    left["NIXL"] = 2
    half.suspend()
    half._look_for_lost()
    while half.queued:
        half.queued.pop(0)()
    assert not half._jobs._done

    def end():
        pulls.active = False
        return ["its result"]

    pulls, = half._exchange._retiring
    pulls.poll = end
    later.pop()()
    assert half._jobs._done == ["its result"], "though its agent was not ended in sleep"
    assert not half._exchange._retiring and not later
    half.suspend()
    while half.queued:
        half.queued.pop(0)()
    assert half._jobs._done == ["its result"] and not half._exchange._unfinished


@pytest.mark.parametrize("faulty", ["reactor", "fetches"])
def test_worker_shutdown_error_in_one_part_continues(half, monkeypatch, faulty):
    ended, left = parted(half, monkeypatch)
    half._reactor = SimpleNamespace(stop=lambda: 1 / 0 if faulty == "reactor" else None)
    left["fetches"] = faulty == "fetches"
    half.shutdown()
    assert ended == (["memory"] if faulty == "fetches" else ["fetches", "memory"])


def test_poll_raises_pull_result_is_reported_and_error_counted(half):
    ready(half)
    half._exchange._serving, half._exchange.transport = True, SimpleNamespace(progress=lambda: 1 / 0)
    half._exchange.pulls = SimpleNamespace(active=True, all_waiting=False, poll=lambda: ["its result"])
    half._reactor.call_later = lambda pause, callback: None
    half._exchange._run_polls()
    assert half._jobs._done == ["its result"] and half._reactor.errors == 1


def test_worker_setup_waits_for_connector_scheduler(run_dir):
    """It is made when the model is warmed up. Until then vLLM captures CUDA graphs, and whatever another thread
    allocates, pins or loads on the device ends the capture and the engine."""
    path, begun = str(run_dir / "l.sock"), threading.Event()
    half = KVTierConnectorWorker(0, "agent", LinkPlace(path), [], Uncontained())

    def describe():
        begun.set()
        raise KVTierError("that is all")

    half.register(CacheSetup(describe, None, None))
    turned = threading.Event()
    half._reactor.call_soon(turned.set)
    assert turned.wait(10) and not begun.is_set()
    reactor, heard = Reactor("scheduler"), []
    LinkServer(reactor, path, heard.append)
    reactor.start()
    assert begun.wait(10)
    eventually(lambda: heard == [m.Unusable(0, "that is all")])
    half.shutdown()
    reactor.stop()

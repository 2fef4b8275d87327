"""The worker half while it is being set up, and when vLLM takes the cache's memory away."""

import contextlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pull_fakes import batch_of, pull_of
from support import Uncontained, eventually

from vllm_kvtier.containment import Containment
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.engine import share_interpreter
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.half import WorkerHalf
from vllm_kvtier.worker.hurried import Hurried
from vllm_kvtier.worker.memory import Pending
from vllm_kvtier.worker.work import PullOrder, StepWork


@pytest.fixture
def half():
    """Without threads: what would run on the reactor's is in ``queued``."""
    half = WorkerHalf.__new__(WorkerHalf)
    half.queued = []
    half._contain, half._errors, half._outstanding, half._submitted = Uncontained(), 0, {}, None
    half._rank, half._unusable, half._device, half._fences, half._before = 0, None, None, None, None
    half._reactor = SimpleNamespace(call_soon=half.queued.append, errors=0)
    half._link = SimpleNamespace(tell=lambda message: None)
    half._memory = half._pulls = half._tier = half._fetching = half._view = half._transport = None
    half._serving = half._driving = half._idle = half._asleep = False
    half._sources, half._to_end, half._leaving = {}, [], []
    half._summing, half._done, half._hurried = [], [], Hurried()
    half._done_lock, half._nixl = threading.Lock(), threading.Lock()
    return half


def ready(half, device="cpu"):
    """Set up by now; returns the fences that sums were made behind."""
    fences = []
    half._memory = SimpleNamespace(
        make_sums=lambda batches, after: fences.append(after) or Pending(None)
    )
    half._memory.close = lambda: None
    half._pulls = SimpleNamespace(active=False, stop=lambda why: [])
    half._view = SimpleNamespace(device=torch.device(device))
    return fences


def test_sums_of_a_step_from_before_the_memory_was_there_are_made_behind_it(half, monkeypatch):
    marked = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=marked.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    half._device = 0
    half.submit(StepWork(3, [batch_of([1])]))
    fences = ready(half)
    half.queued.pop()()
    (first,) = fences
    assert first is not None and marked == ["stream of 0"]
    half._view = SimpleNamespace(device=torch.device("cuda", 0))
    half.submit(StepWork(4, [batch_of([2])]))
    half.queued[-1]()
    assert len(fences) == 2 and fences[1] is not first and marked == 2 * ["stream of 0"]


def test_a_cpu_s_cache_has_no_fences_whatever_else_the_machine_has(half, monkeypatch):
    half._device = 0
    fences = ready(half, "cpu")
    half.submit(StepWork(3, [batch_of([1])]))
    half.queued.pop()()
    assert fences == [None]


def test_without_a_device_there_is_nothing_to_wait_for(half):
    half.submit(StepWork(3, [batch_of([1])]))
    fences = ready(half)
    half.queued.pop()()
    assert fences == [None]


def test_what_comes_to_its_turn_in_sleep_mode_touches_no_cache(half, monkeypatch):
    fences = ready(half, "cuda")
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    order = PullOrder("r", "s/1", [pull_of([1, 2], [1, 2])], 1.0)
    work = StepWork(5, [batch_of([3])], [order])
    half._pulls.connected = lambda source: False
    half.submit(work)
    half._device = 0

    @contextlib.contextmanager
    def taken_meanwhile():
        half._nixl = threading.Lock()
        half.sleep()
        with half._nixl:
            yield

    half._nixl = taken_meanwhile()
    half.queued.pop()()
    assert not fences and waited == [0]
    (result,) = half._done
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

    half._contain, half._device, half._transport = Containment(Counters()), 0, object()
    half._pulls = SimpleNamespace(active=False, stop=lambda why: part("NIXL"), under_way=lambda: {"r"})
    half._tier = SimpleNamespace(rest=lambda: part("copies"), under_way=set)
    half._fetching = SimpleNamespace(stop=lambda why: part("fetches"))
    half._memory = SimpleNamespace(close=lambda: part("memory"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: part("device"))
    return ended, left


@pytest.mark.parametrize("faulty", [[name] for name in PARTS] + [PARTS])
def test_sleep_a_part_raises_all_others_are_ended_and_a_repeated_call_ends_it(half, monkeypatch, faulty):
    """vLLM unmaps the memory next, whatever we do: what NIXL has registered must not outlive it."""
    told = []
    half._link, half._when_met, half._set_up = SimpleNamespace(tell=told.append), lambda begin: None, None
    ended, left = parted(half, monkeypatch)
    left.update(dict.fromkeys(faulty, 1))
    half.sleep()
    assert ended == PARTS, "each is tried again at once, NIXL before all else"
    half.sleep()
    assert ended == PARTS and half._contain.errors == len(faulty)
    half.wake()
    ended, left = parted(half, monkeypatch)
    left.update(dict.fromkeys(faulty, 2))
    half.sleep()
    assert ended == [name for name in PARTS if name not in faulty]
    assert half._asleep and half._transport is half._pulls is half._memory is half._fetching is None
    half.sleep()
    assert sorted(ended) == sorted(PARTS)
    for call in half.queued:
        call()
    assert told == [m.Asleep(0)] * 2 and not half._leaving


def test_sleep_nixl_does_not_end_its_pulls_are_not_reported_as_lost(half, monkeypatch):
    """Their blocks may be written yet: vLLM must not give them to others."""
    _, left = parted(half, monkeypatch)
    half._outstanding["r"] = PullOrder("r", "s/1", [pull_of([1, 2], [1, 2])], 1.0)
    half._pulls.active, half._pulls.drive, later = True, list, []
    half._reactor.call_later = lambda pause, callback: later.append(callback)
    left["NIXL"] = 2
    half.sleep()
    half._look_for_lost()
    while half.queued:
        half.queued.pop(0)()
    assert not half._done

    def end():
        pulls.active = False
        return ["its result"]

    pulls, = half._leaving
    pulls.drive = end
    later.pop()()
    assert half._done == ["its result"] and not half._leaving and not later, "though its agent was not ended in sleep"
    half.sleep()
    while half.queued:
        half.queued.pop(0)()
    assert half._done == ["its result"] and not half._to_end


@pytest.mark.parametrize("faulty", ["reactor", "fetches"])
def test_shutdown_a_part_raises_the_rest_goes_on(half, monkeypatch, faulty):
    ended, left = parted(half, monkeypatch)
    half._reactor = SimpleNamespace(stop=lambda: 1 / 0 if faulty == "reactor" else None)
    left["fetches"] = faulty == "fetches"
    half.shutdown()
    assert ended == (["memory"] if faulty == "fetches" else ["fetches", "memory"])


def test_poll_raises_what_a_pull_ended_with_is_told_and_the_fault_is_counted(half):
    ready(half)
    half._serving, half._transport = True, SimpleNamespace(progress=lambda: 1 / 0)
    half._pulls = SimpleNamespace(active=True, resting=False, drive=lambda: ["its result"])
    half._reactor.call_later = lambda pause, callback: None
    half._drive()
    assert half._done == ["its result"] and half._reactor.errors == 1


def test_nothing_is_set_up_before_the_scheduler_half_is_there(run_dir):
    """It is made when the model is warmed up. Until then vLLM captures CUDA graphs, and whatever another thread
    allocates, pins or loads on the device ends the capture and the engine."""
    path, begun = str(run_dir / "l.sock"), threading.Event()
    half = WorkerHalf(0, "agent", path, [], Uncontained())

    def describe():
        begun.set()
        raise KVTierError("that is all")

    half.register(describe, None, None)
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


def test_no_thread_keeps_the_interpreter_for_long():
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        share_interpreter(0.0)
        assert sys.getswitchinterval() == pytest.approx(0.005)
        share_interpreter(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        share_interpreter(0.002)
        assert sys.getswitchinterval() == pytest.approx(0.0005), "whoever wants less has it"
    finally:
        sys.setswitchinterval(before)

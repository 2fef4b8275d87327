"""Marks on the engine's stream: what waits for them, and what of vLLM's work they stand for."""

import contextlib
import ctypes
import time
from types import SimpleNamespace

import decode_harness as dh
import numpy as np
import pytest
import torch
from pull_fakes import Pair, batch_of, pull_of
from store_process import Store
from support import Uncontained, eventually
from test_connector_worker import half  # noqa: F401
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.worker import kv_connector_model_runner_mixin as runner
from worker_halves import contain_with

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.containment import Containment
from vllm_kvtier.jobs.results import StepResults
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, PeerFetchJob, StepWork
from vllm_kvtier.scheduler.offload import offloader
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.connector_types import StepMetadata
from vllm_kvtier.worker.device import step_events
from vllm_kvtier.worker.nixl_pull.exported_memory import Pending
from vllm_kvtier.worker.peer_exchange import DEVICE_PAUSE


def test_step_events_are_reused_in_a_ring(monkeypatch):
    class Event:
        def __init__(self):
            self.recorded = []

        def record(self, stream):
            self.recorded.append(stream)

    streams = iter(range(1000))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (device, next(streams)))
    ring = step_events.StepEvents(3)
    marks = [ring.record() for _ in range(2 * step_events.RING_EVENTS)]
    assert len(set(map(id, marks))) == step_events.RING_EVENTS
    assert marks[: step_events.RING_EVENTS] == marks[step_events.RING_EVENTS :]
    assert marks[0].recorded == [(3, 0), (3, step_events.RING_EVENTS)], "on the stream of the moment"


class Device:
    """A stream: what is launched runs, in order, when ``run`` is called."""

    def __init__(self, monkeypatch):
        self.launched, self.done = [], 0
        device = self

        class Event:
            def record(self, stream):
                self.place = len(device.launched)

            def query(self):
                return device.done >= self.place

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def launch(self, kernel=lambda: None):
        self.launched.append(kernel)

    def run(self, count):
        for kernel in self.launched[self.done : self.done + count]:
            kernel()
        self.done += count


class Engine:
    """vLLM's model runner with asynchronous scheduling, as far as a connector sees it: the device is a step behind."""

    def __init__(self, half, monkeypatch):  # noqa: F811
        self.device, self.pair = Device(monkeypatch), Pair()
        self.begun, self.later = [], []
        half._reactor.call_later = lambda seconds, job: self.later.append((seconds, job))
        half._device, half._exchange.pulls, half._exchange.memory = 0, self.pair.pulls, self.pair.here
        self.half, self.connector = half, object.__new__(KVTierConnector)
        self.connector._worker, self.connector.containment = half, Uncontained()
        self.connector._step, self.connector._collected = StepResults(), None
        self.connector._drafts, self.connector._lost, self.connector._ended = False, False, 0
        self.connector._saved = self.connector._caught = self.connector._scheduler = None
        self.connector.counters = Counters()

    def with_store_and_peers(self):
        """They only take orders: "begun" has the names, and how much had been launched before their fence."""

        def take(orders, after):
            self.begun += [(order.request_id, after.place) for order in orders]

        self.half._store = SimpleNamespace(
            load=take, step=lambda step, fence, lone: None, collect=lambda idle: None
        )
        self.half._exchange.fetching = SimpleNamespace(
            begin=take, add_engines=lambda sources: None, collect=lambda idle: None, poll=lambda: None, active=False
        )
    def step(self, work, zeroes=lambda: None, forward=lambda: None, drafts=lambda: None):
        """Four launches; a connector is called after the first two and the third."""
        self.device.launch(zeroes)
        self.connector.bind_connector_metadata(StepMetadata(work))
        self.device.launch(forward)
        self.connector.get_finished(set())
        self.device.launch(drafts)

    def writes(self, block):
        def kernel():
            for region in self.pair.here.view.groups[0].regions:
                page = self.pair.here.view.pages(region)[block]
                ctypes.memset(page.data_ptr(), 0xEE, page.numel())

        return kernel

    def drive(self):
        """The reactor, until it would wait; what has ended."""
        due, self.later = [job for _, job in self.later], []
        self.half.queued += due
        while self.half.queued:
            self.half.queued.pop(0)()
        return self.half.collect().results


@pytest.fixture
def engine(half, monkeypatch):  # noqa: F811
    return Engine(half, monkeypatch)


@pytest.mark.parametrize("kind", ["forward", "drafts"])
@pytest.mark.parametrize("connected", [False, True])
def test_pull_with_step_in_flight_is_posted_after_that_step(engine, kind, connected):
    """Of a request that was aborted after the launch: its block is the pull's now, and the step writes it yet."""
    pair, device = engine.pair, engine.device
    pair.there.compute_checksums([batch_of([3, 4])], None)
    if connected:
        assert not pair.run(pair.order(pull_of([6], [4]))).failed
    engine.step(StepWork(1), **{kind: engine.writes(5)})
    engine.step(StepWork(2, pulls=[pair.order(pull_of([5], [3]))]))
    for _ in range(3):
        assert engine.drive() == [] and not pair.transport.running and pair.pulls.active
        assert [pause for pause, _ in engine.later] == [DEVICE_PAUSE], "nothing spins meanwhile"
    device.run(4)  # all that comes before the forward of the pull's own step
    [result] = engine.drive()
    assert not result.failed
    device.run(2)
    assert pair.equal(5, 3), "the step wrote over what had been verified"


def test_pull_past_deadline_before_its_step_event_posts_nothing(engine, monkeypatch):
    order = engine.pair.order(pull_of([5], [3]), timeout=0.0)
    engine.step(StepWork(1, pulls=[order]))
    [result] = engine.drive()
    assert result.failed and "could not begin" in result.reason and not engine.pair.transport.running


def test_jobs_of_each_kind_wait_for_all_work_launched_before(engine):
    """Also behind the drafts, and what zeroes their blocks; and not behind the forward of their own step."""
    blocks = np.array([3])
    load = LoadJob("load", [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 60.0, "life")
    fetch = PeerFetchJob("fetch", "s/1", [pull_of([5], [3])], 60.0)
    engine.with_store_and_peers()
    for number in range(2):
        engine.step(StepWork(number, loads=[load], fetches=[fetch]))
        assert engine.begun == [("load", 3 * number + 1), ("fetch", 3 * number + 1)]
        engine.begun.clear()


@pytest.mark.parametrize("synchronous", [False, True])
def test_jobs_after_begin_error_wait_for_late_step_event(
    engine, synchronous, monkeypatch
):
    """Without one, a step in flight could still write what they bring."""
    begun, mark = [], step_events.StepEvents.record
    engine.connector.containment = Containment(Counters())
    contain_with(engine.half, engine.connector.containment)
    engine.with_store_and_peers()
    for tier in (engine.half._store, engine.half._exchange.fetching):
        tier.load = tier.begin = tier.load_now = tier.begin_now = lambda orders, after: begun.append(after)
        tier.wait_until_done = lambda seconds: None
    blocks = np.array([3])
    group = GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)
    load = LoadJob("load", [group], 60.0, "life", synchronous=synchronous)
    fetch = PeerFetchJob("fetch", "s/1", [pull_of([5], [3])], 60.0, synchronous=synchronous)
    pull = engine.pair.order(pull_of([5], [3]))
    monkeypatch.setattr(step_events.StepEvents, "record", lambda ring: 1 / 0)
    work = StepWork(1, loads=[load], fetches=[fetch], pulls=[pull])
    engine.connector.bind_connector_metadata(StepMetadata(work))
    monkeypatch.setattr(step_events.StepEvents, "record", mark)
    for _ in range(2):
        engine.device.launch()
    engine.connector.start_load_kv(None)
    if not synchronous:
        engine.half.submit(work)
        assert engine.drive() == [] and not engine.pair.transport.running, "the pull waits too"
    assert [after.place for after in begun] == [2, 2]


@pytest.mark.parametrize("saves", ["behind the drafts", "before results", "never"])
@pytest.mark.parametrize("drafts", [False, True])
def test_blocks_of_a_step_are_read_behind_its_drafts(engine, drafts, saves):
    """They write the draft layers of the same blocks. vLLM calls ``wait_for_save`` behind them if it speculates (the
    older model runner), or before it collects results, which it then does behind the drafts."""
    read, connector, device = [], engine.connector, engine.device
    store = SimpleNamespace(
        step=lambda step, event, lone: read.append((step, event.place)), collect=lambda idle: None
    )
    engine.half._store, connector._drafts = store, drafts
    checksums = lambda jobs, event: read.append(("checksums", event.place)) or Pending(None)  # noqa: E731
    engine.half._exchange.memory = SimpleNamespace(compute_checksums=checksums)
    expected = []
    for number in (1, 2, 3):  # one that brings nothing, one with checksums, one more
        work = StepWork(number, [batch_of([3])] if number == 2 else [])
        connector.bind_connector_metadata(StepMetadata(work))
        device.launch()  # the forward
        if saves == "before results":
            device.launch()
            connector.wait_for_save()
        connector.get_finished(set())
        late = drafts and saves != "before results"
        if late:
            assert all(step != number for step, _ in read), "the drafts are yet to come"
        if saves != "before results":
            device.launch()
        if saves == "behind the drafts":
            connector.wait_for_save()
        while engine.half.queued:
            engine.half.queued.pop(0)()
        expected.append((number, 2 * number if saves == "before results" or late else 2 * number - 1))
    connector.bind_connector_metadata(StepMetadata(StepWork(4)))
    while engine.half.queued:
        engine.half.queued.pop(0)()
    assert [each for each in read if each[0] != "checksums"] == expected
    assert [place for step, place in read if step == "checksums"] == [dict(expected)[2]]


def test_step_without_a_forward_waits_for_no_drafts(engine):
    """vLLM 0.25.1 calls ``wait_for_save`` in no such step, which may be the last one for long: it has the checksums of
    what a request that ended left in the cache."""
    read, connector = [], engine.connector
    connector._drafts = True
    checksums = lambda jobs, event: read.append(jobs) or Pending(None)  # noqa: E731
    engine.half._exchange.memory = SimpleNamespace(compute_checksums=checksums)
    jobs = [batch_of([3])]
    connector.bind_connector_metadata(StepMetadata(StepWork(1, jobs, idle=True)))
    connector.get_finished(set())
    while engine.half.queued:
        engine.half.queued.pop(0)()
    assert read == [jobs]


def test_pull_that_waits_for_the_drafts_is_not_taken_for_lost(engine):
    """After an internal error jobs that no part of the worker knows are failed. vLLM would compute in its blocks, or
    give them to others, while the pull writes them."""
    pair, connector, worker = engine.pair, engine.connector, engine.half
    pair.there.compute_checksums([batch_of([3, 4])], None)
    connector._drafts, worker._reactor.errors = True, 1
    work = StepWork(1, pulls=[pair.order(pull_of([5], [3]))])
    connector.bind_connector_metadata(StepMetadata(work))
    engine.device.launch()
    connector.get_finished(set())
    while worker.queued:
        worker.queued.pop(0)()
    connector.wait_for_save()
    engine.device.run(1)
    results = []
    while pair.pulls.active or worker.queued:
        results += engine.drive()
    assert [result.failed for result in results + worker.collect().results] == [False] and pair.equal(5, 3)


def test_pull_that_begins_before_the_drafts_is_polled(engine):
    """The engine that it reads is connected, so that the model runner's thread begins it, and the step has nothing else
    for the reactor, which alone sees its end where the cache is not on a device, and ends an agent that failed."""
    pair, connector = engine.pair, engine.connector
    pair.there.compute_checksums([batch_of([3, 4])], None)
    assert not pair.run(pair.order(pull_of([6], [4]))).failed
    connector._drafts = True
    connector.bind_connector_metadata(StepMetadata(StepWork(1, pulls=[pair.order(pull_of([5], [3]))])))
    engine.device.launch()
    connector.get_finished(set())
    connector.wait_for_save()
    [result] = engine.drive()
    assert not result.failed and pair.equal(5, 3)


def test_sync_loads_wait_for_work_launched_before(engine):
    begun = []
    engine.with_store_and_peers()
    engine.half._store.load_now = lambda orders, after: begun.append(after.place)
    engine.half._store.wait_until_done = lambda seconds: None
    blocks = np.array([3])
    group = GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)
    work = StepWork(1, loads=[LoadJob("r", [group], 60.0, "life", synchronous=True)])
    engine.device.launch()
    engine.connector.bind_connector_metadata(StepMetadata(work))
    engine.connector.start_load_kv(None)
    assert begun == [1]


def test_step_whose_forward_raises_is_not_ended(engine, monkeypatch):
    """The model runner collects its results nevertheless. What it should have written would be stored, and outlive the
    engine."""
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: engine.connector)
    monkeypatch.setattr(runner, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(runner, "get_forward_context", lambda: None)
    ended = []
    engine.half.end_step = lambda work, drafts_follow: ended.append(work.step)

    def step(number):
        metadata = StepMetadata(StepWork(number))
        output = SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set())
        return runner.KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output)

    try:
        raise KeyError
    except KeyError:  # in whose handler the user's program generates
        with step(1):
            pass
    assert ended == [1]
    with pytest.raises(MemoryError), step(2):
        raise MemoryError
    assert ended == [1]


def test_loads_of_a_step_whose_forward_raised_are_reported_by_the_next(engine):
    """A program that catches the error may go on with the engine: the request would wait for ever."""
    load = LoadJob("load", [GroupLoad(0, np.array([3]), np.array([3], np.uint64), np.array([3]))], 60.0, "life")
    with contextlib.suppress(MemoryError):
        engine.connector.bind_connector_metadata(StepMetadata(StepWork(1, loads=[load])))
        try:
            raise MemoryError
        finally:
            engine.connector.get_finished(set())
    engine.connector.bind_connector_metadata(StepMetadata(StepWork(2)))
    assert engine.connector.get_finished(set())[1] == {"load"}


@pytest.mark.parametrize("raises", ["nowhere", "before the connector's step", "in the forward"])
def test_blocks_of_a_forward_that_raised_are_not_in_the_store(root, run_dir, monkeypatch, caplog, raises):
    """Nor after the next step, which vLLM has scheduled by then and runs."""
    monkeypatch.setattr(EngineCore, "add_request", EngineCore.add_request)
    monkeypatch.setattr(EngineCoreProc, "_notify_idle_state_callbacks", EngineCoreProc._notify_idle_state_callbacks)
    init_none_hash(sha256)
    store = Store(run_dir)
    store.start("--size=64MiB")
    monkeypatch.setattr(offloader, "RESERVE_AT_BLOCKS", 32)
    engine = dh.Engine(dh.Calls(), store, root, monkeypatch, 1, 1)
    try:
        engine.begin()
        engine.all_stored()
        before = store.counts().index.entries
        engine.add("long", [5000, *range(1, 40 * dh.BLOCK)])  # its blocks are so many that they are reserved at once
        output = engine.scheduler.schedule()
        eventually(lambda: store.counts().index.reservations == 41, 20, "they and the other's are reserved")
        if raises != "before the connector's step":
            with contextlib.suppress(MemoryError), runner.KVConnectorModelRunnerMixin._get_kv_connector_output(output):
                if raises == "in the forward":
                    raise MemoryError
        engine.step()
        if raises == "nowhere":
            eventually(lambda: store.counts().index.entries == before + 41, 20, "all are stored")
        else:
            time.sleep(1)
            assert store.counts().index.entries == before
        if raises != "nowhere":
            eventually(lambda: not engine.ours._store.limit(), 20, "the scheduler side hears of it")
        engine.step()
        assert caplog.text.count("vLLM failed in step") == (raises != "nowhere")
    finally:
        engine.end()
        store.kill()

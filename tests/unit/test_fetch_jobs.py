"""Fetches of a worker: orders and their results, deadlines, sources that cannot be mapped or end, sleep mode."""

import gc
import resource
import threading
import time
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peer_caches import Group, keys_of, order_of, pull_of, rank_of, ranks_of, sums_of
from peer_caches import content as content_of
from peer_process import PeerProcess
from support import Uncontained, descriptors_of_processes, eventually
from worker_halves import worker_without_threads

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import MAX_PEERS_REMEMBERED, ChecksumJob, StepWork, remember_peer
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkPlace, LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker import connector_worker as connector_worker_module
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.peer_fetch import fetch_worker as fetch_worker_module
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches
from vllm_kvtier.worker.peer_fetch.fetch_worker import FetchWorker
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

MODEL = (Group(layers=3, heads=2),)
BLOCKS = 12


class Copies:
    """A copier that logs its calls; copies end when they are let."""

    def __init__(self):
        self.log, self.copies, self.mapped, self.refuse = [], [], set(), None

    def add(self, source, parts):
        if self.refuse:
            raise self.refuse
        self.mapped.add(source)
        self.log.append(("add", source, len(parts)))

    def remove(self, source):
        self.mapped.discard(source)

    def start(self, jobs, after=None):
        if isinstance(self.refuse, RuntimeError):
            raise self.refuse
        self.log.append(("start", [job.instance for job in jobs], after))
        copy = SimpleNamespace(jobs=jobs, over=False, wrong=[set() for _ in jobs], reasons=["" for _ in jobs])
        copy.polls = 0
        copy.done = lambda: self._done(copy)
        copy.wait = lambda seconds: self.log.append(("wait", seconds)) or copy.done()
        copy.wait_on = lambda stream: self.log.append(("wait on", stream))
        copy.bad, copy.why = copy.wrong.__getitem__, copy.reasons.__getitem__
        self.copies.append(copy)
        return copy

    def _done(self, copy):
        copy.polls += 1
        if isinstance(copy.over, Exception):
            raise copy.over
        return copy.over

    def warm_up(self):
        self.log.append("warm")

    def close(self):
        self.log.append("close")


def fetches_of(rank, copier=None, device="cpu", number=0):
    view = rank.view if device == "cpu" else SimpleNamespace(
        device=torch.device(device), groups=rank.view.groups, num_blocks=rank.view.num_blocks
    )  # fmt: skip
    return PeerFetches(view, rank.memory.table, rank.heads, number, copier)


@pytest.fixture
def there():
    kept = content_of(MODEL, 1, BLOCKS)
    ranks = ranks_of(MODEL, kept, 2)
    for rank in ranks:
        sums_of(rank, MODEL, range(1, BLOCKS))
    return SimpleNamespace(content=kept, ranks=ranks, infos=[rank.info for rank in ranks])


def on_device(there, **more):
    copier = Copies()
    fetches = fetches_of(rank_of(MODEL, BLOCKS, 0), copier, "cuda", **more)
    fetches.add_engine("s/1", there.infos)
    fetches.add_engine("s/2", there.infos)
    return fetches, copier


def test_fetch_jobs_of_one_step_are_one_device_launch(there):
    fetches, copier = on_device(there)
    orders = [order_of(pull_of([i], [i], 4), name=f"r{i}", source=f"s/{1 + i % 2}") for i in (1, 2, 3)]
    assert fetches.start(orders, "fence") == [] and fetches.active
    assert copier.log == [("add", "s/2", 2), ("add", "s/1", 2), ("start", ["s/2", "s/1", "s/2"], "fence")]
    assert fetches.ready("s/1") and not fetches.ready("s/3")
    assert fetches.poll() == [] and copier.copies[0].polls == 1
    copy = copier.copies[0]
    copy.over, copy.wrong[1] = True, {2}
    results = fetches.poll()
    assert [(r.request_id, r.failed, r.bad_blocks, r.checksum_mismatch) for r in results] == [
        ("r1", False, set(), False), ("r2", True, {2}, True), ("r3", False, set(), False),
    ]  # fmt: skip
    assert "1 of 1 blocks from s/1 have a wrong checksum" in results[1].reason
    assert all(r.bytes == 384 and r.seconds > 0 and not r.unmappable for r in results) and not fetches.active


def test_engine_that_is_named_again_stays_known(there):
    """To the reactor, which may begin a fetch from it meanwhile."""
    fetches, _ = on_device(there)
    removed = []

    class Engines(OrderedDict):
        def pop(self, name, *default):
            removed.append(name)
            return super().pop(name, *default)

    fetches._engines = Engines(fetches._engines)
    fetches.add_engine("s/1", there.infos)
    assert removed == [] and list(fetches._engines) == ["s/2", "s/1"]


def test_engine_that_ends_while_it_is_named_is_no_error():
    class Engines(OrderedDict):
        def __setitem__(self, name, ranks):
            super().__setitem__(name, ranks)
            del self[name]  # as the reactor's thread does

    known = Engines()
    assert remember_peer(known, "s/1", []) == [] and not known


def test_fetch_on_host_is_time_sliced(there):
    """So that a short fetch does not wait for the end of a long one."""
    rank = rank_of(MODEL, BLOCKS, 0)
    fetches = fetches_of(rank, HostPeerCopier(rank.view, rank.memory.table, 1))
    fetches.add_engine("s/1", there.infos)
    long, short = order_of(pull_of(range(1, 9), range(1, 9), 4), name="long"), order_of(pull_of([9], [9], 4))
    assert fetches.start([long, short]) == []
    ended, calls = [], 0
    while fetches.active:
        ended += [(calls, result.request_id, result.failed) for result in fetches.poll()]
        calls += 1
    assert [name for _, name, _ in ended] == ["r", "long"] and not any(failed for *_, failed in ended)
    assert ended[0][0] < 7 and ended[1][0] > 16  # two parts of nine blocks, and a look at each end
    assert np.array_equal(rank.view.pages(rank.view.groups[0].regions[0])[9].numpy(), there.content[0][0, 0][9])


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda o: setattr(o, "instance", "unknown/1"), "is unknown"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, BLOCKS])), "outside 1..11"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, 0])), "outside"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, 1 << 40])), "outside"),
        (lambda o: setattr(o.groups[0], "local", np.array([5, -1])), "outside"),
        (lambda o: setattr(o.groups[0], "local", np.array([5, BLOCKS])), "outside"),
        (lambda o: setattr(o.groups[0], "group", 1), "no KV cache group 1"),
        (lambda o: setattr(o.groups[0], "group", -1), "no KV cache group -1"),
        (lambda o: setattr(o.groups[0], "keys", keys_of([1])), "lists of"),
    ],
)
def test_fetch_job_malformed_fails_at_once(there, spoil, words):
    fetches, copier = on_device(there)
    order, good = order_of(pull_of([5, 6], [3, 4], 4)), order_of(pull_of([1], [1], 4), name="good")
    spoil(order)
    [result] = fetches.start([order, good])
    assert result.failed and words in result.reason and result.bad_blocks == order.all_blocks
    assert not result.unmappable and not result.checksum_mismatch
    assert [len(copy.jobs) for copy in copier.copies] == [1], "others are not in its copy"


def test_fetch_job_without_blocks_ends_at_once(there):
    rank = rank_of(MODEL, BLOCKS, 0)
    fetches = fetches_of(rank)
    fetches.add_engine("s/1", there.infos)
    assert fetches.start([order_of(pull_of([], [], 4))]) == [] and fetches.start([]) == []
    [result] = fetches.poll()
    assert not result.failed and result.bytes == 0


@pytest.mark.parametrize("error", [KVTierError("another node"), OSError(12, "no memory")])
def test_unmappable_source_is_logged_once_and_not_retried(there, error, caplog):
    fetches, copier = on_device(there)
    copier.refuse = error
    for _ in range(3):
        [result] = fetches.start([order_of(pull_of([5, 6], [3, 4], 4))])
        assert result.failed and result.unmappable == str(error) and result.bad_blocks == {5, 6}
        copier.refuse = KVTierError("asked again")
    assert caplog.text.count("logged once") == 1 and not fetches.active
    copier.refuse = None
    assert fetches.start([order_of(pull_of([5], [3], 4), source="s/2")]) == [], "others can be"
    fetches.remove_source("s/1")
    fetches.add_engine("s/1", there.infos)
    assert fetches.start([order_of(pull_of([5], [3], 4))]) == []


def test_source_is_mapped_when_there_are_file_descriptors_again(there):
    fetches = fetches_of(rank_of(MODEL, BLOCKS, 0))
    fetches.add_engine("s/1", there.infos)
    order, limits = order_of(pull_of([5], [5], 4)), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        [result] = fetches.start([order])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "Too many open files" in result.reason and not result.unmappable
    assert fetches.start([order]) == [] and fetches.ready("s/1")


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    KVTierError("GPU memory of process 7 cannot be mapped: cuIpcOpenMemHandle failed: CUDA_ERROR_OUT_OF_MEMORY (2), "
                "out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
])  # fmt: skip
def test_source_is_mapped_when_there_is_device_memory_again(there, error):
    """It was read by NIXL, or not at all, until its engine ended."""
    fetches, copier = on_device(there)
    order, copier.refuse = order_of(pull_of([5], [3], 4)), error
    [result] = fetches.start([order])
    assert "out of memory" in result.reason and not result.unmappable
    copier.refuse = None
    assert fetches.start([order]) == [] and fetches.ready("s/1")


def test_unmappable_sources_are_forgotten_with_their_engines(there):
    fetches, copier = on_device(there)
    copier.refuse = KVTierError("another node")
    for n in range(2 * MAX_PEERS_REMEMBERED):
        fetches.add_engine(f"s/{n}", there.infos)
        [result] = fetches.start([order_of(pull_of([5], [3], 4), source=f"s/{n}")])
        assert result.unmappable
    assert len(fetches._unmappable) == MAX_PEERS_REMEMBERED


def test_fetch_from_other_shape_is_unmappable_with_cause(there):
    fetches = fetches_of(rank_of((Group(layers=3, heads=2, inner=32),), BLOCKS, 0))
    fetches.add_engine("s/1", there.infos)
    [result] = fetches.start([order_of(pull_of([5], [3], 4))])
    assert "32 bytes a token and head here, 16 there" in result.unmappable and "cannot read from s/1" in result.reason


def test_fetch_job_device_error_fails_its_jobs_only(there, caplog):
    fetches, copier = on_device(there)
    assert fetches.start([order_of(pull_of([5], [3], 4))]) == []
    copier.refuse = RuntimeError("no memory")
    [result] = fetches.start([order_of(pull_of([6], [3], 4), name="next")])
    assert result.failed and "no memory" in result.reason and not result.unmappable and fetches.ready("s/1")
    copier.copies[0].over = RuntimeError("the device is gone")
    [result] = fetches.poll()
    assert result.failed and result.bad_blocks == {5} and "gone" in result.reason and not fetches.active


def test_fetch_job_failed_mapping_is_retried(there):
    fetches, copier = on_device(there)
    assert fetches.start([order_of(pull_of([5], [3], 4))]) == []
    copier.copies[0].over, copier.copies[0].reasons[0] = True, "process 7 has ended"
    [result] = fetches.poll()
    assert result.failed and "process 7 has ended" in result.reason
    assert not result.unmappable and not result.checksum_mismatch
    assert copier.mapped == set() and not fetches.ready("s/1")
    assert fetches.start([order_of(pull_of([5], [3], 4))]) == [] and copier.mapped == {"s/1"}


def test_mapped_source_is_reported(there):
    fetches, _ = on_device(there)
    told = []
    fetches.added = lambda source, shared: told.append((source, list(shared)))
    for _ in range(2):
        fetches.start([order_of(pull_of([5], [3], 4))])
    assert told == [("s/1", [info.shared for info in there.infos])]


def test_fetch_jobs_stop_waits_and_fails_running_jobs(there):
    fetches, copier = on_device(there)
    assert fetches.start([order_of(pull_of([5], [3], 4)), order_of(pull_of([6], [3], 4), name="b")]) == []
    copier.copies[0].over = True
    results = fetches.stop("asleep")
    assert copier.log[-1] == "close" and [(r.request_id, r.bad_blocks) for r in results] == [("r", {5}), ("b", {6})]
    assert all(r.reason == "asleep" and not r.unmappable for r in results) and not fetches.active
    [result] = fetches.start([order_of(pull_of([5], [3], 4))])
    assert result.failed and "asleep" in result.reason and not result.unmappable
    fetches.warm_up()
    assert "warm" not in copier.log


def test_fetch_job_on_host_fails_at_timeout(there):
    rank = rank_of(MODEL, BLOCKS, 0)
    fetches = fetches_of(rank, HostPeerCopier(rank.view, rank.memory.table, 1))
    fetches.add_engine("s/1", there.infos)
    assert fetches.start([order_of(pull_of([5, 6], [3, 4], 4), timeout=0.05)]) == []
    assert fetches.poll() == []
    time.sleep(0.06)
    results = []
    while fetches.active:
        results += fetches.poll()
    assert results[0].failed and "in time" in results[0].reason and results[0].bad_blocks == {5, 6}


def test_fetch_poll_does_not_wait_for_another_thread(there):
    fetches, copier = on_device(there)
    assert fetches.start([order_of(pull_of([5], [3], 4))]) == []
    copier.copies[0].over = True
    held, release = threading.Event(), threading.Event()

    def hold():
        with fetches.lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    assert fetches.poll() == [] and fetches.active
    release.set()
    thread.join()
    assert len(fetches.poll()) == 1


# -- synchronous ---------------------------------------------------------------------------------------------------


def test_sync_fetch_on_device_holds_stream_and_ends(there, monkeypatch):
    fetches, copier = on_device(there)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert fetches.start([order_of(pull_of([1], [3], 4), name="other")]) == []
    bad = order_of(pull_of([6], [0], 4), name="bad")
    fetches.start_now([order_of(pull_of([5], [3], 4)), bad], "fence")
    assert copier.log[-2:] == [("start", ["s/1"], "fence"), ("wait on", "stream of cuda")]
    copier.copies[1].over = True
    results = {r.request_id: r.failed for r in fetches.wait_until_done(3.0)}
    assert results == {"bad": True, "r": False} and copier.log[-1][0] == "wait" and 2 < copier.log[-1][1] <= 3
    assert fetches.active, "no step waits for others"
    copier.copies[0].over = True
    assert [r.request_id for r in fetches.poll()] == ["other"]


def test_fetch_job_continues_after_its_step(there, monkeypatch):
    fetches, copier = on_device(there)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    fetches.start_now([order_of(pull_of([5], [3], 4))])
    assert fetches.wait_until_done(0.0) == [] and fetches.active
    copier.copies[0].over = True
    assert fetches.wait_until_done(1.0) == [], "it is late"
    assert [r.request_id for r in fetches.poll()] == ["r"]


def test_sync_fetch_on_host_ends_when_started(there):
    rank = rank_of(MODEL, BLOCKS, 0)
    fetches = fetches_of(rank, HostPeerCopier(rank.view, rank.memory.table, 1))
    fetches.add_engine("s/1", there.infos)
    assert fetches.start([order_of(pull_of([9], [3], 4), name="other")]) == []
    fetches.start_now([order_of(pull_of([5, 6], [3, 4], 4))])
    for local, remote in ((5, 3), (6, 4)):
        pages = rank.view.pages(rank.view.groups[0].regions[2])
        assert np.array_equal(pages[local].numpy(), there.content[0][2, 0][remote])
    assert [r.request_id for r in fetches.wait_until_done(1.0)] == ["r"]


# -- a rank's two threads ----------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, fetches):
        self.queued, self.done, self.driven = [], [], []
        self.made = FetchWorker(fetches, self.queued.append, self.done.append, lambda: self.driven.append(1))

    def run(self):
        while self.queued:
            self.queued.pop(0)()


def test_fetch_from_mapped_source_starts_behind_step_event(there):
    fetches, copier = on_device(there)
    worker = Worker(fetches)
    worker.made.begin([order_of(pull_of([5], [3], 4))], "fence 0")
    assert not copier.copies, "nothing is mapped on the model runner's thread"
    worker.run()
    assert copier.log[-1] == ("start", ["s/1"], "fence 0") and len(copier.copies) == 1 and worker.driven
    worker.made.begin([order_of(pull_of([6], [3], 4)), order_of(pull_of([7], [3], 4), source="s/2")], "fence 1")
    assert copier.log[-1] == ("start", ["s/1"], "fence 1")
    worker.run()
    assert copier.log[-2:] == [("add", "s/2", 2), ("start", ["s/2"], "fence 1")]
    copier.copies[0].over = True
    worker.made.collect(idle=False)
    assert len(worker.done) == 1


def test_fetch_on_host_copies_on_engine_thread_only_when_idle(there, monkeypatch):
    monkeypatch.setattr(fetch_worker_module, "IDLE_SECONDS", 10.0)
    rank = rank_of(MODEL, BLOCKS, 0)
    fetches = fetches_of(rank, HostPeerCopier(rank.view, rank.memory.table, 1))
    fetches.add_engine("s/1", there.infos)
    worker = Worker(fetches)
    worker.made.begin([order_of(pull_of([5, 6], [3, 4], 4))], None)
    worker.run()
    for _ in range(10):
        worker.made.collect(idle=False)
    assert not worker.done and not rank.view.pages(rank.view.groups[0].regions[0]).any()
    worker.made.collect(idle=True)
    assert [r.failed for r in worker.done] == [False]
    worker.made.collect(idle=True)


# -- a worker side -----------------------------------------------------------------------------------------------------


class Half:
    """A worker side over a rank's cache, its link, and what it says there."""

    def __init__(self, tmp_path, rank, name="w", memory=None, backends=("NONE",)):
        self.rank, self.heard, self.reactor = rank, [], Reactor("s")
        path = str(tmp_path / f"{name}.sock")
        self.server = LinkServer(self.reactor, path, self.heard.append)
        self.reactor.start()
        self.made = KVTierConnectorWorker(0, name, LinkPlace(path), list(backends), Uncontained())
        make = memory or (lambda view: CacheMemory(view, host_buffer=False))
        shards = lambda view: (0,) * len(view.groups)  # noqa: E731
        self.made.register(CacheSetup(lambda: rank.view, make, shards, lambda view: rank.heads))

    def said(self, kind):
        return eventually(lambda: [x for x in self.heard if isinstance(x, kind)], 20)[0]

    def step(self, *orders, sources=None, **more):
        self.made.submit(StepWork(1, fetches=list(orders), new_peers=sources or {}, **more))

    def results(self, count=1):
        found = []

        def look():
            found.extend(self.made.collect().results)
            return len(found) >= count

        eventually(look, 20)
        return found

    def stop(self):
        self.made.shutdown()
        self.reactor.stop()


@pytest.fixture
def no_nixl(monkeypatch):
    def missing(*arguments):
        raise KVTierError("NIXL cannot be imported")

    monkeypatch.setattr(connector_worker_module, "NixlTransport", missing)


def test_peer_fetch_works_without_nixl(tmp_path, no_nixl, caplog):
    """Two halves, one made sums of its blocks in a step; the other fetches them, in another order of dimensions."""
    from peer_caches import Layout

    kept = content_of(MODEL, 4, BLOCKS)
    there = Half(tmp_path, rank_of(MODEL, kept, 0), "there")
    here = Half(tmp_path, rank_of(MODEL, BLOCKS, 0, layout=Layout(token=True)), "here")
    try:
        info = there.said(lm.Register).info
        assert info.agent == "" and info.agent_metadata == b"" and info.heads == (m.HeadRange(0, 2),)
        assert info.shared.spans[-1].base == info.checksum_table_addr and not any(
            isinstance(x, lm.Unusable) for x in there.heard
        )
        assert "NIXL is unavailable (NIXL cannot be imported)" in caplog.text
        here.said(lm.Register)
        there.made.submit(StepWork(3, [ChecksumJob(0, np.array([3, 4]), keys_of([3, 4]), np.full(2, 4, np.int32))]))
        assert there.said(lm.ChecksumsReady) == lm.ChecksumsReady(0, 3)
        here.step(order_of(pull_of([1, 2, 5], [3, 4, 6], 4)), sources={"s/1": [info]})
        [result] = here.results()
        assert result.bad_blocks == {5} and result.checksum_mismatch, "block 6 has no checksum"
        for region, local, remote in ((0, 1, 3), (2, 2, 4)):
            pages = here.rank.view.pages(here.rank.view.groups[0].regions[region])
            assert np.array_equal(pages[local].numpy(), kept[0][region, 0][remote])
        out = None
        synchronous = StepWork(2, fetches=[order_of(pull_of([7, 8], [3, 4], 4), name="h", synchronous=True)])
        here.made.sync_load(synchronous)
        here.made.submit(synchronous)
        out = here.made.collect()
        assert [(r.request_id, r.failed) for r in out.results] == [("h", False)] and not out.finished
        eventually(lambda: not here.made._exchange._polling and not here.made._exchange._busy())
    finally:
        here.stop()
        there.stop()


def test_pull_without_nixl_is_refused_with_cause(tmp_path, no_nixl):
    from pull_fakes import pull_of as nixl_pull

    from vllm_kvtier.jobs.transfer_jobs import PullJob

    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0))
    try:
        half.said(lm.Register)
        half.made.submit(StepWork(0, pulls=[PullJob("p", "s/1", [nixl_pull([5], [3])], 1.0)]))
        [result] = half.results()
        assert result.failed and result.bad_blocks == {5} and "NIXL cannot be imported" in result.reason
    finally:
        half.stop()


def test_fetch_without_nixl_and_shared_memory_is_unusable(tmp_path, no_nixl):
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0), memory=lambda view: CacheMemory(view, host_buffer=True))
    try:
        assert half.said(lm.Unusable) == lm.Unusable(0, "NIXL cannot be imported")
        half.step(order_of(pull_of([5], [3], 4)))
        [result] = half.results()
        assert result.failed and result.bad_blocks == {5} and result.reason == "NIXL cannot be imported"
    finally:
        half.stop()


def test_fetches_are_off_behind_a_copy_of_the_cache_and_the_log_says_so(tmp_path, no_nixl, caplog):
    caplog.set_level("INFO")
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0), memory=lambda view: CacheMemory(view, host_buffer=True))
    try:
        half.said(lm.Unusable)
        assert half.made._exchange.fetching is None and "peer fetch: off" in caplog.text
    finally:
        half.stop()


def test_fetch_job_before_setup_fails():
    half = worker_without_threads()
    half._fetch([order_of(pull_of([5], [3], 4))], StepWork(1))
    assert half._jobs._done[0].failed and "not yet" in half._jobs._done[0].reason


def test_fetch_source_exit_unmaps_its_memory(tmp_path, no_nixl):
    source = PeerProcess(MODEL, 1, BLOCKS)
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0))
    try:
        half.said(lm.Register)
        half.step(order_of(pull_of([5], [3], 4)), sources={"s/1": source.infos})
        assert not half.results()[0].failed
        fetches = half.made._exchange.fetching._fetches
        assert fetches.ready("s/1")
        source.kill()
        eventually(lambda: not fetches.ready("s/1"))
        assert not fetches._copier._sources
        half.step(order_of(pull_of([5], [3], 4)))
        [result] = half.results()
        assert result.failed and "is unknown" in result.reason
    finally:
        half.stop()
        source.end()


def test_fetch_source_killed_during_copy_ends_each_job(tmp_path, no_nixl):
    """Whenever it dies, each fetch ends, and what it says is right is right."""
    blocks = 400
    model = (Group(layers=4, heads=4, cells=16, inner=128),)
    source = PeerProcess(model, 1, blocks)
    half = Half(tmp_path, rank_of(model, blocks, 0))
    killer = threading.Timer(0.15, source.process.kill)
    try:
        half.said(lm.Register)
        ids = list(range(1, blocks))
        killer.start()
        for number in range(1000):
            half.step(order_of(pull_of(ids, ids, 16), name=f"r{number}"), sources={"s/1": source.infos})
            [result] = half.results()
            if result.failed:
                break
        assert result.failed and result.bad_blocks == set(ids) and not result.checksum_mismatch
        for layer, region in enumerate(half.rank.view.groups[0].regions):
            pages = half.rank.view.pages(region).numpy()
            for block in ids:
                assert not pages[block].any() or np.array_equal(pages[block], source.content[0][layer, 0][block])
    finally:
        killer.cancel()
        half.stop()
        source.end()


def test_rank_that_only_shares_its_memory_computes_checksums(tmp_path, no_nixl, monkeypatch):
    """Its peers read its blocks, and no checksum of theirs was ever ready."""
    monkeypatch.setattr(fetch_worker_module, "PeerFetches", lambda *_: 1 / 0)
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0))
    try:
        assert half.said(lm.Register).info.shared is not None
        half.made.submit(StepWork(5, [ChecksumJob(0, np.array([3]), keys_of([3]), np.full(1, 4, np.int32))]))
        assert half.said(lm.ChecksumsReady) == lm.ChecksumsReady(0, 5)
    finally:
        half.stop()


def test_fetch_job_after_suspend_fails(tmp_path, no_nixl):
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0))
    try:
        half.said(lm.Register)
        half.made.suspend()
        assert half.said(lm.Asleep) == lm.Asleep(0)
        half.step(order_of(pull_of([5], [3], 4)))
        [result] = half.results()
        assert result.failed and "sleep" in result.reason
        half.made.submit(StepWork(5, [ChecksumJob(0, np.array([3]), keys_of([3]), np.full(1, 4, np.int32))]))
    finally:
        half.stop()
    assert not any(isinstance(x, lm.ChecksumsReady) for x in half.heard), "the cache has no memory"

def test_sleep_and_wake_leave_nothing_of_earlier_fetches(tmp_path, no_nixl):
    """A trainer puts its engines to sleep at each of thousands of steps."""
    source = PeerProcess(MODEL, 1, BLOCKS)
    half = Half(tmp_path, rank_of(MODEL, BLOCKS, 0))
    callbacks, earlier = half.made._reactor._on_stop, []
    registered = lambda: len([x for x in half.heard if isinstance(x, lm.Register)])  # noqa: E731
    try:
        half.said(lm.Register)
        before, watched = len(callbacks), descriptors_of_processes()
        for number in range(1, 4):
            half.step(order_of(pull_of([5], [3], 4)), sources={"s/1": source.infos})
            assert not half.results()[0].failed
            earlier.append(weakref.ref(half.made._exchange.fetching._fetches))
            eventually(lambda: descriptors_of_processes() == watched + 1)
            half.made.suspend()
            half.made.resume()
            eventually(lambda n=number: registered() == n + 1)
        eventually(lambda: descriptors_of_processes() == watched)
        eventually(lambda: gc.collect() >= 0 and not any(each() for each in earlier))
        assert len(callbacks) == before
    finally:
        half.stop()
        source.end()

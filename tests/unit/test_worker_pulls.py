"""Pulls of a worker: with a transport that copies, corrupts, stalls and breaks, and with NIXL itself."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pull_fakes import HEADS, INNER, LAYERS, TOKENS, Pair, batch_of, cache, info, keys_of, pull_of, split_reads
from support import WITHOUT_SHRINKING, Uncontained, eventually
from worker_halves import Half, worker_without_threads

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import PullJob, StepWork
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkPlace, LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.nixl_pull import pulls as pulls_module
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport
from vllm_kvtier.worker.nixl_pull.pulls import MAX_ENGINES, Pulls


def whole(view):
    return CacheMemory(view, host_buffer=False)


@pytest.mark.parametrize("host_buffer", [False, True])
def test_pulls_copy_blocks_and_checksums(host_buffer):
    pair = Pair(host_buffer, groups=2)
    pair.there.compute_checksums([batch_of([3, 4, 9], [4, 4, 2]), batch_of([7], group=1)], None)
    untouched = pair.block(pair.here, 2)
    result = pair.run(pair.order(pull_of([5, 6, 1], [3, 4, 9], [4, 4, 2]), pull_of([8], [7], group=1)))
    assert not result.failed and not result.bad_blocks and result.bytes > 0 and not pair.pulls.active
    assert pair.equal(5, 3) and pair.equal(6, 4) and pair.equal(1, 9, 2) and pair.equal(8, 7, group=1)
    assert all(torch.equal(a, b) for a, b in zip(untouched, pair.block(pair.here, 2), strict=True))
    # What was verified can be exported without another pass.
    assert pair.here.table[[5, 6, 1, 8]].tolist() == pair.there.table[[3, 4, 9, 7]].tolist()


def test_memory_for_pulls_compiles_its_checksums(monkeypatch):
    """Else the first pull or hand-off compiles for 4 s, and the engine stands still if the model runner verifies it."""
    compiled = []
    monkeypatch.setattr(BlockChecksums, "warm_up", lambda self: compiled.append(self))
    assert whole(cache(4, 1)) and len(compiled) == 1


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30, phases=WITHOUT_SHRINKING)
def test_pulls_report_exactly_the_bad_blocks(seed):
    """Wrong content, wrong key, never summed, wrong number of tokens: each is found, and only it."""
    rng = np.random.default_rng(seed)
    pair = Pair()
    remote = rng.permutation(np.arange(1, 16))[:8]
    local = rng.permutation(np.arange(1, 12))[:8]
    valid = rng.integers(1, TOKENS + 1, 8)
    keys = keys_of(remote)
    checksums_ready = [i for i in range(8) if rng.random() < 0.9]
    if checksums_ready:
        pair.there.compute_checksums(
            [batch_of(remote[checksums_ready].tolist(), valid[checksums_ready].tolist())], None
        )
    bad = set(range(8)) - set(checksums_ready)
    for i in range(8):
        what = rng.integers(0, 6)
        if what == 0:
            pages = pair.there.view.pages(pair.there.view.groups[0].regions[rng.integers(LAYERS)])
            cell = (remote[i], rng.integers(HEADS), rng.integers(valid[i]), rng.integers(INNER))
            pages[cell] ^= 1 << int(rng.integers(8))
            bad.add(i)
        elif what == 1:
            keys[i] ^= np.uint64(1 << int(rng.integers(64)))
            bad.add(i)
        elif what == 2 and valid[i] < TOKENS:  # beyond the tokens that count: ignored
            pages = pair.there.view.pages(pair.there.view.groups[0].regions[0])
            pages[remote[i], 0, valid[i], 0] ^= 1
    result = pair.run(pair.order(pull_of(local.tolist(), remote.tolist(), valid.tolist(), keys=keys)))
    assert result.bad_blocks == {int(local[i]) for i in bad}
    assert (result.failed, result.checksum_mismatch) == (bool(bad), bool(bad))
    assert all((pair.here.table[local[i]] == 0) == (i in bad) for i in range(8))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda o: setattr(o, "instance", "unknown/1"), "is unknown"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, 16])), "outside 1..15"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, 0])), "outside"),
        (lambda o: setattr(o.groups[0], "remote", np.array([3, 1 << 40])), "outside"),
    ],
)
def test_pulls_malformed_job_fails_at_once(spoil, words):
    pair = Pair()
    order = pair.order(pull_of([5, 6], [3, 4]))
    spoil(order)
    result = pair.pulls.start(order)
    assert result.failed and words in result.reason and result.bad_blocks == {5, 6} and not pair.pulls.active


def test_pulls_of_source_with_wrong_layout_fail():
    pair = Pair()
    true = info(pair.there)
    group = true.groups[0]
    import msgspec

    short = msgspec.structs.replace(true, groups=(msgspec.structs.replace(group, regions=group.regions[:1]),))
    for lie in (short, msgspec.structs.replace(true, groups=()), msgspec.structs.replace(true, agent_metadata=b"x")):
        pair.pulls.add_engine("liar/1", [msgspec.structs.replace(lie, agent="liar")])
        result = pair.pulls.start(pair.order(pull_of([5], [3]), source="liar/1"))
        assert result.failed and result.bad_blocks == {5}
    pair.there.compute_checksums([batch_of([3])], None)
    assert not pair.run(pair.order(pull_of([5], [3]))).failed


@pytest.mark.parametrize(
    "fault, words", [("fails", "failed"), ("start", "cannot start"), ("corrupt", "wrong checksum")]
)
def test_pulls_transport_faults_fail_and_next_pull_reconnects(fault, words, caplog):
    pair = Pair()
    pair.there.compute_checksums([batch_of([3, 4])], None)
    pair.transport.fault = fault
    for _ in range(3):
        result = pair.run(pair.order(pull_of([5, 6], [3, 4])))
        assert result.failed and words in result.reason
        assert result.checksum_mismatch == (fault == "corrupt") and result.unreadable == (fault == "fails")
        assert result.bad_blocks == ({5} if fault == "corrupt" else {5, 6})
    assert not pair.transport.running and not pair.pulls.active
    assert caplog.text.count("logged once") == 1
    pair.transport.fault = None
    assert not pair.run(pair.order(pull_of([5, 6], [3, 4]))).failed, "the next pull connects anew"


@pytest.mark.parametrize("fault", ["fails", "corrupt", None])
def test_pull_leaves_nothing_unverified_in_the_cache_of_a_cpu(fault):
    """vLLM's CPU attention multiplies tokens of a block that are not used yet by zero, and NaN times zero is NaN."""
    pair = Pair()
    pair.there.compute_checksums([batch_of([3, 4], [TOKENS, 2])], None)
    pair.transport.fault = fault
    pages = [pair.here.view.pages(region) for region in pair.here.view.groups[0].regions]
    order = pair.order(pull_of([5, 6], [3, 4], [TOKENS, 2]))
    if fault == "fails":  # some of it had arrived
        for page in pages:
            page[[5, 6]] = 0xFF
    result = pair.run(order)
    assert result.bad_blocks == {"fails": {5, 6}, "corrupt": {5}, None: set()}[fault]
    for block in (5, 6):
        valid = 0 if block in result.bad_blocks else {5: TOKENS, 6: 2}[block]
        assert not any(page[block, :, valid:].any() for page in pages)
        assert not valid or pair.equal(block, block - 2, valid)


def test_pull_of_many_reads_is_not_posted_by_the_model_runner(monkeypatch):
    """Posting takes microseconds a read. All requests of the engine would wait for 100,000 of them."""
    pair, exchange = Pair(), worker_without_threads()._exchange
    exchange.pulls, exchange.memory = pair.pulls, pair.here
    pair.there.compute_checksums([batch_of(range(1, 12))], None)
    assert not pair.run(pair.order(pull_of([1], [1]))).failed  # connects
    split_reads(monkeypatch, 4 * LAYERS)
    for local, remote, posted in (
        ([2, 3, 4, 5, 6], [4, 5, 6, 7, 8], True),  # adjacent: few reads
        ([2, 3, 4, 6, 8], [3, 5, 7, 9, 11], False),
    ):
        work = StepWork(1, pulls=[pair.order(pull_of(local, remote))])
        exchange.start_pulls(work, None)
        if not posted:
            assert pair.pulls.poll(quick=True) == []
        assert bool(pair.transport.running) == posted
        exchange.step(work, None, None)
        assert not pair.goes_on(50).failed and pair.equal(local[0], remote[0])


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


@pytest.mark.parametrize("busy", [0, 1, len(pulls_module.REREAD_SECONDS), len(pulls_module.REREAD_SECONDS) + 1])
def test_pulls_early_read_is_repeated_until_checksums_are_ready(clock, busy):
    pair = Pair()
    order = dataclasses.replace(pair.order(pull_of([5, 6], [3, 4])), promised=True)
    for read in range(busy + 1):
        if read == busy:
            pair.there.compute_checksums([batch_of([3, 4])], None)
        result = pair.run(order, 9) if not read else pair.goes_on(9)
        if read < min(busy, len(pulls_module.REREAD_SECONDS)):
            assert result is None and pair.pulls.active and not pair.transport.running, "it waits"
            clock.now += pulls_module.REREAD_SECONDS[read] - 0.001
            assert pair.goes_on(9) is None and not pair.transport.running, "not before its time"
            clock.now += 0.002
        elif result is not None:
            break
    assert result.failed == result.checksum_mismatch == (busy > len(pulls_module.REREAD_SECONDS))
    assert result.failed or pair.equal(5, 3)


def test_pulls_granted_export_is_read_once(clock):
    pair = Pair()
    assert pair.run(pair.order(pull_of([5, 6], [3, 4])), 9).checksum_mismatch


@pytest.mark.parametrize("fault, words", [("fails", "failed"), ("never", "within 2 s")])
def test_pulls_stuck_read_is_reported_after_agent_ended(clock, fault, words, caplog):
    """UCX cannot take it back: only the end of the agent that reads frees the memory."""
    pair = Pair()
    pair.transport.fault, pair.transport.refuse_end = fault, 6
    assert pair.pulls.start(pair.order(pull_of([5], [3]), timeout=2.0)) is None
    for _ in range(4):
        assert pair.pulls.poll() == [] and pair.transport.late_data() and pair.pulls.active
        clock.now += 1.6
    for _ in range(100):  # it is not asked again and again for an agent that does not end
        assert pair.pulls.poll() == [] and pair.transport.late_data()
    assert pair.transport.looks < 7 and caplog.text.count("restart this engine") == 1
    assert pair.pulls.all_waiting, "the reactor would poll it 20,000 times a second, until the engine is restarted"
    for _ in range(4):
        assert pair.pulls.active
        clock.now += 1.1
        results = pair.pulls.poll()
        assert bool(results) == (not pair.transport.late_data())
        if results:
            break
    [result] = results
    assert result.failed and words in result.reason and result.bad_blocks == {5} and not pair.pulls.active
    assert result.unreadable


def test_pulls_timed_out_read_may_end_later(clock):
    """Then it is right, and the agent stays."""
    pair = Pair()
    pair.there.compute_checksums([batch_of([3])], None)
    pair.transport.polls = 3
    assert pair.pulls.start(pair.order(pull_of([5], [3]), timeout=2.0)) is None
    clock.now += 2.1
    assert pair.pulls.poll() == [] and pair.pulls.poll() == []
    clock.now += pulls_module.GRACE_SECONDS - 0.2
    assert pair.pulls.poll() == []
    [result] = pair.pulls.poll()
    assert not result.failed and pair.equal(5, 3) and pair.transport.agent == 1
    assert not pair.run(pair.order(pull_of([6], [3]))).failed and not pair.transport.ended


@pytest.mark.parametrize("polls, right", [(2, True), (1000, False)])
def test_pulls_of_others_end_or_fail_with_a_failed_agent(clock, polls, right):
    pair = Pair()
    pair.there.compute_checksums([batch_of([3, 4])], None)
    pair.transport.polls = polls
    assert pair.pulls.start(pair.order(pull_of([5], [3]), name="other")) is None
    pair.transport.polls, pair.transport.fault = 0, "fails"
    assert pair.pulls.start(pair.order(pull_of([6], [4]), name="bad")) is None
    pair.transport.fault = None
    assert pair.pulls.poll() == [] and pair.transport.late_data()
    assert not pair.pulls.connected("s/1")
    assert pair.pulls.start(pair.order(pull_of([7], [3]), name="next")) is None, "waits for another agent"
    if not right:
        for _ in range(3):
            assert pair.pulls.poll() == []
        clock.now += pulls_module.GRACE_SECONDS + 0.01
    results = {}
    for _ in range(4):
        for result in pair.pulls.poll():
            if result.failed:
                assert not pair.transport.late_data()
            results[result.request_id] = result
    assert results["bad"].unreadable and results["bad"].bad_blocks == {6} and not results["other"].unreadable
    assert not results["next"].failed and pair.equal(7, 3) and pair.transport.agent == 2
    assert results["other"].failed != right and (right or "another had failed" in results["other"].reason)
    assert pair.equal(5, 3) == right and not pair.pulls.active


def test_pulls_waiting_for_new_agent_time_out(clock):
    pair = Pair()
    pair.transport.polls = 1000
    assert pair.pulls.start(pair.order(pull_of([5], [3]), name="other")) is None
    pair.transport.polls, pair.transport.fault = 0, "fails"
    assert pair.pulls.start(pair.order(pull_of([6], [4]), name="bad")) is None
    assert pair.pulls.poll() == []
    assert pair.pulls.start(pair.order(pull_of([7], [3]), name="next", timeout=0.5)) is None
    clock.now += 0.6
    [result] = pair.pulls.poll()
    assert result.request_id == "next" and "could not begin" in result.reason and result.bad_blocks == {7}


def test_pulls_quick_poll_ends_no_agent():
    pair = Pair()
    pair.there.compute_checksums([batch_of([3])], None)
    pair.transport.fault = "fails"
    assert pair.pulls.start(pair.order(pull_of([5], [3]))) is None
    pair.transport.fault = None
    for _ in range(5):
        assert pair.pulls.poll(quick=True) == [] and pair.transport.agent == 1
    assert pair.pulls.start(pair.order(pull_of([6], [3]))) is None
    assert pair.pulls.poll()[0].failed and pair.transport.ended == 1
    for _ in range(5):  # nor does it make another
        assert pair.pulls.poll(quick=True) == [] and not pair.transport.peers
    pair.transport.polls = 1
    assert pair.pulls.poll() == [] and pair.transport.peers
    assert not pair.pulls.poll(quick=True)[0].failed


def test_pulls_of_lost_agent_fail(clock, monkeypatch):
    pair = Pair()
    pair.transport.fault = "never"
    assert pair.pulls.start(pair.order(pull_of([5], [3]))) is None
    monkeypatch.setattr(pair.transport, "poll", lambda transfer: 1 / 0)
    [result] = pair.pulls.poll()
    assert result.failed and result.bad_blocks == {5} and pair.transport.ended == 1
    # What goes wrong while the agent ends is not taken for its end.
    monkeypatch.undo()
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pair.transport.fault = "fails"
    assert pair.pulls.start(pair.order(pull_of([5], [3]))) is None
    real = pair.transport.retired
    monkeypatch.setattr(pair.transport, "retired", lambda: 1 / 0)
    assert pair.pulls.poll() == [] and pair.pulls.poll() == []
    monkeypatch.setattr(pair.transport, "retired", real)
    clock.now += 1.1
    assert pair.pulls.poll()[0].failed and not pair.pulls.active


def test_pulls_unexpected_error_fails_one_pull_only(monkeypatch):
    pair = Pair()
    pair.there.compute_checksums([batch_of([3, 4])], None)
    real = pair.here.begin_check

    def begin_check(groups, moves=()):
        if groups[0].local[0] == 5:
            raise RuntimeError("out of memory")
        return real(groups, moves)

    monkeypatch.setattr(pair.here, "begin_check", begin_check)
    assert pair.pulls.start(pair.order(pull_of([5], [3]), name="bad")) is None
    assert pair.pulls.start(pair.order(pull_of([6], [4]), name="good")) is None
    results = {r.request_id: r for r in pair.pulls.poll() + pair.pulls.poll()}
    assert results["bad"].failed and results["bad"].bad_blocks == {5}
    assert not results["good"].failed and not pair.pulls.active


def test_pulls_check_that_fails_halfway_waits_for_its_kernels(monkeypatch):
    """Such as without memory: the pull is reported failed then, and vLLM may reuse its blocks."""
    pair = Pair(groups=2)
    pair.there.compute_checksums([batch_of([3]), batch_of([7], group=1)], None)
    memory, enqueued, compute = pair.here, [], pair.here._checks.compute

    def kernel(group, *rest):
        if group:
            raise RuntimeError("out of memory")
        enqueued.append(group)
        return compute(group, *rest)

    monkeypatch.setattr(memory._checks, "compute", kernel)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    memory._stream = SimpleNamespace(synchronize=enqueued.clear)
    assert pair.run(pair.order(pull_of([5], [3]), pull_of([8], [7], group=1))).failed
    assert not enqueued


def test_pulls_many_at_once():
    pair = Pair(blocks=(64, 64))
    pair.there.compute_checksums([batch_of(range(1, 64))], None)
    for i in range(1, 61, 3):
        pair.transport.polls = i % 4
        ids = [i, i + 1, i + 2]
        assert pair.pulls.start(pair.order(pull_of(ids, [64 - n for n in ids]), name=str(i))) is None
    done = {}
    for _ in range(10):
        done |= {r.request_id: r for r in pair.pulls.poll()}
    assert len(done) == 20 and not any(r.failed for r in done.values())
    assert all(pair.equal(n, 64 - n) for n in range(1, 61))


# -- with NIXL ---------------------------------------------------------------------------------------------------------


def test_pulls_agent_keeps_nothing_of_many_restarted_engines():
    """Each restart of a prefill engine is another engine to the agent, whose lists name all blocks of both."""
    pair = Pair()
    pair.there.compute_checksums([batch_of([3])], None)
    agents = set()
    for number in range(3 * MAX_ENGINES):
        source = f"s/restart {number}"
        pair.pulls.add_engine(source, [info(pair.there)])
        assert not pair.run(pair.order(pull_of([5], [3]), source=source)).failed
        agents.add(pair.transport.agent)
    assert len([each for each in pair.transport.lists if each() is not None]) <= 2 * MAX_ENGINES
    assert 2 <= len(agents) <= 4 and not pair.transport.running


def nixl(name):
    pytest.importorskip("nixl")
    return NixlTransport(name, ["UCX"])


@pytest.mark.parametrize("max_reads", [1000, 2])
def test_pulls_with_nixl_between_two_agents(monkeypatch, max_reads):
    split_reads(monkeypatch, max_reads)
    here, there = CacheMemory(cache(12, 1), False), CacheMemory(cache(16, 2), True)
    near, far = nixl(f"near {max_reads}"), nixl(f"far {max_reads}")
    here.register(near)
    there.register(far)
    true = m.RankInfo(
        0, far.name, far.metadata(), there.memory_type, 0, 16, there.transfer_view.groups, there.view.geometry(),
        there.table.data_ptr(),
    )  # fmt: skip
    pulls = Pulls(near, here, 0)
    pulls.add_engine("s/1", [true])
    there.compute_checksums([batch_of([3, 4, 9])], None)
    stop = threading.Event()

    def serve():
        while not stop.wait(0.0005):
            far.progress()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for _ in range(2):
            assert pulls.start(PullJob("r", "s/1", [pull_of([1, 2, 7], [3, 4, 9])], 20.0)) is None
            [result] = eventually(pulls.poll, 20)
            assert not result.failed, result.reason
        assert pulls.start(PullJob("r", "s/1", [pull_of([1, 2], [3, 10])], 20.0)) is None
        [result] = eventually(pulls.poll, 20)
        assert result.checksum_mismatch and result.bad_blocks == {2}, "block 10 was never summed"
    finally:
        stop.set()
        thread.join(5)
    for region, other in zip(here.view.groups[0].regions, there.view.groups[0].regions, strict=True):
        assert torch.equal(here.view.pages(region)[[1, 7]], there.view.pages(other)[[3, 9]])


def test_pulls_between_two_workers_end_to_end(tmp_path):
    """Two worker halves with real NIXL and links: set up, checksums, a pull, no polling afterwards; a bad cache is
    reported."""
    pytest.importorskip("nixl")
    halves, servers, heard, reactors = [], [], [], []
    views = [cache(12, 1), cache(16, 2)]
    try:
        for i, view in enumerate(views):
            path = str(tmp_path / f"{i}.sock")
            reactors.append(Reactor(f"s{i}"))
            heard.append([])
            servers.append(LinkServer(reactors[i], path, heard[i].append))
            reactors[i].start()
            halves.append(KVTierConnectorWorker(0, f"agent{i}", LinkPlace(path), ["UCX"], Uncontained()))
            halves[i].register(CacheSetup(lambda view=view: view, whole, lambda view: (0,)))
        for h in heard:
            described, registered = eventually(lambda h=h: len(h) == 2 and h, 20)
            assert isinstance(described, lm.Described) and described.shards == (0,) and described.rank == 0
            assert isinstance(registered, lm.Register)
        halves[1].submit(StepWork(7, [batch_of([3, 4])]))
        eventually(lambda: lm.ChecksumsReady(0, 7) in heard[1])
        reactors[1].call_soon(lambda: servers[1].send(lm.Serve(True)))
        source = heard[1][1].info
        for n in range(2):
            order = PullJob(f"r{n}", "s/1", [pull_of([1, 2], [3, 4])], 20.0)
            halves[0].submit(StepWork(n, [], [order], {"s/1": [source]} if n == 0 else {}))
            step = eventually(lambda: (s := halves[0].collect()).finished and s, 20)
            assert step.finished == {f"r{n}"} and not step.failed and not step.bad_blocks
        halves[0].submit(StepWork(3, [], [PullJob("x", "s/1", [pull_of([5], [99])], 1.0)]))
        step = eventually(lambda: (s := halves[0].collect()).finished and s, 20)
        assert step.failed == {"x"} and step.bad_blocks == {5}
        reactors[1].call_soon(lambda: servers[1].send(lm.Serve(False)))
        eventually(lambda: not any(half._exchange._polling or half._exchange._busy() for half in halves))
        for region, other in zip(views[0].groups[0].regions, views[1].groups[0].regions, strict=True):
            assert torch.equal(views[0].pages(region)[[1, 2]], views[1].pages(other)[[3, 4]])
    finally:
        for thing in (*halves, *reactors):
            (thing.shutdown if isinstance(thing, KVTierConnectorWorker) else thing.stop)()


def test_checksums_from_before_a_reset_match_nothing(tmp_path):
    """By a message if the engine is idle, by its next step otherwise; what an earlier step left to do is not done."""
    pytest.importorskip("nixl")
    here, there = (Half(tmp_path, number, cache(16, number)) for number in (1, 2))
    try:
        infos = {"s/1": [there.info()]}
        here.info()
        there.sum(3, 4)
        there.serve()

        def bad(remote):
            here.steps += 1
            here.pull("r", 1 + here.steps % 8, remote, infos=infos)
            return here.results()[0].failed

        assert not bad(3) and not bad(4)
        there.reactor.call_soon(lambda: there.server.send(lm.ClearChecksums(1)))
        eventually(lambda: there.made._exchange.generation == 1)
        assert bad(3) and bad(4)
        there.sum(3)  # a step from before, which the reactor comes to late
        assert bad(3)
        for generation in (1, 2):
            there.steps += 1
            work = StepWork(there.steps, [batch_of([4])], generation=generation)
            there.made.begin(work)
            there.made.submit(work)
            eventually(lambda: lm.ChecksumsReady(0, there.steps) in there.heard, 20)
            assert not bad(4)
        there.reactor.call_soon(lambda: there.server.send(lm.ClearChecksums(2)))  # the step was faster
        there.reactor.call_soon(lambda: there.server.send(lm.Serve(True)))
        assert not bad(4) and bad(3)
        there.made.begin(StepWork(there.steps + 1, generation=3))
        assert bad(4)
    finally:
        here.end()
        there.end()


def test_pulls_of_unsupported_cache_are_reported_and_fail_at_once(tmp_path):
    reactor, heard = Reactor("s"), []
    LinkServer(reactor, str(tmp_path / "l.sock"), heard.append)
    reactor.start()
    half = KVTierConnectorWorker(0, "agent", LinkPlace(str(tmp_path / "l.sock")), ["UCX"], Uncontained())

    def describe():
        raise KVTierError("no such layout")

    try:
        half.register(CacheSetup(describe, whole, lambda view: (0,)))
        assert eventually(lambda: heard) == [lm.Unusable(0, "no such layout")]
        half.submit(StepWork(0, [batch_of([1])], [PullJob("r", "s/1", [pull_of([5], [3])], 1.0)]))
        step = eventually(lambda: (s := half.collect()).finished and s)
        assert step.failed == {"r"} and step.bad_blocks == {5} and step.results[0].reason == "no such layout"
    finally:
        half.shutdown()
        reactor.stop()

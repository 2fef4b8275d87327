"""The worker side when vLLM takes the KV cache's memory away and gives it back: with real NIXL, between two halves."""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from pull_fakes import Pair, batch_of, cache, cache_of_numbers, pull_of
from support import Uncontained, eventually
from worker_halves import Half, same

from vllm_kvtier import codecs
from vllm_kvtier.jobs.transfer_jobs import StepWork
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.link import LinkPlace, LinkServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker import connector_worker as connector_worker_module
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import ASLEEP, CacheSetup
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory


@pytest.fixture
def halves(tmp_path):
    """(reader, source); they have shaken hands."""
    pytest.importorskip("nixl")
    here, there = Half(tmp_path, 0, cache(12, 0)), Half(tmp_path, 1, cache(16, 1))
    try:
        yield here, there
    finally:
        here.end()
        there.end()


def test_worker_after_suspend_is_pulled_from_under_new_agent(halves):
    here, there = halves
    here.info()
    first = there.info()
    there.sum(3, 4)
    there.serve()
    here.pull("before", 1, 3, infos={"s/1": [first]})
    [result] = here.results()
    assert not result.failed and same(here, 1, there, 3)
    for life in range(2, 4):
        there.made.suspend()
        there.made.suspend()
        eventually(lambda life=life: len(there.said(m.Asleep)) == life - 1)
        there.fill(0xEE)
        here.pull("meanwhile", 2, 3, timeout=2.0)
        [result] = here.results()
        assert result.failed and result.bad_blocks == {2}, "its memory is read no more"
        there.made.resume()
        there.made.resume()
        info = there.info(life)
        assert info.agent != first.agent and info.agent_metadata != first.agent_metadata
        there.fill(life)
        there.sum(3, 4)
        name = f"s/{life}"
        here.pull("after", 2, 4, name, {name: [info]})
        [result] = here.results()
        assert not result.failed and same(here, 2, there, 4), result.reason
    assert len(there.said(m.Register)) == 3, "once each time"


def test_worker_after_suspend_pulls_from_known_engines(halves):
    here, there = halves
    here.info()
    source = there.info()
    there.sum(3, 4)
    there.serve()
    here.pull("before", 1, 3, infos={"s/1": [source]})
    assert not here.results()[0].failed
    here.made.suspend()
    here.pull("meanwhile", 1, 3)
    [result] = here.results()
    assert result.failed and result.reason == ASLEEP
    here.fill(0xEE)
    here.made.resume()
    here.info(2)
    here.pull("after", 5, 4)
    [result] = here.results()
    assert not result.failed and same(here, 5, there, 4), result.reason


def test_worker_suspend_frees_encoded_memory_before_new_one(tmp_path):
    """As much as its whole cache: twice that may not fit."""
    pytest.importorskip("nixl")
    made = weakref.WeakValueDictionary()  # by the cache

    def encoded(view):
        assert view not in made, "that of before is still there"
        made[view] = memory = EncodedMemory(view, [codecs.get("int8")])
        return memory

    here, there = (Half(tmp_path, n, cache_of_numbers(16, n), encoded) for n in range(2))
    try:
        for life in range(1, 4):
            info = [half.info(life) for half in (here, there)][1]
            there.sum(3, 4)
            there.serve()
            here.pull("r", 5, 4, f"s/{life}", {f"s/{life}": [info]})
            [result] = here.results()
            assert not result.failed, result.reason
            for half in (here, there):
                half.made.suspend()
                half.made.resume()
                half.info(life + 1)
        assert len(made) == 2
    finally:
        here.end()
        there.end()


def test_worker_suspend_during_pulls_reports_each_once_and_writes_nothing(halves):
    """Of aborted requests: vLLM waits for word of them before it gives their blocks to others."""
    here, there = halves
    here.info()
    info = there.info()
    there.sum(*range(1, 9))
    here.pull("first", 1, 1, infos={"s/1": [info]})  # the source makes no progress: it does not end
    eventually(lambda: here.made._exchange.pulls.connected("s/1"), 20)
    for n in range(2, 9):
        here.pull(f"r{n}", n, n)
    here.made.suspend()
    results = here.results(8)
    assert sorted(r.request_id for r in results) == sorted(["first", *(f"r{n}" for n in range(2, 9))])
    assert all(r.failed and r.reason == ASLEEP for r in results)
    here.fill(0xEE)
    there.serve()
    time.sleep(0.2)  # what had been asked for would come by now
    assert all((page == 0xEE).all() for n in range(1, 9) for page in here.block(n))
    assert not here.made.collect().results


@pytest.fixture
def slow_setup(monkeypatch):
    """(event set when a set-up has begun, event that lets it go on)."""
    pytest.importorskip("nixl")
    entered, go_on = threading.Event(), threading.Event()
    real = connector_worker_module.NixlTransport

    def slow(*arguments):
        entered.set()
        assert go_on.wait(20)
        return real(*arguments)

    monkeypatch.setattr(connector_worker_module, "NixlTransport", slow)
    return entered, go_on


def test_worker_suspend_waits_for_setup_and_sets_up_again(tmp_path, slow_setup):
    """And one that sleeps before that is not set up before it wakes."""
    entered, go_on = slow_setup
    half = Half(tmp_path, 0, cache(12, 0))
    try:
        assert entered.wait(20)
        sleeper = threading.Thread(target=half.made.suspend)
        sleeper.start()
        sleeper.join(0.05)
        assert sleeper.is_alive(), "the memory is in use"
        go_on.set()
        sleeper.join(20)
        assert half.made._exchange.pulls is None and half.made._exchange.transport is None
        eventually(lambda: half.said(m.Asleep))
        assert len(half.said(m.Register)) == 1
        half.made.resume()
        assert half.info(2).agent != half.info(1).agent
    finally:
        half.end()


def test_worker_step_behind_a_reset_does_not_wait_for_setup(tmp_path, slow_setup):
    """After sleep mode vLLM serves at once, often with its prefix cache reset, and registering memory takes seconds."""
    entered, go_on = slow_setup
    half = Half(tmp_path, 0, cache(12, 0))
    try:
        assert entered.wait(20)
        step = threading.Thread(target=half.made.begin, args=(StepWork(1, generation=1),))
        step.start()
        step.join(5)
        assert not step.is_alive() and half.made._exchange.generation == 1
    finally:
        go_on.set()
        half.end()


def test_worker_suspended_before_setup_is_set_up_once(tmp_path):
    pytest.importorskip("nixl")
    path, heard, reactor = str(tmp_path / "l.sock"), [], Reactor("s")
    half = KVTierConnectorWorker(0, "agent", LinkPlace(path), ["UCX"], Uncontained())
    try:
        half.register(
            CacheSetup(lambda: cache(12, 0), lambda view: CacheMemory(view, False), lambda view: (0,))
        )
        half.suspend()
        half.resume()
        half.suspend()
        LinkServer(reactor, path, heard.append)
        reactor.start()
        eventually(lambda: heard.count(m.Asleep(0)) == 2, 20)
        turned = threading.Event()
        half._reactor.call_soon(turned.set)
        assert turned.wait(10) and not any(isinstance(message, m.Register) for message in heard)
        half.resume()
        eventually(lambda: any(isinstance(message, m.Register) for message in heard), 20)
        turned.clear()
        half._reactor.call_soon(turned.set)
        assert turned.wait(10) and sum(isinstance(message, m.Register) for message in heard) == 1
    finally:
        half.shutdown()
        reactor.stop()


@pytest.fixture
def pair(monkeypatch):
    pair = Pair()
    pair.there.compute_checksums([batch_of([3, 4])], None)
    pair.transport.close = pair.transport.retire
    return pair


def test_pulls_stop_reports_jobs_without_pending_data(pair):
    """Each stage: one that waits for its fence, one that reads, one whose agent does not end."""
    pair.transport.fault, pair.transport.refuse_end = "never", 3
    assert pair.pulls.start(pair.order(pull_of([5], [3]), name="reads")) is None
    late = SimpleNamespace(query=lambda: False)
    assert pair.pulls.start(pair.order(pull_of([6], [4]), name="waits"), late) is None
    results = pair.pulls.stop("asleep")
    assert [r.request_id for r in results] == ["waits"] and pair.transport.late_data() and pair.pulls.active
    pair.pulls._next_check = 0.0
    results = pair.pulls.poll()
    assert [(r.request_id, r.reason, r.bad_blocks) for r in results] == [("reads", "asleep", {5})]
    assert not pair.transport.late_data() and not pair.pulls.active


def test_pulls_after_failed_stop_start_no_read(pair):
    """The memory is taken away nevertheless."""
    pair.pulls._begin_retiring(1e18)
    assert pair.pulls.start(pair.order(pull_of([6], [4]), name="waits")) is None
    pair.transport.close = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pair.pulls.stop("asleep")
    (result,) = pair.pulls.poll()
    assert result.failed and result.bad_blocks == {6} and not pair.pulls.active

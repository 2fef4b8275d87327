"""Containment: what vLLM is answered when our code raises, how it is counted, and that nothing is held or lost."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from matcher_harness import ONE, World, offered, params
from source_fakes import load_results
from support import Clock, FakePool, Uncontained, make_request
from test_connector_worker import half as worker  # noqa: F401
from test_sync_load_tracker import fetch, order, result
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from worker_halves import contain_with

from vllm_kvtier import connector as connector_module
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.containment import MAX_ERRORS, WINDOW, Containment, Unsafe, contained
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.transfer_jobs import FailedJob, GroupLoad, PullJob, StepWork
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock


def fail(*_, **__):
    raise RuntimeError("on purpose")


def once(function):
    """``function``, that raises when it is first called."""
    left = [fail]

    def call(*args, **kwargs):
        return (left.pop() if left else function)(*args, **kwargs)

    return call


@pytest.fixture
def contain():
    return Containment(Counters())


# -- the mechanism -----------------------------------------------------------------------------------------------------


class Called:
    def __init__(self, contain):
        self.containment, self.half, self.calls = contain, object(), 0

    @contained("half", lambda: "otherwise", lambda self, x: f"repaired {x}")
    def repaired(self, x):
        fail()

    @contained(otherwise=list, repair=fail)
    def twice_wrong(self):
        fail()

    @contained(again=True)
    def second_time(self):
        self.calls += 1
        return 1 // (self.calls - 1)

    @contained(passes=(KeyError,))
    def passing(self, error):
        raise error


def test_contained_method_error_returns_fallback(contain):
    called = Called(contain)
    assert called.repaired(3) == "repaired 3" and called.twice_wrong() == [] and called.second_time() == 1
    called.half = None
    assert called.repaired(3) == "otherwise"
    counted = contain._counters.take()
    assert counted == {
        "internal_errors|repaired": 1, "internal_errors|twice_wrong": 1, "internal_errors|twice_wrong_repair": 1,
        "internal_errors|second_time": 1,
    }  # fmt: skip


def test_contained_method_passes_declared_errors(contain):
    with pytest.raises(KeyError):
        Called(contain).passing(KeyError("option"))
    assert Called(contain).passing(ValueError()) is None and contain.errors == 1


def test_containment_repeated_error_logs_one_traceback(contain, caplog):
    for _ in range(5):
        contain.attempt("here", fail)
    assert caplog.text.count("Traceback") == 1 and contain._counters.take() == {"internal_errors|here": 5}
    contain.attempt("here", lambda: {}["another place"])
    assert caplog.text.count("Traceback") == 2


def test_containment_errors_of_many_places_log_each_traceback(contain, caplog):
    """The lines of one place of a file are limited; all tracebacks are written by one."""
    source, places = "\n".join(f"def f{i}():\n    raise ValueError({i})" for i in range(MAX_ERRORS)), {}
    exec(compile(source, "places.py", "exec"), places)
    for i in range(MAX_ERRORS):
        contain.attempt(f"place {i}", places[f"f{i}"])
    assert caplog.text.count("Traceback") == MAX_ERRORS


@pytest.mark.parametrize(
    "apart, times", [(WINDOW / MAX_ERRORS / 2, 1), (WINDOW / MAX_ERRORS * 1.1, 0)], ids=["often", "seldom"]
)
def test_containment_too_many_errors_disable_connector(apart, times, caplog):
    clock = Clock()
    contain, passive = Containment(Counters(), clock), []
    contain.on_limit = lambda: passive.append(1)
    for _ in range(MAX_ERRORS + 4):
        contain.attempt("here", fail)
        clock.now += apart
    assert len(passive) == times == caplog.text.count("this engine neither loads nor stores KV")


def test_containment_of_a_worker_does_not_say_that_it_is_disabled(contain, caplog):
    for _ in range(MAX_ERRORS + 4):
        contain.attempt("here", fail)
    assert "Traceback" in caplog.text and "disabled" not in caplog.text


def test_containment_insist_failing_twice_disables_connector(contain):
    passive, done = [], []
    contain.on_limit = lambda: passive.append(1)
    contain.insist("needed", once(lambda: done.append(1)))
    assert done and not passive
    contain.insist("needed", fail)
    assert passive


def test_containment_unsafe_insist_failing_twice_raises_unsafe(contain):
    class Calls(Called):
        @contained(again=True)
        def take_back(self):
            self.containment.attempt("outer", lambda: contain.insist("taking back", fail, unsafe=True))

    with pytest.raises(Unsafe, match="taking back failed twice"):
        Calls(contain).take_back()
    assert contain.errors == 2


def test_connector_methods_called_by_vllm_are_contained():
    """But those that call a contained one, or nothing of ours."""
    bare = {
        "request_finished", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
        "shutdown", "__init__",
    }  # fmt: skip
    base = {name for name, _ in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction)}
    mine = {name for name, each in vars(KVTierConnector).items() if inspect.isfunction(each)}
    called = mine & (base | {"request_finished_all_groups"})
    open_ = {name for name in called if not hasattr(getattr(KVTierConnector, name), "__wrapped__")}
    assert open_ <= bare, open_ - bare


@pytest.fixture
def connector(contain):
    made = KVTierConnector.__new__(KVTierConnector)
    made.containment, made.counters, made._worker, made._relay = contain, contain._counters, None, None
    made._info = SimpleNamespace(reports_failed_requests=False, kv_events_enabled=True)
    made._marks_failures = False
    names = [name for name, _ in inspect.getmembers(KVTierConnectorScheduler, inspect.isfunction) if name[0] != "_"]
    made._scheduler = SimpleNamespace(**dict.fromkeys(names, fail))
    return made


def test_connector_with_all_parts_raising_returns_neutral_answers(connector):
    request, blocks = SimpleNamespace(request_id="r"), SimpleNamespace(get_block_ids=lambda: ([1],))
    assert connector.on_new_request(request) is None
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.update_state_after_alloc(request, blocks, 32) is None
    assert isinstance(connector.build_connector_meta(None).work, StepWork)
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"r"})
    assert connector.update_connector_output(output) is None
    assert connector.take_events() == [] and connector.request_finished(request, [1]) == (False, None)
    assert connector.has_pending_block_frees() is False and connector.reset_cache() is None
    assert connector.get_kv_connector_stats() is None
    connector.shutdown()
    assert connector.containment.errors > 10


def test_connector_without_scheduler_returns_neutral_answers(connector, contain):
    connector._scheduler = None
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.request_finished(None, []) == (False, None) and connector.take_events() == []
    assert isinstance(connector.build_connector_meta(None).work, StepWork) and not contain.errors


# -- hooks into vLLM ---------------------------------------------------------------------------------------------------


def test_scheduler_lock_error_runs_vllm_method_once(contain):
    lock, ran = SchedulerLock(contain), []
    lock._jobs.append(lambda: None)
    lock._run = fail
    assert lock.held(lambda x: ran.append(x) or x)(5) == 5 and ran == [5]

    def own():
        ran.append("own")
        raise ValueError("vLLM's own")

    with pytest.raises(ValueError, match="vLLM's own"):
        lock.held(own)()
    assert ran == [5, "own"] and contain.errors == 2 and not lock._depth


def test_around_reset_error_runs_vllm_reset_once(contain):
    resets = []
    pool = SimpleNamespace(
        hash_block_size=4, num_gpu_blocks=9, get_num_free_blocks=None,
        reset_prefix_cache=lambda *args: resets.append(args) or True,
    )  # fmt: skip
    BlockPool(pool).around_reset(fail, fail, contain)
    assert pool.reset_prefix_cache("now") is True and resets == [("now",)] and contain.errors == 4


# -- requests ----------------------------------------------------------------------------------------------------------


def release_steps(world, name, **how):
    for give_back in world.matcher.release_steps(name, **how):
        give_back()


def request_of(world, **fields):
    request = make_request("r", list(range(40)), 4)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize("state", ["new", "asking", "answered", "offered", "asking a peer", "offered by a peer"])
@pytest.mark.parametrize("gone", [False, True])
def test_matcher_let_go_releases_lookup_and_lease(state, gone):
    world = World(ONE)
    peer = "peer" in state
    request = request_of(world, kv_transfer_params=params("a") if peer else None)
    if not peer:
        world.store(request)
    if state != "new":
        world.matcher.match(request, 0)
        [pending] = world.client.open
        if state != "asking":
            world.answer(pending)
        if state in ("offered", "asking a peer", "offered by a peer"):
            world.matcher.match(request, 0)
    if peer:
        [ask] = world.peers.open
        if state == "offered by a peer":
            world.peers.answer(ask, world.peers.offer(ask, 40))
            world.matcher.match(request, 0)
            assert world.matcher.get("r").life.state is State.HIT and world.peers.held
    release_steps(world, "r", gone=gone)
    for pending in list(world.client.open):
        world.answer(pending)
    assert not world.client.held and not world.peers.held and not world.matcher.take_jobs()[0]
    for ask in world.peers.open:
        assert ask.cancelled
    t = world.matcher.get("r")
    assert t is None or not gone
    if t is not None:
        assert t.life.state is State.LOCAL and world.matcher.match(request, 0) == (0, False)
    world.balanced()


PLACES = ["_build_job", "_source_selector.cancel_prefetch", "_planner.started", "nothing"]


@pytest.mark.parametrize(
    "where, synchronous",
    [("_sync_load.begin", True), *[(where, synchronous) for where in PLACES for synchronous in (False, True)]],
)
def test_matcher_fail_load_waits_for_worker_report(where, synchronous, monkeypatch):
    pool = FakePool(64, 4)
    scheduler = SimpleNamespace(
        connector="ours", get_request_counts=lambda: (0, 1), requests={}, running=[], prev_step_scheduled_req_ids=set()
    )
    make = (lambda planner: SyncLoad(1000.0, 60.0, BlockPool(pool), lambda: scheduler, "ours",
        planner)) if synchronous else (
        lambda planner: None
    )  # fmt: skip
    world = World(ONE, make_hurry=make)
    request = request_of(world)
    world.store(request)
    tokens, asynchronous = offered(world, request)
    assert tokens and asynchronous is not synchronous
    ids = [block.block_id for block in pool.blocks[1:11]]
    tables, free = (ids,), pool.get_num_free_blocks()
    owner, _, name = where.rpartition(".")
    if where != "nothing":
        target = getattr(world.matcher, owner) if owner else world.matcher
        monkeypatch.setattr(target, name, once(getattr(target, name)))
        with pytest.raises(RuntimeError):
            world.matcher.allocated(request, tables, tokens)
    else:  # what raised came later
        world.matcher.allocated(request, tables, tokens)
    world.matcher.fail_load(request, tables, tokens)
    [failed], _ = world.matcher.take_jobs()
    assert (
        isinstance(failed, FailedJob)
        and failed.block_list == ids[: -(-tokens // 4)]
        and failed.synchronous is synchronous
    )
    t = world.matcher.get("r")
    assert t.life.state is (State.VERIFYING if synchronous else State.LOADING)
    if synchronous:
        assert world.sync_load.verification_pending and pool.get_num_free_blocks() == free - len(failed.block_list)
        scheduler.running = []
        world.sync_load.apply_results("r", [result("r", *failed.block_list)])
        assert not world.sync_load.verification_pending and pool.get_num_free_blocks() == free
    world.matcher.on_load_ended("r", True)
    assert t.life.state is State.LOCAL and not world.client.held and not world.planner.open
    world.balanced()


@pytest.mark.parametrize(
    "part", ["_on_result", "_count", "_succeeded", "_matcher.on_load_ended", "_source_selector.advance"]
)
@pytest.mark.parametrize("failed", [False, True])
def test_load_results_error_in_one_result_keeps_others(part, failed, contain, monkeypatch):
    world = World(ONE)
    for name, start in (("a", 0), ("b", 1000)):
        request = make_request(name, list(range(start, start + 40)), 4)
        world.store(request)
        tokens, _ = offered(world, request)
        world.matcher.allocated(request, world.tables(0, tokens), tokens)
    world.matcher.take_jobs()
    world.planner.observe_load = world.planner.observe_handover = lambda *_: None
    outcomes = load_results(world.load, world.matcher, contain)
    target = {"_matcher.on_load_ended": world.matcher, "_source_selector.advance": world.matcher._source_selector}.get(
        part, outcomes
    )
    name = part.rpartition(".")[2]
    monkeypatch.setattr(target, name, once(getattr(target, name)))
    bad = [1] if failed else []
    outcomes.arrived([result("a", *bad), result("b", *bad)], {"a", "b"})
    assert contain.errors == (0 if part == "_succeeded" and failed else 1)
    assert {world.matcher.get(name).life.state for name in "ab"} <= {State.LOCAL, State.LOADED}
    assert not world.client.held and not world.planner.open and not world.matcher._loading_hashes


def test_step_work_error_keeps_jobs_for_next_call(monkeypatch):
    world = World(ONE)
    half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
    half._clearing = ChecksumClearing(print)
    half._matcher, half._exporter = world.matcher, SimpleNamespace(step=3, urgent=False)
    request = request_of(world)
    world.store(request)
    tokens, _ = offered(world, request)
    world.matcher.allocated(request, world.tables(0, tokens), tokens)
    monkeypatch.setattr(world.matcher, "take_aborted", once(world.matcher.take_aborted))
    with pytest.raises(RuntimeError):
        half.step_work()
    [load] = half.step_work().loads
    assert load.request_id == "r" and half.step_work().loads == []


# -- blocks ------------------------------------------------------------------------------------------------------------


def export_of(pool, ids, kind=LeaseKind.RETAINED):
    return Export("e", kind, 8, [b"1" * 32, b"2" * 32], b"", b"", [GroupBlocks(4, ids)], pool.pin(ids), 0, 1e18)


@pytest.mark.parametrize("lease", [False, True])
def test_exports_free_error_is_retried(lease, monkeypatch):
    fake = FakePool(16, 4)
    pool, table = BlockPool(fake), ExportTable(4, dict.fromkeys(LeaseKind, 16))
    free = fake.get_num_free_blocks()
    table.mark_checksums_ready(5)
    table.add(export_of(pool, [1, 2]))
    if lease:
        granted = table.lease_export("e", b"", b"", 0, "connection", 60.0)
        table.end_export("e")
    monkeypatch.setattr(table, "_free", once(table._free))
    end = (lambda: table.release(granted.id, "connection", True)) if lease else (lambda: table.end_export("e"))
    with pytest.raises(RuntimeError):
        end()
    assert end() is True and sum(table.take_freed(), []) == [1, 2]
    pool.free([1, 2])
    assert fake.get_num_free_blocks() == free and not any(table.counts().values())


# -- the worker side ---------------------------------------------------------------------------------------------------


@pytest.fixture
def rank(worker, contain):  # noqa: F811
    contain_with(worker, contain)
    return worker


def turn(rank):
    """What waits for the reactor's thread."""
    queued, rank.queued[:] = list(rank.queued), []
    for job in queued:
        job()


def failed_job(name, synchronous=False):
    return FailedJob(
        name, [GroupLoad(0, np.array([3, 4]), np.zeros(2, np.uint64), np.zeros(2, np.int64))], synchronous
    )


@pytest.mark.parametrize("synchronous", [False, True])
def test_worker_failed_job_is_reported_with_its_step(rank, synchronous):
    work = StepWork(7, failed=[failed_job("r", synchronous)])
    rank.sync_load(work)
    rank.submit(work)
    out = rank.collect()
    assert [each.bad_blocks for each in out.results] == [{3, 4}]
    known = (set(), set(), set()) if synchronous else ({"r"}, {3, 4}, {"r"})  # by vLLM
    assert (out.failed, out.bad_blocks, out.finished) == known
    assert rank.collect().results == [] and not rank._jobs.outstanding


def pull(name):
    blocks = np.array([3, 4])
    return PullJob(name, "s/1", [SimpleNamespace(blocks=blocks, local=blocks)], 1.0)


@pytest.mark.parametrize("kind", ["load", "fetch", "pull", "collected"])
def test_worker_error_in_submit_reports_job_failure_once(rank, kind):
    """Later results of it have no owner, whatever it had done."""
    rank._store = SimpleNamespace(
        load=fail, step=lambda *_: None, under_way=set, cancel_loads=fail, collect=lambda idle: None
    )
    rank._exchange.fetching = SimpleNamespace(
        begin=fail, step=lambda *_: None, under_way=set, add_engines=fail, collect=lambda idle: None, active=False
    )
    rank._exchange.pulls = SimpleNamespace(connected=lambda source: True, start=fail, under_way=set, active=False)
    rank._exchange.memory = SimpleNamespace(on_device=False)
    work = {
        "load": StepWork(7, loads=[order("r", False)]), "fetch": StepWork(7, fetches=[fetch("r", False)]),
        "pull": StepWork(7, pulls=[pull("r")]), "collected": StepWork(7, loads=[order("r", False)]),
    }[kind]  # fmt: skip
    if kind == "collected":
        rank._store.load, rank._store.collect = lambda loads, after: None, fail
    rank.submit(work)
    first = rank.collect()
    turn(rank)
    second = rank.collect()
    assert not first.results and second.finished == second.failed == {"r"}
    rank._jobs.finish(result("r"))
    assert not rank.collect().results
    assert rank._contain.errors == 1 + (kind == "collected") * 2


def test_worker_unrelated_error_keeps_jobs_under_way(rank, contain):
    rank._store = SimpleNamespace(
        load=lambda loads, after: None, step=lambda *_: None, under_way=lambda: {"r"}, collect=lambda idle: None
    )
    rank.submit(StepWork(7, loads=[order("r", False)]))
    contain.attempt("elsewhere", fail)
    assert not rank.collect().results
    turn(rank)
    assert not rank.collect().results
    rank._jobs.finish(result("r"))
    assert rank.collect().finished == {"r"}


@pytest.mark.parametrize("synchronous", [False, True])
def test_worker_error_in_collect_loses_no_result(rank, synchronous, monkeypatch):
    tier = rank._store = SimpleNamespace(
        load=lambda loads, after: None, load_now=lambda loads, after: None, step=lambda *_: None,
        wait_until_done=lambda seconds: None, collect=lambda idle: None,
        under_way=lambda: {"r"},
    )  # fmt: skip
    load = order("r", synchronous)
    work = StepWork(7, loads=[load])
    rank.sync_load(work)
    rank.submit(work)
    rank._jobs.finish(result("r", 4, load_id=load.load_id))
    monkeypatch.setattr(rank._jobs.sync_loads, "split", once(rank._jobs.sync_loads.split))
    out = rank.collect()
    assert tier and [each.bad_blocks for each in out.results] == [{4}]
    assert not rank.collect().results


def test_worker_repeated_submit_starts_jobs_once(rank):
    loads = []
    rank._store = SimpleNamespace(load=lambda orders, after: loads.extend(orders), step=lambda *_: None)
    work = StepWork(7, loads=[order("r", False)])
    rank.submit(work)
    rank.submit(work)
    assert len(loads) == 1


def test_uncontained_test_helper_raises_errors():
    with pytest.raises(RuntimeError):
        Uncontained().attempt("here", fail)


@pytest.mark.parametrize("binds", ["bind_gpu_block_pool", "bind_kv_cache_manager"])
def test_error_for_the_user_ends_the_start_whichever_method_vllm_calls(contain, monkeypatch, binds):
    """As for a port that is in use. From 0.32 vLLM binds the KV cache manager, and that binds the block pool."""

    def cannot_start(*_):
        raise ConfigError("endpoint_port 1 is in use")

    monkeypatch.setattr(connector_module, "BlockPool", lambda *_: None)
    monkeypatch.setattr(connector_module, "KVTierConnectorScheduler", cannot_start)
    made = KVTierConnector.__new__(KVTierConnector)
    made.containment, made._scheduler, made._options, made._link = contain, None, None, "path"
    made._info = SimpleNamespace(brings_states=False, group_ids=None, groups=[])
    with pytest.raises(ConfigError, match="in use"):
        getattr(made, binds)(SimpleNamespace(block_pool=SimpleNamespace()))

"""The random lives of ``test_store_lives``, while our functions raise at any place: all leases and loads balance, and
each load that vLLM waits for comes to an end."""

import itertools
import sys
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matcher_harness import GROUPS, no_violations  # noqa: F401
from offloader_harness import GROUPS as OFFLOADED
from offloader_harness import Engine as Offload
from scheduler_life import Connector, make  # noqa: F401
from scheduler_life import Life as EngineLife
from scheduler_life import synchronous_loads as with_sync_loads
from source_fakes import bare_identity, load_results
from support import WITHOUT_SHRINKING
from test_exports import HASH_BLOCK_SIZE, one_export
from test_store_lives import Life

import vllm_kvtier
from vllm_kvtier import containment
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.containment import Containment
from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.connector_types import WorkerReport
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.waiting_loop import WaitingLoop

OURS = str(Path(vllm_kvtier.__file__).parent)
CATCHES = str(Path(OURS, "containment.py"))


class Raiser:
    """Has one of our functions raise: the one that is called after ``count`` others."""

    def __init__(self):
        self.count, self.raised = -1, []

    def __call__(self, frame, event, arg):
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(OURS) or path == CATCHES:
            return
        self.count -= 1
        if self.count < 0:
            self.raised.append(frame.f_code.co_name)
            raise RuntimeError(f"in {frame.f_code.co_name}")

    def run(self, call):
        if self.count >= 0:
            sys.setprofile(self)
        try:
            return call()
        finally:
            sys.setprofile(None)


class Instead:
    """``real``, but for what vLLM calls through the connector."""

    def __init__(self, real, **instead):
        self.__dict__.update(instead, real=real)

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __len__(self):
        return len(self.real)


class Tables:
    """Block tables as vLLM hands them over."""

    def __init__(self, ids):
        self.get_block_ids = lambda: ids


class RaisingLife(Life):
    unsure = True

    def __init__(self, groups, seed):
        super().__init__(groups, seed)
        self.raiser, self.contain = Raiser(), Containment(Counters(), lambda: float(self.contain.errors * 100))
        self.planner.observe_load = self.planner.observe_handover = lambda *_: None
        half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
        half._matcher, half._sync_load, half._contain, half._passive = self.matcher, self.sync_load, self.contain, False
        half._info = SimpleNamespace(unsupported=None, groups=groups)
        half._offloader, half._store, half._geometry = None, self.tier, self.load.engine.geometry
        half._questions = SimpleNamespace(waiting=[])
        half._engine = SimpleNamespace(waiting_loop=WaitingLoop(), admission=Admission())
        facts = SimpleNamespace(reports_failed_requests=False, followed=lambda ids: ids)
        half._run_jobs, half._provenance = lambda: None, Provenance(None)
        half._identity = bare_identity(namespace=object())
        half._pool = SimpleNamespace(free_count=lambda: 1 << 30)
        half._exporter = SimpleNamespace(finished=lambda *_: None, drain=lambda: None)
        half._access = SimpleNamespace(closed=True)
        half._tables = SimpleNamespace(remove=lambda name: None)
        half._exports, half._events = SimpleNamespace(end_export=lambda name: False, has_freed=lambda: False), None
        half._checksum_index = SimpleNamespace(clear=lambda: None)
        half._outcomes = load_results(self.load, self.matcher, self.contain)
        made = KVTierConnector.__new__(KVTierConnector)
        made.containment, made._scheduler, made._worker, made._info = self.contain, half, None, facts
        made._marks_failures = False
        run, real = self.raiser.run, self.matcher

        def finished(request):
            run(lambda: made.request_finished_all_groups(request, ((),)))

        def on_load_ended(name, failed):
            # In production the synchronous ones are settled in the same call.
            report = WorkerReport([LoadResult(name, {1} if failed else set(), "", 1, 0.1, 0.0)])
            output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving={name})
            run(lambda: made.update_connector_output(output))

        self.matcher = Instead(
            real,
            match=lambda request, computed: run(lambda: made.get_num_new_matched_tokens(request, computed)),
            allocated=lambda request, ids, external: run(
                lambda: made.update_state_after_alloc(request, Tables(ids), external)
            ),
            prefetch_lookup=lambda request: run(lambda: made.on_new_request(request)),
            expire_prefetches=lambda: run(lambda: self.contain.attempt("lookup prefetch", real.expire_prefetches)),
            finished=finished,
            on_load_ended=on_load_ended,
        )
        apply_results = self.sync_load.apply_results
        self.sync_load = Instead(
            self.sync_load,
            apply_results=lambda name, results: run(
                lambda: self.contain.insist("apply results", lambda: apply_results(name, results))
            ),
        )

    def arm(self):
        """Somewhere in what comes next."""
        self.raiser.count = self.rng.choice([0, 1, 2, 3, 5, 8, 13, 21, 34, 55])


@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, phases=WITHOUT_SHRINKING)
def test_internal_errors_in_store_operations_balance_leases_and_loads(groups, seed):
    life = RaisingLife(GROUPS[groups], seed)
    events = {
        life.new_request: 4, life.fill_store: 4, life.schedule: 12, life.store_answers: 7, life.peer_answers: 5,
        life.load_ends: 4, life.preempt: 1.5, life.forget_cache: 1, life.finish: 2, life.store_dies: 0.3,
        life.time_passes: 0.3, life.steps: 0.6, life.tier.renew: 0.1, life.verdict: 4, life.preempt_early: 0.3,
        life.arm: 6,
    }  # fmt: skip
    try:
        for _ in range(200):
            life.rng.choices(list(events), list(events.values()))[0]()
            life.balanced()
    finally:
        life.raiser.count = -1
        life.end()
    assert life.contain.errors or not life.raiser.raised


def test_internal_error_sequences_reach_many_functions():
    raised = set()
    for seed in range(60):
        life = RaisingLife(GROUPS["full"], seed)
        events = {life.new_request: 4, life.fill_store: 4, life.schedule: 12, life.store_answers: 7, life.verdict: 4,
                  life.peer_answers: 5, life.load_ends: 4, life.finish: 2, life.arm: 8}  # fmt: skip
        try:
            for _ in range(200):
                life.rng.choices(list(events), list(events.values()))[0]()
        finally:
            life.raiser.count = -1
            life.end()
        raised.update(life.raiser.raised)
    assert len(raised) > 55, sorted(raised)


# -- under vLLM's own scheduler, with KV that is what it was computed from ---------------------------------------------


def watched(name):
    """What vLLM calls of the connector's; our functions may raise in it."""
    method = getattr(KVTierConnector, name)
    return lambda self, *args: self.raiser.run(lambda: method(self, *args))


class ContainedConnector(Connector):
    _worker, _marks_failures = None, False
    on_new_request = watched("on_new_request")
    get_num_new_matched_tokens = watched("get_num_new_matched_tokens")
    update_state_after_alloc = watched("update_state_after_alloc")
    get_external_cache_hit_sources = watched("get_external_cache_hit_sources")
    build_connector_meta = watched("build_connector_meta")
    update_connector_output = watched("update_connector_output")
    request_finished_all_groups = watched("request_finished_all_groups")
    request_finished = KVTierConnector.request_finished
    take_events = watched("take_events")
    has_pending_block_frees = watched("has_pending_block_frees")
    get_kv_connector_stats = watched("get_kv_connector_stats")


class RaisingEngine(EngineLife):
    def __init__(self, make, seed, **options):  # noqa: F811
        self.contain = Containment(Counters(), lambda: float(self.contain.errors * 100))
        super().__init__(make, seed, self.contain, **options)
        half, connector = self.half, self.scheduler.connector
        half._access, half._pool = SimpleNamespace(closed=True), SimpleNamespace(free_count=lambda: 1 << 30)
        half._exporter.finished = lambda *_: None
        half._tables.remove = half._tables.clear = lambda *_: None
        half._exports.end_export = lambda name: None
        half._info.reports_failed_requests = half._info.kv_events_enabled = False
        connector.__class__ = ContainedConnector
        connector._scheduler, connector._info, connector.containment = half, half._info, self.contain
        connector.counters, connector.raiser = self.contain._counters, Raiser()
        self.raiser = connector.raiser

    def arm(self):
        self.raiser.count = self.rng.choice([0, 1, 2, 3, 5, 8, 13, 21, 34, 55])


@with_sync_loads
@pytest.mark.parametrize("budget", [16, 1024])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_internal_errors_under_vllm_scheduler_keep_all_tokens_correct(make, asynchronous, budget):  # noqa: F811
    raised, failed = set(), 0
    for seed in range(40):
        life = RaisingEngine(make, seed, asynchronous=asynchronous, priority=False, budget=budget)
        events = {life.new: 3, life.store_answers: 4, life.step: 12, life.abort: 0.3, life.reset: 0.3, life.arm: 4}
        for _ in range(250):
            life.rng.choices(list(events), list(events.values()))[0]()
        life.raiser.count = -1
        life.end()
        raised.update(life.raiser.raised)
        failed += life.contain.errors
    assert len(raised) > 60 and failed > 100, (failed, sorted(raised))


class DisabledEngine(RaisingEngine):
    """Too many errors disable the connector, also between a load's offer and its blocks: vLLM (0.32 on) asks then which
    groups it fills."""

    def __init__(self, make, seed, limit, **options):  # noqa: F811
        super().__init__(make, seed, **options)
        half, filled_groups = self.half, self.half.filled_groups
        self.contain._clock, self.contain.recent = lambda: 0.0, deque(maxlen=limit + 1)
        self.contain.on_limit = half._become_passive
        half._access.refuse, half._info.group_ids = lambda reason: None, None
        half._geometry = self.world.load.engine.geometry

        def raises_at_times(name):
            if self.rng.random() < 0.1:
                raise RuntimeError("in filled_groups")
            return filled_groups(name)

        half.filled_groups = raises_at_times


@with_sync_loads
@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_connector_disabled_at_any_error_keeps_all_tokens_correct(make, asynchronous, limit, monkeypatch):  # noqa: F811
    monkeypatch.setattr(containment, "MAX_ERRORS", limit)
    monkeypatch.setattr(
        ContainedConnector, "get_loaded_kv_cache_group_ids", watched("get_loaded_kv_cache_group_ids"), raising=False
    )
    disabled = 0
    for seed in range(20):
        life = DisabledEngine(make, seed, limit, asynchronous=asynchronous, priority=False, budget=1024)
        events = {life.new: 3, life.store_answers: 4, life.step: 12, life.abort: 0.3, life.reset: 0.3, life.arm: 0.3}
        for _ in range(120):
            life.rng.choices(list(events), list(events.values()))[0]()
        life.raiser.count = -1
        life.end()
        disabled += life.half._passive
    assert disabled > 4


# -- offloading --------------------------------------------------------------------------------------------------------


class RaisingOffload(Offload):
    """What is copied is still what its hash says, and every pin is given back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.contain, self.raiser = Containment(Counters(), lambda: float(self.contain.errors * 100)), Raiser()
        attempt, run, tables, offloader = self.contain.attempt, self.raiser.run, self.tables, self.offloader
        self.tables = Instead(
            tables,
            begin_step=lambda *args: run(lambda: attempt("", tables.begin_step, *args, repair=tables.clear)) or [],
        )

        def watched(name, again=False):
            method = getattr(offloader, name)

            def call(*args, **kwargs):
                bound = partial(method, *args, **kwargs)
                return run(lambda: attempt("", bound, repair=bound if again else None))

            return call

        parts = {name: watched(name) for name in ("begin_step", "finished", "drain", "cancel_for_requests")}
        self.offloader = Instead(offloader, **parts, cancel_all=watched("cancel_all", again=True))

    def arm(self):
        self.raiser.count = self.rng.choice([0, 1, 2, 3, 5, 8, 13, 21])


@pytest.mark.parametrize("groups", sorted(OFFLOADED))
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_internal_errors_while_offloading_release_all_blocks(groups, seed, share):
    engine = RaisingOffload(OFFLOADED[groups], seed, 1, share=share)
    events = {
        engine.step: 8, engine.new_request: 2, engine.finish: 1.2, engine.preempt: 0.7, engine.reactor.run: 6,
        engine.store_answers: 6, engine.store_forgets: 0.5, engine.store_restarts: 0.5, engine.worker_acts: 12,
        lambda: engine.offloader.cancel_for_requests(engine.rng.randint(1, 9)): 0.5,
        lambda: engine.offloader.cancel_all(0): 0.1,
        engine.arm: 5,
    }  # fmt: skip
    for _ in range(300):
        engine.rng.choices(list(events), list(events.values()))[0]()
        engine.bounds()
    engine.raiser.count = -1
    engine.end()


def test_exports_are_counted_right_after_an_error_in_any_function():
    raiser, numbers = Raiser(), set()
    for count in itertools.count():
        table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 20))
        for n in range(1, 4):
            table.add(one_export(str(n), [n] * (6 * HASH_BLOCK_SIZE), 10 * n))
        cached = Export("", LeaseKind.STRETCH, 4, (), b"", b"", [GroupBlocks(HASH_BLOCK_SIZE, [60])], [60], -1, 1e9)
        lease = table.lease_cached(cached, 0, "x", 5.0, False)
        turn = one_export("turn", [3] * (12 * HASH_BLOCK_SIZE), 100)
        raiser.count = count
        with suppress(RuntimeError):
            raiser.run(lambda: (table.add(turn), table.release(lease.id, "x", True)))  # noqa: B023
        here, counts = list(table._exports.values()), table.counts()
        numbers.add(len(here))
        assert counts["retained_blocks"] == len({i for export in here for i in export.pinned})
        assert counts["stretch_blocks"] == counts["leases"] == len(cached.pinned)
        table.clear()
        table.release(lease.id, "x", True)
        assert not any(table.counts().values()) and not table._by_hash
        if raiser.count >= 0:
            break
    assert numbers == {3, 2, 1}

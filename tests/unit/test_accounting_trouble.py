"""What must not be counted wrongly, or cost an engine or a person more than a wrong number: odd peers, odd answers."""

import io
import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import msgspec
import pytest
from cache_groups import cache_groups
from doctor_fakes import NAMESPACE, FakeEngine
from metrics_harness import vllm_config
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from pull_fakes import Pair, batch_of, pull_of
from rich.console import Console
from source_fakes import load_context, load_results, make_matcher, source_of
from support import make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.cli.inspect import show
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.doctor.engines import endpoint as doctor_endpoint
from vllm_kvtier.doctor.engines.checks import look_at
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe, NoEndpoint
from vllm_kvtier.doctor.engines.server import Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import ABORTED, FetchResult, LoadResult
from vllm_kvtier.scheduler.admin.admin_requests import AdminRequests
from vllm_kvtier.scheduler.admin.explain import MAX_SPANS, spans_in_tokens
from vllm_kvtier.scheduler.leases.lease_client import REFUSAL_CODES, LeaseClient, PendingLease, _Connection
from vllm_kvtier.scheduler.leases.lease_server import SERVE_AFTER_REFUSAL_SECONDS
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_state import LoadUnderWay, RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.planner.load_planner import LoadDecision
from vllm_kvtier.scheduler.sources.base import Candidate, LookupHit, LookupMiss
from vllm_kvtier.shapes.read_paths import Reach
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.adapters import Adapters
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.nixl_pull import pulls as pulls_module

# -- what is counted ---------------------------------------------------------------------------------------------------


class World:
    """The real RequestMatcher and LoadResults, with one request of 100 tokens and no source."""

    def __init__(self, life: State, **state):
        RequestLifecycle.violations = 0
        peers = SimpleNamespace(
            release=lambda *_: None, cancel=lambda *_: None, drop=lambda *_: None, readable=lambda _: None,
            ask=lambda address, _, rehash=None, **ask: PendingLease(
                address, m.LeaseRequest(1, "", **ask), time.monotonic() + 2),
        )  # fmt: skip
        self.counters = Counters()
        load = load_context([(16, None)], 16, peers, counters=self.counters)
        self.matcher = make_matcher(load)
        self.request = make_request("r", list(range(100)), 16)
        self.t = self.matcher._tracked["r"] = RequestState(self.request, read(None), RequestLifecycle("r"), **state)
        self.t.life.state = life
        self.outcomes = load_results(load, self.matcher)


def test_tokens_loaded_by_another_connector_are_not_counted():
    """MultiConnector tells each of its connectors of every request that ended loading."""
    world = World(State.LOCAL)
    world.outcomes.arrived([], {"r"})
    assert world.t.life.state is State.LOCAL and RequestLifecycle.violations == 0 and world.counters.take() == {}


def test_load_result_without_job_is_counted_and_ignored():
    world = World(State.LOCAL)
    world.outcomes.arrived([LoadResult("r", set(), "", 10, 0.1, 0.0)], {"r"})
    assert RequestLifecycle.violations == 1
    RequestLifecycle.violations = 0


def test_preempted_request_second_hit_is_timed_from_preemption():
    world = World(State.LOADED, begun_at=1.0, promoted_tokens=64, counted=True)
    began = time.monotonic()
    world.matcher._notice_preemption(world.t)
    assert world.t.life.state is State.NEW and world.t.begun_at >= began and world.t.promoted_tokens == 0


@pytest.mark.parametrize("reason, outcome", [(ABORTED, "aborted"), ("the load did not end within 5 s", "failed")])
def test_load_that_fails_its_request_is_not_counted_as_aborted(reason, outcome):
    """With kv_load_failure_policy "fail" vLLM ends the request before it tells what became of the load."""
    world = World(State.LOADING)
    world.t.life.state = State.ABANDONED
    world.outcomes._on_result(LoadResult("r", {3}, reason, 0, 0.1, 0.0), False)
    assert world.outcomes._ended["r"].outcome == outcome


@pytest.mark.parametrize("status, counted", [("FINISHED_LENGTH_CAPPED", True), ("FINISHED_ABORTED", False)])
def test_one_token_request_with_sync_load_is_counted(status, counted):
    """As every prefill for another engine does: vLLM ends it before it tells what became of the load."""
    world = World(State.VERIFYING, num_computed_tokens=16, num_external_tokens=80, synchronous=True)
    world.t.hit = LookupHit(source_of(world.matcher, "retained"), "other/1", 1, 0, 96, [[1]])
    world.request.status = RequestStatus[status]
    world.matcher.finished(world.request)
    world.matcher.on_load_ended("r", failed=False)
    parts = {"local_cache_hit": 16, "retained": 80, "local_compute": 4}
    expected = {"hits|retained": 1} | {f"prompt_tokens|{kind}": tokens for kind, tokens in parts.items()}
    assert world.counters.take() == (expected if counted else {}) and not len(world.matcher)


def test_promotion_wait_without_hit_is_counted():
    world = World(State.LOOKUP, waits_since=time.monotonic() - 1.0, candidates=deque())
    store = SimpleNamespace(name="host", retry_lookup=lambda t, result: None, release_export=lambda t: None)
    world.t.candidate = Candidate(store)
    world.t.pending = SimpleNamespace(source=store, poll=lambda: LookupMiss("store_unavailable", "it went away"))
    assert world.matcher._source_selector.answered(world.t)
    counted = world.counters.take()
    assert counted.keys() == {"lookups_declined|store_unavailable", "promotion_wait_seconds"}
    assert 1 <= counted["promotion_wait_seconds"][0] < 2


def test_lookup_after_wait_is_timed():
    world = World(State.NEW, waits_since=time.monotonic() - 1.0)
    world.t.candidates = deque([Candidate(source_of(world.matcher, "retained"), ("there", 1))])
    assert world.matcher._source_selector.ask_next(world.t, 0, True)
    world.t.pending.answer.outcome = LookupMiss("no_matching_blocks", "")
    assert world.matcher._source_selector.answered(world.t)
    assert world.counters.take().keys() == {"lookups_declined|no_matching_blocks", "lookup_seconds|retained"}


def test_refusal_code_of_peer_outside_the_table_becomes_refused():
    """Whoever listens at an address that a client named says what it likes."""
    reactor = SimpleNamespace(on_stop=lambda _: None, call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
    dealer = SimpleNamespace(close=lambda: None)
    peers = LeaseClient(reactor, KVTierConfig(), None, lambda: None, lambda ranks: Reach(frozenset()))
    seen = set()
    for ask in (0, 1):
        for code in ("peer_restarted", "a word of its own", "another", *REFUSAL_CODES):
            connection = _Connection(("there", 1), dealer)
            peers._connections[connection.address] = connection
            connection.asked[1] = pending = PendingLease(
                connection.address, m.LeaseRequest(1, "", 0, []), 0.0, again=True
            )
            pending.timer = SimpleNamespace(cancel=lambda: None)
            peers._receive(connection, [m.encode(m.LeaseRefused(ask, code, "because"))])
            assert pending.outcome.reason == "because"
            seen.add(pending.outcome.code)
    assert seen == REFUSAL_CODES | {"refused"}


def test_prometheus_invalid_value_is_logged_and_skipped(caplog):
    """vLLM calls this in the task that reads all of its engines' outputs."""
    registry = CollectorRegistry()
    types = {
        sort: lambda *given, _sort=sort, **more: _sort(*given, registry=registry, **more)
        for sort in (Counter, Gauge, Histogram)
    }
    metrics = KVTierPromMetrics(vllm_config(), types, ["engine"], {0: ["0"]})
    metrics.observe({"loads|ok": -1, "loads|failed": 2})
    assert registry.get_sample_value("vllm:kvtier_loads_total", {"engine": "0", "kind": "failed"}) == 2
    assert "metric loads could not be updated" in caplog.text


def test_stats_of_gauges_only_log_no_line():
    """vLLM 0.25 would write one with nothing in it, every ten seconds in which only tokens were generated."""
    counters = Counters()
    counters.show("planner_bandwidth", "host", 1e9)
    taken = counters.take()
    assert not KVTierStats(data=taken).is_empty(), "they go to the server"
    logged = build(taken)
    assert logged.is_empty() and not logged.aggregate(build({"prompt_tokens|local_compute": 7})).is_empty()


# -- promised reads ----------------------------------------------------------------------------------------------------


def test_lease_server_serves_longer_than_early_reads_are_repeated():
    """Unserved, a read hangs until its time limit, and ends the agent that reads."""
    assert SERVE_AFTER_REFUSAL_SECONDS > 1 + 2 * sum(pulls_module.REREAD_SECONDS)


def test_partial_block_beyond_limit_is_not_read_again(monkeypatch):
    """What is wrong is known by then, and the rest is right."""
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    pair = Pair()
    pair.there.compute_checksums([batch_of([3])], None)
    order = pair.order(pull_of([5, 6], [3, 4]), timeout=0.5)
    order.promised = True
    result = pair.run(order, 9)
    assert pair.pulls.active and pair.pulls.all_waiting, "no polling is needed"
    now.now += pulls_module.REREAD_SECONDS[0]
    assert not pair.pulls.all_waiting
    for _ in range(20):
        assert result is None or now.now < 100.5
        if result is not None:
            break
        now.now += 0.05
        result = pair.goes_on(9)
    assert result.bad_blocks == {6} and result.checksum_mismatch


# -- questions ---------------------------------------------------------------------------------------------------------


def test_admin_requests_that_continue_run_one_per_step():
    questions, woken = AdminRequests.__new__(AdminRequests), []
    questions.waiting, questions._wake = deque(), lambda: woken.append(1)

    def again() -> None:
        assert len(woken) < 10
        questions._on_engine(again)

    questions._on_engine(again)
    questions.run()
    assert len(woken) == 2, "and the thread is woken for the next one"


def test_block_spans_are_bounded_by_the_message():
    spans = [[sm.Span(1, "memory" if i % 2 else "") for i in range(sm.MAX_SPANS)] for _ in range(3)]
    told = spans_in_tokens(spans, cache_groups([(4, None), (4, None), (4, 64)]), 4 * sm.MAX_SPANS)
    assert len(told) == MAX_SPANS and told[0] == m.ExplainedSpan(0, 0, 4, "")


def test_adapters_added_during_lookup_by_name_are_tolerated():
    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            adapters._known[f"new {len(adapters._known)}",] = SimpleNamespace(digest=b"2", path="")
            return str.__eq__(self, other)

    adapters = Adapters()
    adapters._known |= {
        (Name("a"),): SimpleNamespace(digest=b"1", path="path"), (Name("b"),): SimpleNamespace(digest=b"3", path="")
    }  # fmt: skip
    found = adapters.named("a")
    assert found is not None and found[1] == b"1" and found[0].lora_path == "path"


# -- doctor and inspect ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["[fd00::1]:7200", "[/red]:7200", "[bold]:1"])
def test_inspect_shows_address_with_brackets_unchanged(name):
    console = Console(width=120, record=True, file=io.StringIO())
    found = m.Explanation(1, 100, 16, peers=[m.Source(name, 64)], tiers=[m.Source("[/x]", 3, "ready")])
    show("here:1", found, console)
    text = console.export_text()
    assert f"peer {name}" in text and "with [/x]" in text


@pytest.mark.parametrize("number", ["sixteen", "-5", "9" * 5000, "٣"])
def test_doctor_identity_without_number_is_unknown(number):
    """Of a release that compares a number in the namespace."""
    name = "tensor_parallel"
    reason = f"{doctor_endpoint.field_label(name)} differs: {doctor_endpoint._NO_NUMBER} here, {number} there"
    probe = msgspec.structs.replace(NAMESPACE, **{name: doctor_endpoint._NO_NUMBER})
    assert doctor_endpoint._learned(probe, reason) is None
    assert doctor_endpoint._learned(probe, reason.replace(number, "32")) == {name: 32}


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100000,
    ],
)
def test_server_without_http_raises(said):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(KVTierError):
                Server(f"127.0.0.1:{listener.getsockname()[1]}", 5.0).version()
        finally:
            thread.join()


def test_doctor_older_engine_is_not_reported_as_hung(monkeypatch):
    def description(self):
        raise NoEndpoint("other version", "it runs an older vllm-kvtier")

    monkeypatch.setattr(EndpointProbe, "description", description)
    engine = FakeEngine()
    try:
        [check] = look_at("", engine.address, None).checks
    finally:
        engine.stop()
    assert check.state == "warn" and "older" in check.message and "scheduler" not in check.message
    assert "same vllm-kvtier" in check.fix


@pytest.mark.parametrize(
    "seconds, fenced, reason, observed",
    [
        (60.5, 0.0, "the load did not end within 60 s", [60.5]),
        (60.5, 20.0, "the load did not end within 60 s", [40.5]),
        (61.0, 0.0, ABORTED, []),
        (5.0, 0.0, "the connection broke", []),
    ],
)
def test_planner_learns_from_a_load_that_was_stopped_at_its_time_limit(seconds, fenced, reason, observed):
    plan, load = LoadDecision(True, 0.01, 0.1, "faster", 7), LoadUnderWay("host", 100, None)
    world, told = World(State.LOADING, plan=plan, under_way=load), []
    world.t.hit = LookupHit(source_of(world.matcher, "peer_gpu"), "b/1", 5, 0, 96, [[1]], nbytes=10)
    if reason == ABORTED:
        world.t.life.state = State.ABANDONED
    world.outcomes._planner = SimpleNamespace(observe_timeout=lambda *args: told.append(args))
    world.matcher._planner = SimpleNamespace(ended=lambda *_: None)
    world.outcomes.arrived([LoadResult("r", {1}, reason, 10, seconds, 0.0, fenced=fenced)], {"r"})
    assert told == [("host", 100, 7, each) for each in observed]


@pytest.mark.parametrize("among, synchronous, counted", [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_planner_learns_delay_by_other_steps_from_waiting_loads(among, synchronous, counted):
    now, told = time.monotonic(), []
    world = World(
        State.LOADING, plan=LoadDecision(True, 0.01, 0.1, "faster"), others_running=among,
        synchronous=synchronous,
        begun_at=now - 0.06, hit_at=now - 0.05, allocated_at=now - 0.05,
    )  # fmt: skip
    world.t.hit = LookupHit(source_of(world.matcher, "peer_gpu"), "b/1", 5, 0, 96, [[1]], nbytes=10, same_layout=False)
    world.outcomes._planner = SimpleNamespace(observe_load=lambda *_: None, observe_handover=told.append)
    world.outcomes.arrived([FetchResult("r", set(), False, "", 10, 0.02)], {"r"})
    assert world.t.life.state is State.LOADED and len(told) == counted
    assert all(0.03 <= seconds < 60 for seconds in told), "from the end of the load"

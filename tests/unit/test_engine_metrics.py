"""What engines count: from the event to vLLM's log line and its Prometheus endpoint, of all steps, ranks, engines."""

import ast
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from metrics_harness import vllm_config
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from source_fakes import load_context, load_results, make_matcher, source_of
from support import Clock, make_request

from vllm_kvtier.codecs import choice
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.jobs.results import LoadResult, PullResult
from vllm_kvtier.scheduler import connector_scheduler
from vllm_kvtier.scheduler.admin.gauges import REFRESH_SECONDS, Gauges
from vllm_kvtier.scheduler.leases import lease_client
from vllm_kvtier.scheduler.leases.exports import Refusal
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_state import LoadUnderWay, RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.offload import store_jobs
from vllm_kvtier.scheduler.planner import load_planner
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.sources.base import LookupHit
from vllm_kvtier.store.server import metrics as store_metrics
from vllm_kvtier.telemetry.stats import BEFOREHAND, GAUGES, HISTOGRAMS, KINDS, MEANINGS, OLD_NAMES, Counters, merge
from vllm_kvtier.vllm_compat import stats as stats_module
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build

SOURCES = Path(__file__).parents[2] / "vllm_kvtier"


def shipped(counters: Counters) -> dict:
    """As vLLM sends a step's stats from the engine's process to the server's."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(counters.take()))


@pytest.fixture
def prom(request):
    """(metrics of two engines, value of a sample). Indirect parameter: vLLM's show_hidden_metrics."""
    registry = CollectorRegistry()
    types = {
        sort: lambda *given, _sort=sort, **more: _sort(*given, registry=registry, **more)
        for sort in (Counter, Gauge, Histogram)
    }
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    config = vllm_config(getattr(request, "param", False))
    metrics = KVTierPromMetrics(config, types, ["model_name", "engine"], labels)

    def value(name: str, kind: str = "", engine: int = 0, **more: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine), "kind": kind, **more}
        return registry.get_sample_value(f"vllm:kvtier_{name}", labels)

    return metrics, value


# -- counting, merging, showing ----------------------------------------------------------------------------------------


def test_undeclared_counter_raises():
    counters = Counters()
    for count in (counters.count, lambda name: counters.observe(name, "", 1), lambda name: counters.show(name, "", 1)):
        with pytest.raises(KeyError, match="not a declared"):
            count("no such thing")
    assert counters.take() == {}
    names = [*MEANINGS, *HISTOGRAMS, *GAUGES]
    assert len(set(names)) == len(names) and KINDS.keys() | BEFOREHAND <= set(names)
    assert not BEFOREHAND & GAUGES.keys(), "a gauge without a value is not 0"


def test_metrics_of_several_steps_are_merged():
    counters, total = Counters(), {}
    counters.count("loads", "ok")
    counters.observe("load_seconds", "ok", 0.5)
    counters.show("leases", "granted", 3)
    first = shipped(counters)
    counters.count("loads", "ok", 2)
    counters.observe("load_seconds", "ok", 0.25)
    counters.show("leases", "granted", 1)
    second = shipped(counters)
    assert shipped(counters) == {}
    merge(total, first)
    merge(total, second)
    assert total == {"loads|ok": 3, "load_seconds|ok": [0.5, 0.25], "leases|granted": 1}


def test_log_and_prometheus_aggregate_separately():
    """vLLM gives both the same dictionary, one after the other."""
    step = {"load_seconds|ok": [0.5], "loads|ok": 1}
    logged = KVTierConnector.build_kv_connector_stats(step)
    logged.aggregate(KVTierConnector.build_kv_connector_stats({"load_seconds|ok": [0.25], "loads|ok": 1}))
    assert step == {"load_seconds|ok": [0.5], "loads|ok": 1}
    assert logged.data == {"load_seconds|ok": [0.5, 0.25], "loads|ok": 2}


def test_prometheus_metrics_are_separate_per_engine(prom):
    metrics, value = prom
    metrics.observe({"load_seconds|ok": [0.003, 0.03, 40.0], "loads|ok": 3, "leases|granted": 4}, 0)
    metrics.observe({"load_seconds|ok": [0.003], "leases|granted": 2}, 1)
    metrics.observe({"leases|granted": 0}, 0)
    assert value("load_seconds_count", "ok") == 3 and value("load_seconds_sum", "ok") == pytest.approx(40.033)
    buckets = [value("load_seconds_bucket", "ok", le=le) for le in ("0.002", "0.005", "0.05", "30.0", "+Inf")]
    assert buckets == [0, 1, 2, 2, 3]
    assert (value("load_seconds_count", "ok", 1), value("loads_total", "ok"), value("loads_total", "ok", 1)) == (
        1,
        3,
        0,
    )
    assert (value("leases", "granted"), value("leases", "granted", 1)) == (0, 2)


def test_prometheus_failure_counters_start_at_zero(prom):
    _, value = prom
    failures = value("integrity_failures_total", "host"), value("loads_total", "failed")
    assert (*failures, value("store_disconnects_total")) == (0, 0, 0)
    assert value("lookups_declined_total", "timeout") is None, "reasons have no series before their first sample"


def test_unknown_counters_of_newer_engine_are_ignored(prom):
    metrics, value = prom
    metrics.observe({"spins|": 3, "loads|ok": 1, "turns|fast": [0.5]})
    assert value("loads_total", "ok") == 1


def test_stats_log_line_is_reduced():
    assert build({}).is_empty() and build({}).reduce() == {}
    counters = Counters()
    for source, tokens in (("local_compute", 120), ("local_cache_hit", 64), ("host", 256)):
        counters.count("prompt_tokens", source, tokens)
    counters.count("loaded_bytes", "int8", 3e9)
    counters.count("stored_bytes", "int8", 5e6)
    for seconds in (0.5, 0.25, 0.75):
        counters.observe("load_seconds", "ok", seconds)
    counters.observe("load_time_ratio", "host", 1.5)
    counters.show("leases", "granted", 7)
    line = KVTierStats(data=shipped(counters)).reduce()
    assert line == {
        "local_compute_tokens": 120, "local_cache_hit_tokens": 64, "host_tokens": 256, "load_GB/s": 2.0,
        "load_p50_ms": 500.0, "load_max_ms": 750.0, "stored_MB": 5.0, "load_time_ratio": 1.5,
    }  # fmt: skip
    counters.count("loads", "failed")
    counters.count("integrity_failures", "host", 2)
    assert KVTierStats(data=shipped(counters)).reduce() == {"loads_failed": 1, "integrity_failures": 2}


@pytest.mark.parametrize("prom", [False, True], indirect=True)
def test_prometheus_old_series_exist_only_with_hidden_metrics(prom, request):
    metrics, value = prom
    hidden = request.node.callspec.params["prom"]
    metrics.observe({"lookups_declined|timeout": 2, "lookup_seconds|host": [0.5], "store_registered_bytes": 7})
    assert value("lookups_declined_total", "timeout") == 2 and value("store_registered_bytes") == 7
    old = value("declined_total", "timeout"), value("ask_seconds_sum", "host"), value("store_usable_bytes")  # old name
    assert old == ((2, 0.5, 7) if hidden else (None, None, None))


def test_old_metric_names_are_unique_and_unused():
    names = {*MEANINGS, *HISTOGRAMS, *GAUGES}
    assert OLD_NAMES.keys() <= names and not names & set(OLD_NAMES.values())
    assert len(set(OLD_NAMES.values())) == len(OLD_NAMES)


def test_metric_label_values_are_snake_case():
    values = {kind for kinds in KINDS.values() for kind in kinds} | set(store_metrics.STATES)
    shown = [*store_metrics.INDEX.values(), *store_metrics.EXTRA.values()]
    values |= {value for each in shown for value in each.labels.values()}
    assert [value for value in values if not re.fullmatch(r"[a-z][a-z0-9_]*", value)] == []


COUNTED = {"count", "observe", "show"}  # (name, kind)
# {function: position of the reason}. ``_refuse``: of source_selector; of lease_server, whose codes are constants below.
MISSED = {"missed": 1, "decline_lookup": 1, "_refuse": 1, "LookupMiss": 0}


def literals(node: ast.AST) -> Iterator[str]:
    """The strings that an expression may be, as far as they are in it."""
    if isinstance(node, ast.IfExp):
        yield from (*literals(node.body), *literals(node.orelse))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_metric_labels_in_code_are_in_the_table():
    seen = set()
    for path in (SOURCES / "scheduler").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            function, given = getattr(call.func, "attr", getattr(call.func, "id", "")), call.args
            if function in COUNTED and len(given) > 1 and isinstance(given[0], ast.Constant):
                names, kinds = [given[0].value], literals(given[1])
            elif function in MISSED and len(given) > MISSED[function]:
                names, kinds = ["misses", "lookups_declined"], literals(given[MISSED[function]])
            else:
                continue
            for kind, name in itertools.product(list(kinds), names):
                if name in KINDS:
                    seen.add((name, kind))
                    assert kind in KINDS[name], f"{path.name}: {name} {kind}"
    assert {("hits", "local_cache_hit"), ("load_decision_seconds", "actual"), ("misses", "not_in_store")} <= seen


def test_metric_label_constants_are_in_the_table():
    assert {refusal.value for refusal in Refusal} | set(lease_client.REFUSAL_CODES) <= set(KINDS["lookups_declined"])
    assert {*load_planner.REASONS, "policy_always"} == set(KINDS["load_decisions"])
    constants = {value for name, value in vars(store_jobs).items() if name.isupper() and isinstance(value, str)}
    assert {value for value in constants | set(store_jobs._REFUSALS.values()) if value} <= set(KINDS["stores_skipped"])


def test_codec_names_are_joined_for_labels():
    raw, int8 = (SimpleNamespace(name=name) for name in ("raw", "int8"))
    assert choice.names([int8, raw, int8]) == "int8+raw" and choice.names([]) == "raw"
    assert choice.names(["int8"]) == "int8" and choice.names([{"full": "int4", "mla": "fp8"}]) == "fp8+int4"


# -- ranks -------------------------------------------------------------------------------------------------------------


def outcomes():
    """(what ranks report to of a load that is under way, its counters)."""
    tracked = SimpleNamespace(life=SimpleNamespace(state=State.LOADING), hit=None)
    matcher = SimpleNamespace(get=lambda name: tracked, on_load_ended=lambda name, failed: None)
    counters = Counters()
    return load_results(load_context([(16, None)], 16, counters=counters), matcher, codec="int8"), counters


def result(seconds=0.1, nbytes=10, bad=(), corrupt=()):
    return LoadResult("r", set(bad), "no" if bad else "", nbytes, seconds, 0.0, list(corrupt))


def test_load_of_several_ranks_counts_once_with_slowest():
    """In whatever steps their reports arrive."""
    heard, counters = outcomes()
    heard.arrived([result(0.1), result(0.4)], ())
    assert counters.take() == {"loaded_bytes|int8": 20}
    heard.arrived([result(0.2)], {"r"})
    assert counters.take() == {"loaded_bytes|int8": 10, "loads|ok": 1, "load_seconds|ok": [0.4]}
    heard.arrived([], {"r"})
    assert counters.take() == {}


def test_load_with_one_failed_rank_counts_as_failed():
    heard, counters = outcomes()
    heard.arrived([result(), result(0.3, bad=[4], corrupt=[(0, 16)]), result()], {"r"})
    counts = counters.take()
    assert counts["loads|failed"] == 1 and "loads|ok" not in counts and counts["load_seconds|failed"] == [0.3]
    assert counts["integrity_failures|host"] == 1


def test_corrupt_block_is_counted_once_whatever_ranks_have_a_part_of_it():
    heard, counters = outcomes()
    heard.arrived([result(bad=[4], corrupt=[(0, 16)]), result(bad=[4, 5], corrupt=[(0, 16), (0, 32)])], ())
    pulls = [PullResult("p", {1, 2}, True, "wrong", 0, 0.1, checksum_mismatch=True) for _ in range(2)]
    heard.arrived(pulls, ())
    counts = counters.take()
    assert (counts["integrity_failures|host"], counts["integrity_failures|engine"]) == (2, 2)


@pytest.mark.parametrize("prompts", [False, True])
def test_load_time_for_planner_excludes_wait_for_steps(prompts):
    """0.3 of its 0.4 s the blocks were another request's. And a request that computes waits for a step with prompts
    too."""
    plan = SimpleNamespace(load_seconds=0.05, queued_bytes=7)
    source = SimpleNamespace(
        cost_key="host", stage_metric="host_hit_seconds", on_loaded=lambda t: None, on_result=lambda t, r: None
    )
    hit = SimpleNamespace(source=source)
    life = SimpleNamespace(state=State.LOADING)
    now = time.monotonic()
    tracked = SimpleNamespace(taken_hit=hit,
        life=life,
        hit=hit,
        plan=plan,
        under_way=LoadUnderWay("host", 1000, None),
        num_external_tokens=16,
        others_running=True,
        synchronous=False,
        allocated_at=now - 0.5,
        begun_at=now - 1.0,
        hit_at=now - 0.6,
    )
    matcher = SimpleNamespace(get=lambda name: tracked, on_load_ended=lambda name, failed: None)
    seen = []
    planner = SimpleNamespace(
        observe_load=lambda *numbers: seen.append(numbers), observe_handover=lambda seconds: seen.append(seconds)
    )
    load = load_context([(16, None)], 16, planner=planner)
    heard = load_results(load, matcher, prompts_since=lambda moment: prompts and moment < now)
    heard.arrived([LoadResult("r", set(), "", 10, 0.4, 0.0, fenced=0.3)], {"r"})
    [*_, seconds] = seen[0]
    assert seen[0][:3] == ("host", 1000, 7) and seconds == pytest.approx(0.1)
    assert len(seen) == 1 if prompts else 0.09 < seen[1] < 5.0


@pytest.mark.parametrize("life", [State.LOCAL, State.LOADED, None], ids=str)
def test_late_load_result_of_gone_request_leaves_no_state(matcher, life):
    """Nor does it count for the load that the request begins next."""
    heard = load_results(load_context([(16, None)], 16, counters=matcher.counters), matcher.matcher)
    t = tracked(matcher, life=life) if life is not None else None
    heard.arrived([result(9.0, bad=[4])], ())
    assert not heard._ended and matcher.counters.take() == {"loaded_bytes|raw": 10}
    if t is not None:
        t.life.state = State.LOADING
        heard.arrived([result(0.1)], ())
        assert heard._ended["r"].outcome == "ok" and heard._ended["r"].seconds == 0.1


# -- where prompts come from -------------------------------------------------------------------------------------------


@pytest.fixture
def matcher():
    """The real RequestMatcher, without sources."""
    peers = SimpleNamespace(release=lambda *_: None, cancel=lambda *_: None, drop=lambda *_: None)
    counters = Counters()
    made = make_matcher(load_context([(16, None)], 16, peers, counters=counters))
    return SimpleNamespace(matcher=made, counters=counters)


def tracked(matcher, **state) -> RequestState:
    """A request of 100 tokens that has been matched."""
    request = make_request("r", list(range(100)), 16)
    matcher.matcher._tracked["r"] = made = RequestState(request, read(None), RequestLifecycle("r"))
    made.life.state = state.pop("life", State.LOCAL)
    for name, value in state.items():
        setattr(made, name, value)
    return made


def retained(matcher):
    return LookupHit(source_of(matcher.matcher, "retained"), "other/1", 1, 0, 96, [[1]])


@pytest.mark.parametrize(
    "state, counted",
    [
        (
            {"num_computed_tokens": 0, "miss_reason": "not_in_store"},
            {"misses|not_in_store": 1, "prompt_tokens|local_compute": 100},
        ),
        ({"num_computed_tokens": 0}, {"misses|no_source": 1, "prompt_tokens|local_compute": 100}),
        (
            {"num_computed_tokens": 64, "miss_reason": "not_in_store"},
            {"hits|local_cache_hit": 1, "prompt_tokens|local_cache_hit": 64, "prompt_tokens|local_compute": 36},
        ),
    ],
)
def test_computed_request_is_counted_once(matcher, state, counted):
    t = tracked(matcher, **state)
    for _ in range(3):  # vLLM allocates again after a preemption
        matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == counted


def test_pulled_request_is_counted_by_source(matcher):
    t = tracked(matcher, num_computed_tokens=16, num_external_tokens=80, hit=retained(matcher), life=State.LOADING)
    matcher.matcher.on_load_ended("r", failed=False)
    counts = matcher.counters.take()
    assert counts == {
        "hits|retained": 1, "prompt_tokens|local_cache_hit": 16, "prompt_tokens|retained": 80,
        "prompt_tokens|local_compute": 4,
    }  # fmt: skip
    matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == {}


def test_failed_pull_is_counted_as_computed(matcher):
    t = tracked(matcher, num_computed_tokens=0, num_external_tokens=80, hit=retained(matcher), life=State.LOADING)
    matcher.matcher.on_load_ended("r", failed=True)
    assert matcher.counters.take() == {}, "vLLM has not given it blocks to compute in"
    matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == {"misses|load_failed_retained": 1, "prompt_tokens|local_compute": 100}


# -- gauges ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gauges():
    clock, counters, planner = Clock(), Counters(), LoadPlanner({"host": 1e9, "peer_gpu": 4e9})
    states = [State.LOOKUP, State.LOADING, State.VERIFYING, State.LOADED, State.LOCAL]

    class Requests:
        def __len__(self):
            return len(states)

        def states(self):
            return iter(states)

    held = {"leases": 2, "handoff_blocks": 5, "retained_blocks": 6, "peer_fetch_blocks": 7, "stretch_blocks": 8}
    exports = SimpleNamespace(counts=lambda: dict(held))
    tier, offloader = SimpleNamespace(limit=lambda: 100), SimpleNamespace(pinned=9)
    peers = SimpleNamespace(held_leases=lambda: 3)
    load = load_context([(16, None)], 16, peers, counters=counters, planner=planner)
    made = Gauges(load, Requests(), exports, tier, offloader, clock)
    return SimpleNamespace(
        refresh=made.refresh, take=counters.take, clock=clock, states=states, planner=planner, held=held
    )


def test_gauges_show_current_state(gauges):
    gauges.planner.started("host", 1000)
    gauges.refresh()
    shown = gauges.take()
    assert {name: shown[f"requests|{name}"] for name in KINDS["requests"]} == {
        "lookup": 1, "leased": 0, "loading": 2, "computing": 2,
    }  # fmt: skip
    assert (shown["leases|granted"], shown["leases|held"]) == (2, 3)
    assert (shown["store_inflight_blocks"], shown["store_up"]) == (9, 1)
    assert shown["store_registered_bytes"] > 0
    assert [shown[f"exported_blocks|{kind}"] for kind in KINDS["exported_blocks"]] == [5, 6, 7, 8]
    assert shown["loading_bytes|host"] == 1000 and shown["loading_bytes|peer_gpu"] == 0
    assert shown["planner_bandwidth|peer_gpu"] == pytest.approx(4e9) and shown["planner_error|step"] == 0
    assert {key.partition("|")[0] for key in shown} == GAUGES.keys()


def test_gauges_refresh_once_a_second_and_send_changes(gauges):
    gauges.refresh()
    gauges.take()
    gauges.held["leases"] = 0
    for _ in range(100):
        gauges.refresh()
    assert gauges.take() == {}
    gauges.clock.now += REFRESH_SECONDS
    gauges.refresh()
    assert gauges.take() == {"leases|granted": 0}, "and only what changed"


def test_gauges_are_refreshed_after_last_request(gauges):
    """The engine makes no step after it."""
    gauges.refresh()
    gauges.take()
    gauges.held["leases"] = 0
    gauges.states.clear()
    gauges.planner.observe_load("host", 10**9, 0, 0.1)
    gauges.planner.observe_load("host", 10**9, 0, 0.1)
    gauges.refresh()
    shown = gauges.take()
    assert shown["leases|granted"] == 0 and shown["requests|loading"] == 0
    assert "planner_bandwidth|host" not in shown, "estimates take most of the time, and wait for their second"
    gauges.clock.now += REFRESH_SECONDS
    gauges.refresh()
    assert gauges.take()["planner_bandwidth|host"] > 1e9


def test_stats_malformed_data_is_logged_once_and_skipped(caplog):
    """vLLM's task that reads the engines' outputs would end, and the server with it."""
    stats_module._log_unreadable.cache_clear()
    for _ in range(2):
        assert build({"load_seconds|ok": "nonsense"}).reduce() == {}
    assert caplog.text.count("the log line could not be computed") == 1


def test_connector_scheduler_reports_counts_at_intervals_and_after_the_last_request(monkeypatch):
    clock, requests = Clock(), ["r"]
    monkeypatch.setattr(connector_scheduler, "time", SimpleNamespace(monotonic=clock))
    side = connector_scheduler.KVTierConnectorScheduler.__new__(connector_scheduler.KVTierConnectorScheduler)
    side._sync_load = SimpleNamespace(verification_pending=False)
    side._step_timer = side._tables = SimpleNamespace(end_step=lambda: None)
    side._matcher, side._info, side._report_at = requests, SimpleNamespace(unsupported="in this test"), 0.0
    clock.now = 1.0
    assert side.end_step() and not side.end_step()
    clock.now += connector_scheduler.REPORT_SECONDS / 2
    assert not side.end_step()
    clock.now += connector_scheduler.REPORT_SECONDS
    assert side.end_step() and not side.end_step()
    requests.clear()
    assert side.end_step(), "its counts must not wait for another request"

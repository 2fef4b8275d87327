"""What engines count: from the event to vLLM's log line and its Prometheus endpoint, of all steps, ranks, engines."""

import ast
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from support import Clock, Uncontained, make_request

from vllm_kvtier.codecs import choice
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler.gauges import SECONDS, Gauges
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.offers import Offer
from vllm_kvtier.scheduler.outcomes import Outcomes
from vllm_kvtier.scheduler.params import read
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import BEFOREHAND, GAUGES, HISTOGRAMS, KINDS, MEANINGS, Counters, merge
from vllm_kvtier.vllm_compat import stats as stats_module
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build
from vllm_kvtier.worker.queues import LoadResult

SOURCES = Path(__file__).parents[2] / "vllm_kvtier"


def shipped(counters: Counters) -> dict:
    """As vLLM sends a step's stats from the engine's process to the server's."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(counters.take()))


@pytest.fixture
def prom():
    """(metrics of two engines, value of a sample)."""
    registry = CollectorRegistry()
    types = {
        sort: lambda *given, _sort=sort, **more: _sort(*given, registry=registry, **more)
        for sort in (Counter, Gauge, Histogram)
    }
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KVTierPromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})

    def value(name: str, kind: str = "", engine: int = 0, **more: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine), "kind": kind, **more}
        return registry.get_sample_value(f"vllm:kvtier_{name}", labels)

    return metrics, value


# -- counting, merging, showing ----------------------------------------------------------------------------------------


def test_only_what_is_declared_can_be_counted():
    counters = Counters()
    for count in (counters.count, lambda name: counters.observe(name, "", 1), lambda name: counters.show(name, "", 1)):
        with pytest.raises(KeyError, match="not a declared"):
            count("no such thing")
    assert counters.take() == {}
    names = [*MEANINGS, *HISTOGRAMS, *GAUGES]
    assert len(set(names)) == len(names) and KINDS.keys() | BEFOREHAND <= set(names)
    assert not BEFOREHAND & GAUGES.keys(), "a gauge that nobody has looked at is not 0"


def test_steps_are_merged():
    counters, total = Counters(), {}
    counters.count("loads", "ok")
    counters.observe("load_seconds", "ok", 0.5)
    counters.show("leases", "given", 3)
    first = shipped(counters)
    counters.count("loads", "ok", 2)
    counters.observe("load_seconds", "ok", 0.25)
    counters.show("leases", "given", 1)
    second = shipped(counters)
    assert shipped(counters) == {}
    merge(total, first)
    merge(total, second)
    assert total == {"loads|ok": 3, "load_seconds|ok": [0.5, 0.25], "leases|given": 1}


def test_what_the_logger_adds_up_is_not_what_prometheus_gets():
    """vLLM gives both the same dictionary, one after the other."""
    step = {"load_seconds|ok": [0.5], "loads|ok": 1}
    logged = KVTierConnector.build_kv_connector_stats(step)
    logged.aggregate(KVTierConnector.build_kv_connector_stats({"load_seconds|ok": [0.25], "loads|ok": 1}))
    assert step == {"load_seconds|ok": [0.5], "loads|ok": 1}
    assert logged.data == {"load_seconds|ok": [0.5, 0.25], "loads|ok": 2}


def test_histograms_counters_and_gauges_of_two_engines(prom):
    metrics, value = prom
    metrics.observe({"load_seconds|ok": [0.003, 0.03, 40.0], "loads|ok": 3, "leases|given": 4}, 0)
    metrics.observe({"load_seconds|ok": [0.003], "leases|given": 2}, 1)
    metrics.observe({"leases|given": 0}, 0)
    assert value("load_seconds_count", "ok") == 3 and value("load_seconds_sum", "ok") == pytest.approx(40.033)
    buckets = [value("load_seconds_bucket", "ok", le=le) for le in ("0.002", "0.005", "0.05", "30.0", "+Inf")]
    assert buckets == [0, 1, 2, 2, 3]
    assert (value("load_seconds_count", "ok", 1), value("loads_total", "ok"), value("loads_total", "ok", 1)) == (
        1,
        3,
        0,
    )
    assert (value("leases", "given"), value("leases", "given", 1)) == (0, 2)


def test_a_first_failure_is_an_increase(prom):
    _, value = prom
    assert value("integrity_failures_total", "host") == value("loads_total", "failed") == value("store_lost_total") == 0
    assert value("declined_total", "timeout") is None, "nobody knows all reasons"


def test_what_a_younger_engine_counts_does_no_harm(prom):
    metrics, value = prom
    metrics.observe({"spins|": 3, "loads|ok": 1, "turns|fast": [0.5]})
    assert value("loads_total", "ok") == 1


def test_the_log_line_is_short():
    assert build({}).is_empty() and build({}).reduce() == {}
    counters = Counters()
    for source, tokens in (("computed", 120), ("own cache", 64), ("host", 256)):
        counters.count("prompt_tokens", source, tokens)
    counters.count("loaded_bytes", "int8", 3e9)
    counters.count("stored_bytes", "int8", 5e6)
    for seconds in (0.5, 0.25, 0.75):
        counters.observe("load_seconds", "ok", seconds)
    counters.observe("planned_ratio", "host", 1.5)
    counters.show("leases", "given", 7)
    line = KVTierStats(data=shipped(counters)).reduce()
    assert line == {
        "computed_tokens": 120, "own_cache_tokens": 64, "host_tokens": 256, "load_GB/s": 2.0, "load_p50_ms": 500.0,
        "load_max_ms": 750.0, "stored_MB": 5.0, "taken/expected": 1.5,
    }  # fmt: skip
    counters.count("loads", "failed")
    counters.count("integrity_failures", "host", 2)
    assert KVTierStats(data=shipped(counters)).reduce() == {"loads_failed": 1, "integrity_failures": 2}


def test_labels_in_the_code_are_those_of_the_table():
    """Whoever counts a kind that KINDS does not have would make a sample that no panel and no page knows."""
    seen = set()
    for path in SOURCES.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or len(call.args) < 2:
                continue
            if not all(isinstance(given, ast.Constant) for given in call.args[:2]):
                continue
            if getattr(call.func, "attr", getattr(call.func, "id", "")) not in ("count", "observe", "show"):
                continue
            name, kind = (given.value for given in call.args[:2])
            if name in KINDS:
                seen.add(name)
                assert kind in KINDS[name], f"{path.name}: {name} {kind}"
    assert seen == {"hits", "planned_seconds", "weighed_seconds", "integrity_failures"}, (
        "all others are given their kind from elsewhere"
    )


def test_codecs_in_a_word():
    raw, int8 = (SimpleNamespace(name=name) for name in ("raw", "int8"))
    assert choice.names([int8, raw, int8]) == "int8+raw" and choice.names([]) == "raw"
    assert choice.names(["int8"]) == "int8" and choice.names([{"full": "int4", "mla": "fp8"}]) == "fp8+int4"


# -- ranks -------------------------------------------------------------------------------------------------------------


def outcomes():
    """(what ranks report to of a load that is under way, its counters)."""
    tracked = SimpleNamespace(life=SimpleNamespace(state=State.LOADING), offer=None)
    matcher = SimpleNamespace(get=lambda name: tracked, loaded=lambda name, failed: None, discard=lambda *_: None)
    hurry = SimpleNamespace(judged=lambda results: set(), settle=lambda name, results: None)
    counters = Counters()
    return Outcomes(matcher, hurry, Planner({"host": 1e9}), counters, Uncontained(), lambda kind: "int8"), counters


def result(seconds=0.1, nbytes=10, bad=(), corrupt=()):
    return LoadResult("r", set(bad), "no" if bad else "", nbytes, seconds, 0.0, list(corrupt))


def test_a_load_of_several_ranks_counts_once_with_the_slowest():
    """In whatever steps their reports arrive."""
    heard, counters = outcomes()
    heard.arrived([result(0.1), result(0.4)], ())
    assert counters.take() == {"loaded_bytes|int8": 20}
    heard.arrived([result(0.2)], {"r"})
    assert counters.take() == {"loaded_bytes|int8": 10, "loads|ok": 1, "load_seconds|ok": [0.4]}
    heard.arrived([], {"r"})
    assert counters.take() == {}


def test_one_rank_that_fails_fails_the_load():
    heard, counters = outcomes()
    heard.arrived([result(), result(0.3, bad=[4], corrupt=[(0, 16)]), result()], {"r"})
    counts = counters.take()
    assert counts["loads|failed"] == 1 and "loads|ok" not in counts and counts["load_seconds|failed"] == [0.3]
    assert counts["integrity_failures|host"] == 1


@pytest.mark.parametrize("prompts", [False, True])
def test_a_load_that_waited_for_steps_teaches_the_planner_the_link_and_not_the_steps(prompts):
    """0.3 of its 0.4 s the blocks were another request's. And whoever computes waits for a step with prompts too."""
    plan = SimpleNamespace(load_seconds=0.05, queued_bytes=7)
    offer = SimpleNamespace(place="host", nbytes=1000)
    life = SimpleNamespace(state=State.LOADING)
    now = time.monotonic()
    tracked = SimpleNamespace(
        life=life, offer=offer, plan=plan, source="host", pulled=16, among=True, hurried=False, ordered_at=now - 0.5,
        begun_at=now - 1.0, offered_at=now - 0.6,
    )
    matcher = SimpleNamespace(get=lambda name: tracked, loaded=lambda name, failed: None, discard=lambda *_: None)
    hurry = SimpleNamespace(judged=lambda results: set(), settle=lambda name, results: None)
    seen = []
    planner = SimpleNamespace(
        observe_load=lambda *numbers: seen.append(numbers), observe_handover=lambda seconds: seen.append(seconds)
    )
    heard = Outcomes(
        matcher, hurry, planner, Counters(), Uncontained(), prompts_since=lambda moment: prompts and moment < now
    )
    heard.arrived([LoadResult("r", set(), "", 10, 0.4, 0.0, fenced=0.3)], {"r"})
    [*_, seconds] = seen[0]
    assert seen[0][:3] == ("host", 1000, 7) and seconds == pytest.approx(0.1)
    assert len(seen) == 1 if prompts else 0.09 < seen[1] < 5.0


@pytest.mark.parametrize("life", [State.LOCAL, State.LOADED, None], ids=str)
def test_a_verdict_that_comes_after_it_was_given_up_leaves_nothing_behind(matcher, life):
    """Nor does it count for the load that the request begins next."""
    hurry = SimpleNamespace(judged=lambda results: set(), settle=lambda name, results: None)
    heard = Outcomes(matcher.matcher, hurry, None, matcher.counters, Uncontained())
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
    """The real Matcher, without anybody to ask."""
    from vllm_kvtier.config import KVTierConfig
    from vllm_kvtier.scheduler.ledger import Keys, Ledger
    from vllm_kvtier.scheduler.matching import Matcher

    peers = SimpleNamespace(release=lambda *_: None, cancel=lambda *_: None, drop=lambda *_: None)
    counters = Counters()
    made = Matcher(KVTierConfig(), peers, Ledger([16]), lambda: Keys(3), [(16, None)], 16, lambda: ("me", 9), counters)
    return SimpleNamespace(matcher=made, counters=counters)


def tracked(matcher, **state) -> Tracked:
    """A request of 100 tokens that has been matched."""
    request = make_request("r", list(range(100)), 16)
    matcher.matcher._tracked["r"] = made = Tracked(request, read(None), Lifecycle("r"))
    made.life.state = state.pop("life", State.LOCAL)
    for name, value in state.items():
        setattr(made, name, value)
    return made


OFFER = Offer(("there", 1), "other/1", 1, 0, 96, [[1]], [])


@pytest.mark.parametrize(
    "state, counted",
    [
        ({"local": 0, "missed": "not stored"}, {"misses|not stored": 1, "prompt_tokens|computed": 100}),
        ({"local": 0}, {"misses|nobody to ask": 1, "prompt_tokens|computed": 100}),
        (
            {"local": 64, "missed": "not stored"},
            {"hits|own cache": 1, "prompt_tokens|own cache": 64, "prompt_tokens|computed": 36},
        ),
    ],
)
def test_a_request_that_is_computed_counts_once(matcher, state, counted):
    t = tracked(matcher, **state)
    for _ in range(3):  # vLLM allocates again after a preemption
        matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == counted


def test_a_request_whose_pull_ended_counts_where_it_came_from(matcher):
    t = tracked(matcher, local=16, pulled=80, offer=OFFER, life=State.LOADING)
    matcher.matcher.loaded("r", failed=False)
    counts = matcher.counters.take()
    assert counts == {
        "hits|retained": 1, "prompt_tokens|own cache": 16, "prompt_tokens|retained": 80, "prompt_tokens|computed": 4,
    }  # fmt: skip
    matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == {}


def test_a_request_whose_pull_failed_is_computed(matcher):
    t = tracked(matcher, local=0, pulled=80, offer=OFFER, life=State.LOADING)
    matcher.matcher.loaded("r", failed=True)
    assert matcher.counters.take() == {}, "vLLM has not given it blocks to compute in"
    matcher.matcher.allocated(t.request, ([1],), 0)
    assert matcher.counters.take() == {"misses|retained failed": 1, "prompt_tokens|computed": 100}


# -- gauges ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gauges():
    clock, counters, planner = Clock(), Counters(), Planner({"host": 1e9, "gpu": 4e9})
    states = [State.ASKING, State.LOADING, State.VERIFYING, State.LOADED, State.LOCAL]

    class Requests:
        def __len__(self):
            return len(states)

        def states(self):
            return iter(states)

    held = {"leases": 2, "handoff_blocks": 5, "retained_blocks": 6, "lent_blocks": 7}
    exports = SimpleNamespace(counts=lambda: dict(held))
    tier, offloader = SimpleNamespace(limit=lambda: 100), SimpleNamespace(pinned=9)
    peers = SimpleNamespace(held_leases=lambda: 3)
    made = Gauges(counters, Requests(), planner, exports, peers, tier, offloader, clock)
    return SimpleNamespace(
        refresh=made.refresh, take=counters.take, clock=clock, states=states, planner=planner, held=held
    )


def test_gauges_say_what_is_so(gauges):
    gauges.planner.started("host", 1000)
    gauges.refresh()
    shown = gauges.take()
    assert {name: shown[f"requests|{name}"] for name in KINDS["requests"]} == {
        "asking": 1, "offered": 0, "loading": 2, "computing": 2,
    }  # fmt: skip
    assert (shown["leases|given"], shown["leases|taken"], shown["storing_blocks"], shown["store_up"]) == (2, 3, 9, 1)
    assert shown["store_usable_bytes"] > 0
    assert [shown[f"exported_blocks|{kind}"] for kind in KINDS["exported_blocks"]] == [5, 6, 7]
    assert shown["loading_bytes|host"] == 1000 and shown["loading_bytes|gpu"] == 0
    assert shown["planner_bandwidth|gpu"] == pytest.approx(4e9) and shown["planner_error|step"] == 0
    assert {key.partition("|")[0] for key in shown} == GAUGES.keys()


def test_gauges_cost_a_step_nothing_but_once_a_second(gauges):
    gauges.refresh()
    gauges.take()
    gauges.held["leases"] = 0
    for _ in range(100):
        gauges.refresh()
    assert gauges.take() == {}
    gauges.clock.now += SECONDS
    gauges.refresh()
    assert gauges.take() == {"leases|given": 0}, "and only what changed"


def test_the_last_request_leaves_them_right(gauges):
    """The engine makes no step after it."""
    gauges.refresh()
    gauges.take()
    gauges.held["leases"] = 0
    gauges.states.clear()
    gauges.refresh()
    shown = gauges.take()
    assert shown["leases|given"] == 0 and shown["requests|loading"] == 0


def test_stats_nonsense_in_them_ends_no_log_line(caplog, monkeypatch):
    """vLLM's task that reads the engines' outputs would end, and the server with it."""
    monkeypatch.setattr(stats_module, "_said_unreadable", False)
    for _ in range(2):
        assert build({"load_seconds|ok": "nonsense"}).reduce() == {}
    assert caplog.text.count("cannot be summed up") == 1

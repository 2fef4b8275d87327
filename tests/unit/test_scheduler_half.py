"""The scheduler half's counters of what the workers report."""

from types import SimpleNamespace

import pytest
from support import Uncontained

from vllm_kvtier.scheduler.half import SchedulerHalf
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.outcomes import Outcomes
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.types import hit_sources
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.queues import LoadResult


@pytest.fixture
def half():
    half = SchedulerHalf.__new__(SchedulerHalf)
    half.counters, half._sharing = Counters(), None
    half._contain, half._passive, half._refused = Uncontained(), False, None
    half._hurry = SimpleNamespace(judged=lambda results: set(), settle=lambda name, results: None)
    half.ended = []
    half._matcher = SimpleNamespace(
        get=lambda name: SimpleNamespace(life=SimpleNamespace(state=State[name]), offer=None),
        discard=lambda name, corrupt: None,
        loaded=lambda name, failed: half.ended.append((name, failed)),
        nearby=SimpleNamespace(
            cannot_map=lambda instance, alike: half.unmapped.append((instance, alike)),
            failed=lambda instance: half.wrong.append(instance),
        ),
    )
    half.unmapped, half.wrong = [], []
    half._outcomes = Outcomes(half._matcher, half._hurry, None, half.counters, Uncontained())
    return half


@pytest.mark.parametrize(
    "state, corrupt, outcome",
    [("LOADING", [], "failed"), ("ABANDONED", [], "aborted"), ("ABANDONED", [(0, 5)], "failed")],
)
def test_a_load_that_was_stopped_is_no_failure(half, state, corrupt, outcome):
    """Unless it had found something wrong before."""
    half.arrived([LoadResult(state, {1, 2}, "the request was aborted", 10, 0.1, 0.0, corrupt)], {state})
    counted = half.counters.take()
    assert [kind for kind in counted if kind.startswith("loads")] == [f"loads|{outcome}"]
    assert counted.get("integrity_failures|host", 0) == len(corrupt)
    assert half.ended == [(state, True)]


def test_what_a_load_found_right_counts_also_if_nobody_waits_any_more(half):
    half._matcher.get = lambda name: None  # gone
    half.arrived([LoadResult("r", set(), "", 10, 0.1, 0.0)], {"r"})
    assert half.counters.take()["loads|ok"] == 1 and half.ended == [("r", False)]


def test_a_pull_that_failed_failed_whoever_waited(half):
    half.arrived([PullResult("ABANDONED", {1}, True, "timeout", 0, 0.1)], {"ABANDONED"})
    assert half.counters.take()["pulls|failed"] == 1 and half.ended == [("ABANDONED", True)]


def test_a_source_that_cannot_be_mapped_is_remembered(half):
    offer = SimpleNamespace(instance="near/1", alike=True)
    half._matcher.get = lambda name: SimpleNamespace(life=SimpleNamespace(state=State.LOADING), offer=offer)
    half.arrived([FetchResult("r", {1, 2}, True, "no", 0, 0.1, unmappable="another pid namespace")], {"r"})
    assert half.unmapped == [("near/1", True)] and half.ended == [("r", True)]
    assert half.counters.take()["fetches|failed"] == 1
    half.arrived([FetchResult("r", {1}, True, "wrong", 5, 0.1, checksum=True)], {"r"})
    assert len(half.unmapped) == 1 and half.counters.take()["integrity_failures|gpu"] == 1 and half.wrong == ["near/1"]


@pytest.mark.parametrize(
    "source, risen, below, sources",
    [
        ("host", 0, ("disk",), {"host": 96}),
        ("host", 64, ("disk",), {"host": 32, "disk": 64}),
        ("host", 200, ("disk",), {"disk": 96}),
        ("host", 64, ("nodes",), {"host": 32, "p2p": 64}),
        ("host", 64, ("disk", "object"), {"host": 32, "external_unspecified": 64}),
        ("gpu", 64, ("disk",), {"p2p": 96}),
        ("handoff", 0, (), {"p2p": 96}),
    ],
)
def test_vllm_is_told_where_hits_came_from(half, source, risen, below, sources):
    """In the words of its own metrics; they add up to what was asked about."""
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM asks for it since 0.32")
    half._matcher.get = lambda name: SimpleNamespace(source=source, risen=risen)
    half._tier = HostTier.__new__(HostTier)
    half._tier._client = SimpleNamespace(tiers=below)
    told = hit_sources(half.sources("r", 96))
    assert {each.value: count for each, count in told.items()} == sources and hit_sources(half.sources("r", 0)) == {}
    half._tier = None  # other nodes' stores, asked by the engine itself, are peers too
    assert [each.value for each in hit_sources(half.sources("r", 96))] == ["p2p"]


@pytest.mark.parametrize("late", [False, True], ids=["namespace first", "workers first"])
@pytest.mark.parametrize("theirs", ["int8", "raw"])
def test_pulls_are_off_where_the_processes_disagree_about_the_codec(late, theirs):
    """A quality record that is written while the engine starts makes "auto" mean two things."""
    opened, closed = [], []
    half = SchedulerHalf.__new__(SchedulerHalf)
    half._tier, half._described, half._ranks, half._summed, half._wire_codecs = None, {}, {}, {}, {}
    half._sharing = half._refused = None
    half._facts = SimpleNamespace(world_size=2, engine_id="engine")
    half._reactor = SimpleNamespace(call_soon=lambda job: job())
    half._endpoint = SimpleNamespace(open=lambda *_: opened.append(1), close=closed.append, host="here", port=1)
    half.instance, half._namespace, half._wire_codec = "engine/1", None, "raw"

    def settle():
        half._namespace, half._wire_codec = object(), "int8"
        half._open_if_ready()

    registers = [m.Register(SimpleNamespace(rank=rank), codec) for rank, codec in enumerate(("int8", theirs))]
    if not late:
        settle()
    for register in registers:
        half._heard(register)
    if late:
        settle()
    assert bool(opened) == (theirs == "int8")
    assert bool(half._refused) == bool(closed) == (theirs != "int8")


@pytest.mark.parametrize("shared", [(True, True), (True, False)])
def test_only_engines_whose_memory_can_be_read_are_known_to_the_node(shared):
    """With host buffers or a wire codec nobody can; then they hold nothing that others would ask for."""
    half = SchedulerHalf.__new__(SchedulerHalf)
    half._tier, half._described, half._ranks, half._summed, half._wire_codecs = None, {}, {}, {}, {}
    half._facts = SimpleNamespace(world_size=2, engine_id="engine")
    half._endpoint, half._refused = SimpleNamespace(open=lambda *_: None, host="here", port=1), None
    half.instance, half._namespace, half._wire_codec, known = "engine/1", object(), "raw", []
    half._sharing = SimpleNamespace(opened=known.append)
    for rank, can in enumerate(shared):
        half._heard(m.Register(SimpleNamespace(rank=rank, shared=object() if can else None), "raw"))
    assert known == ([("here", 1)] if all(shared) else [])

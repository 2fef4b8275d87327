"""The contract of a source: a sixth one is a file and a line in a list."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from source_fakes import all_sources, load_context, load_results
from support import make_request
from vllm.v1.request import RequestStatus

from vllm_kvtier.jobs.results import FetchResult, LoadResult, PullResult
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle, State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import Candidate, KVSource, LookupHit, LookupMiss, PendingLookup
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource

HASH_BLOCK_SIZE = 4
GROUPS = [(HASH_BLOCK_SIZE, None)]
SCHEDULER = Path(__file__).parents[2] / "vllm_kvtier" / "scheduler"


class Answer:
    """What a client would return: an outcome that comes later."""

    deadline, outcome = float("inf"), None

    def wait(self, seconds):
        pass


class ShelfSource(KVSource):
    """Blocks on a shelf, which answers when the test says so."""

    name = cost_key = "shelf"
    stage_metric = "host_hit_seconds"

    def __init__(self, load):
        self._geometry, self._keys = load.engine.geometry, load.engine.identity.content_keys
        self.answers, self.cancelled, self.released, self.loaded, self.failed = [], [], [], [], []

    def candidates(self, request):
        return [Candidate(self)]

    def lookup(self, request, candidate, need):
        if need.tokens < HASH_BLOCK_SIZE:
            request.miss_reason = "less_than_one_block"
            return None
        self.answers.append(Answer())
        return PendingLookup(self, self.answers[-1], need.start, request.request.num_tokens)

    def read_answer(self, pending):
        slots = pending.answer.outcome
        if not slots:
            return LookupMiss("not_in_store", "the shelf is empty")
        end = pending.start + len(slots) * HASH_BLOCK_SIZE
        return LookupHit(self, "shelf 1", len(self.answers), pending.start, end, [slots], nbytes=100 * len(slots))

    def fits(self, request, hit):
        return hit.tokens <= request.pending.max_tokens

    def build_job(self, request, block_ids, tokens):
        return job_builder.load_job(request, self._geometry, self._keys(), block_ids, tokens, 60.0)

    def on_loaded(self, request):
        self.loaded.append(request.num_external_tokens)

    def on_load_failed(self, request, result):
        self.failed.append(result.corrupt)

    def cancel(self, pending):
        self.cancelled.append(pending)

    def release(self, hit, consumed):
        self.released.append(hit.lease)


@pytest.fixture
def world():
    RequestLifecycle.violations = 0
    load = load_context(GROUPS, HASH_BLOCK_SIZE)
    shelf = ShelfSource(load)
    matcher = RequestMatcher(load, [*all_sources(load), shelf])
    made = SimpleNamespace(load=load, shelf=shelf, matcher=matcher, results=load_results(load, matcher))
    made.request = make_request("r", list(range(18)), HASH_BLOCK_SIZE)
    yield made
    made.request.status = RequestStatus.FINISHED_ABORTED
    matcher.finished(made.request)
    assert not len(matcher) and RequestLifecycle.violations == 0
    assert load.planner.report().get("shelf_queued_bytes", 0) == 0


def allocate(world):
    """The request is offered 16 tokens, and vLLM gives it blocks."""
    assert world.matcher.match(world.request, 0) == (None, False)
    world.shelf.answers[-1].outcome = [7, 8, 9, 10]
    assert world.matcher.match(world.request, 0) == (16, True)
    world.matcher.allocated(world.request, ([21, 22, 23, 24, 25],), 16)
    [job], _ = world.matcher.take_jobs()
    assert job.groups[0].blocks.tolist() == [21, 22, 23, 24] and job.groups[0].slots.tolist() == [7, 8, 9, 10]


def test_sixth_source_is_matched_allocated_loaded_and_released(world):
    allocate(world)
    assert world.load.planner.loading("shelf") and not world.shelf.released
    world.results.arrived([LoadResult("r", set(), "", 400, 0.01, 0.0)], {"r"})
    assert world.matcher.get("r").life.state is State.LOADED
    assert (world.shelf.loaded, world.shelf.released, world.shelf.failed) == ([16], [1], [])
    counts = world.load.engine.counters.take()
    assert counts["hits|shelf"] == 1 and counts["prompt_tokens|shelf"] == 16 and counts["loads|ok"] == 1
    assert world.matcher.get("r").report()["pulled_from"] == "shelf"


def test_sixth_source_load_with_bad_checksum_is_recomputed(world):
    allocate(world)
    world.results.arrived([LoadResult("r", {22}, "wrong", 400, 0.01, 0.0, [(0, 8)])], {"r"})
    assert world.matcher.get("r").life.state is State.LOCAL
    assert (world.shelf.loaded, world.shelf.released, world.shelf.failed) == ([], [1], [[(0, 8)]])


def test_sixth_source_load_is_planned_and_measured_by_what_vllm_lacks(world, monkeypatch):
    """Its prefix cache got half of the hit, which another request loaded, after the lookup was sent."""
    planner, decided, measured = world.load.planner, [], []
    decide = planner.decide
    monkeypatch.setattr(planner, "decide", lambda *args: decided.append(args) or decide(*args))
    monkeypatch.setattr(planner, "observe_load", lambda *args: measured.append(args))
    assert world.matcher.match(world.request, 0) == (None, False)
    world.shelf.answers[-1].outcome = [7, 8, 9, 10]  # 400 bytes
    assert world.matcher.match(world.request, 8) == (8, True)
    world.matcher.allocated(world.request, ([21, 22, 23, 24, 25],), 8)
    assert planner.report()["shelf_queued_bytes"] == 200
    world.results.arrived([LoadResult("r", set(), "", 200, 0.01, 0.0)], {"r"})
    assert [args[:4] for args in decided] == [("shelf", 8, 16, 200)] and measured == [("shelf", 200, 0, 0.01)]


@pytest.mark.parametrize("slots, reason", [([], "not_in_store"), ([5] * 9, "malformed")])
def test_sixth_source_unusable_answer_is_recomputed(world, slots, reason):
    world.matcher.match(world.request, 0)
    world.shelf.answers[-1].outcome = slots
    assert world.matcher.match(world.request, 0) == (0, False)
    assert world.matcher.get("r").miss_reason == reason and world.shelf.released == [1] * bool(slots)


@pytest.mark.parametrize("answered", [False, True])
def test_sixth_source_abort_releases_lease(world, answered):
    world.matcher.match(world.request, 0)
    if answered:
        world.shelf.answers[-1].outcome = [7, 8, 9, 10]
        world.matcher.match(world.request, 0)
    world.request.status = RequestStatus.FINISHED_ABORTED
    world.matcher.finished(world.request)
    assert (len(world.shelf.cancelled), world.shelf.released) == ((0, [1]) if answered else (1, []))


def test_late_result_of_other_source_is_ignored(world):
    """Its request has a hit of this source by now."""
    hit = SimpleNamespace(instance="innocent", mapped=True, session=1)
    request = SimpleNamespace(hit=hit, taken_hit=hit)
    fetched = FetchResult("r", {1}, True, "wrong", 0, 0.1, checksum_mismatch=True)
    NodeStoreSource.on_load_failed(SimpleNamespace(), request, fetched)  # whatever it used would raise
    peers = PeerGpuSource(world.load)
    peers.on_load_failed(request, LoadResult("r", {1}, "wrong", 0, 0.1, 0.0, [(0, 4)]))
    assert not peers._backoff_until
    peers.on_load_failed(request, fetched)
    assert list(peers._backoff_until) == ["innocent"]
    handoffs = PrefillHandoffSource(world.load)
    handoffs._lease_client = SimpleNamespace()  # whatever it used of it would raise
    handoffs.on_load_failed(request, PullResult("r", {1}, True, "no", 0, 0.1, unreadable=True))
    hit.mapped = False
    handoffs.on_load_failed(request, LoadResult("r", {1}, "wrong", 0, 0.1, 0.0, [(0, 4)]))
    handoffs.on_load_failed(request, fetched)


def test_lease_client_hears_whether_nixl_can_read_an_engine(world):
    source, calls = PrefillHandoffSource(world.load), []
    source._lease_client = SimpleNamespace(
        unreadable=lambda instance: calls.append(("no", instance)), readable=lambda instance: calls.append(instance)
    )
    hit = SimpleNamespace(instance="a/1", mapped=False)
    state = SimpleNamespace(hit=hit, taken_hit=hit, num_external_tokens=16, unreadable="")
    source.on_load_failed(state, PullResult("r", {1}, True, "wrong", 0, 0.1, checksum_mismatch=True))
    assert calls == ["a/1"], "wrong bytes came: NIXL reads it"
    source.on_load_failed(state, PullResult("r", {1}, True, "no", 0, 0.1))
    assert calls == ["a/1"]
    source.on_load_failed(state, PullResult("r", {1}, True, "no", 0, 0.1, unreadable=True))
    source.on_load_failed(state, PullResult("r", {1}, True, "wrong", 0, 0.1, checksum_mismatch=True))
    assert calls == ["a/1", ("no", "a/1")], "wrong bytes came to one rank, but none to another"
    source.on_loaded(state)
    assert calls == ["a/1", ("no", "a/1"), "a/1"]


def test_sixth_source_with_holds_hit_keeps_lease_until_beaten(world):
    """With ``holds_hit`` a hit is kept until another one beats it, or no candidate is left."""
    upper = ShelfSource(world.load)
    upper.holds_hit = True
    world.matcher = RequestMatcher(world.load, [upper, world.shelf])
    assert world.matcher.match(world.request, 0) == (None, False)
    upper.answers[0].outcome = [7, 8, 9, 10]
    assert world.matcher.match(world.request, 0) == (None, False), "the other shelf is asked for more"
    world.shelf.answers[0].outcome = [5, 6, 7, 8]
    assert world.matcher.match(world.request, 0) == (16, True)
    assert world.matcher.get("r").hit.source is upper and world.shelf.released == [1] and not upper.released
    world.matcher.finished(world.request)
    assert upper.released == [1]


# -- the matching loop -------------------------------------------------------------------------------------------------

LOOP = [
    "matching/request_matcher.py", "matching/source_selector.py", "matching/request_state.py",
    "matching/lookup_prefetch.py", "planner/load_or_recompute.py", "integrity/load_results.py",
    "integrity/sync_load.py", "connector_scheduler.py",
]  # fmt: skip
SOURCES = PrefillHandoffSource, NodeStoreSource, PeerGpuSource, RetainedBlocksSource
LABELS = {label for source in SOURCES for label in (source.name, source.cost_key)} - {""}


def kind_checks(tree: ast.AST) -> list[str]:
    """Code that asks for the class or kind of a thing."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type"):
            found.append(f"line {node.lineno}: {node.func.id}")
        if isinstance(node, ast.Compare):
            compared = {each.value for side in (node.left, *node.comparators) for each in ast.walk(side)
                        if isinstance(each, ast.Constant) and isinstance(each.value, str)}  # fmt: skip
            found += [f"line {node.lineno}: compares with {label!r}" for label in compared & LABELS]
        if isinstance(node, ast.Attribute) and node.attr in ("handoff", "puller_index"):
            found.append(f"line {node.lineno}: .{node.attr}")
    return found


def test_source_kind_checks_are_detected():
    tree = ast.parse("if isinstance(hit, A) or t.source_name == 'host' or t.hints.handoff:\n    pass")
    assert len(kind_checks(tree)) == 3


@pytest.mark.parametrize("path", [*LOOP, "wiring.py"])
def test_matching_loop_has_no_source_kind_checks(path):
    assert kind_checks(ast.parse((SCHEDULER / path).read_text("utf-8"))) == []


@pytest.mark.parametrize("path", LOOP)
def test_matching_loop_imports_no_source(path):
    tree = ast.parse((SCHEDULER / path).read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    taken = {module.rpartition(".")[2] for module in modules if module.startswith("vllm_kvtier.scheduler.sources.")}
    assert taken <= {"base", "job_builder"}

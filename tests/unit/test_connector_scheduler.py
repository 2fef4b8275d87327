"""The scheduler side's counters of what the workers report."""

from types import SimpleNamespace

import pytest
from cache_groups import cache_groups, mamba
from source_fakes import bare_identity, load_context, load_results
from support import Uncontained
from vllm.v1.request import RequestStatus

from vllm_kvtier.cache_kinds import InFlight
from vllm_kvtier.jobs.results import FetchResult, LoadResult, PullResult
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.context import BlockGeometry
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.peer_access import PeerAccess
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.connector_types import hit_sources
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.wire import link as m


class Source:
    """What a request's hit comes from: remembers which results failed."""

    def __init__(self):
        self.failed = []

    def on_result(self, request, result):
        pass

    def on_load_failed(self, request, result):
        self.failed.append(result)


@pytest.fixture
def half():
    half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
    half.counters, half._sharing = Counters(), None
    half._contain, half._passive = Uncontained(), False
    half._engine = SimpleNamespace(admission=Admission())
    half.ended, half.source = [], Source()
    half._matcher = SimpleNamespace(
        get=lambda name: SimpleNamespace(
            life=SimpleNamespace(state=State[name]), hit=SimpleNamespace(source=half.source)
        ),
        on_load_ended=lambda name, failed: half.ended.append((name, failed)),
    )
    half._outcomes = load_results(load_context([(16, None)], 16, counters=half.counters), half._matcher)
    return half


def test_prefill_is_known_by_name_from_its_arrival_to_its_end(half):
    load = load_context([(16, None)], 16)
    half._exporter = ExportBuilder(load.engine, ExportTable(16, dict.fromkeys(LeaseKind, 2)), load.checksum_index)
    half._info, half._store = SimpleNamespace(unsupported="no KV cache"), None
    request = SimpleNamespace(kv_transfer_params={"do_remote_decode": True, "kvtier": {"export_as": "e"}})
    half.on_new_request(request)
    assert half._exporter.queued == {"e"}
    half._exporter.prefill_ended("e")
    assert not half._exporter.queued and "e" in half._exporter.ended
    half.on_new_request(request)
    assert half._exporter.queued == {"e"} and not half._exporter.ended


@pytest.mark.parametrize(
    "state, corrupt, outcome",
    [("LOADING", [], "failed"), ("ABANDONED", [], "aborted"), ("ABANDONED", [(0, 5)], "failed")],
)
def test_stopped_load_is_counted_as_aborted_unless_corrupt(half, state, corrupt, outcome):
    """Unless it had found something wrong before."""
    half.arrived([LoadResult(state, {1, 2}, "the request was aborted", 10, 0.1, 0.0, corrupt)], {state})
    counted = half.counters.take()
    assert [kind for kind in counted if kind.startswith("loads")] == [f"loads|{outcome}"]
    assert counted.get("integrity_failures|host", 0) == len(corrupt) and len(half.source.failed) == 1
    assert half.ended == [(state, True)]


def test_load_of_finished_request_still_adds_checksums(half):
    half._matcher.get = lambda name: None  # gone
    half.arrived([LoadResult("r", set(), "", 10, 0.1, 0.0)], {"r"})
    assert half.counters.take()["loads|ok"] == 1 and half.ended == [("r", False)]


def test_handoff_is_kept_from_the_arrival_of_its_request_on(half):
    kept = []
    half._info, half._access = SimpleNamespace(unsupported=""), SimpleNamespace(closed=False)
    half._exporter, half._store = SimpleNamespace(prepare=lambda request: None), None
    half._matcher = SimpleNamespace(keep_export=kept.append)
    requests = [SimpleNamespace(kv_transfer_params=params) for params in (None, {"do_remote_prefill": True})]
    for request in requests:
        half.on_new_request(request)
    assert kept == requests[1:]


def test_retained_blocks_give_way_to_a_prompt_whose_beginning_is_in_free_blocks(half):
    """vLLM takes free blocks for what its prefix cache has of a prompt, too. A request that needed more than were free
    waited for ``retain_seconds``, and all behind it."""
    freed = []
    half._identity = SimpleNamespace(resolve_namespace=lambda: None, namespace="n")
    half._questions, half.has_pending_frees = SimpleNamespace(waiting=False), lambda: False
    half._info = SimpleNamespace(unsupported="", groups=cache_groups([(16, None)]))
    half._provenance = SimpleNamespace(admit=lambda request, known: True)
    half._matcher = SimpleNamespace(match=lambda request, computed: (0, False), allocated=lambda *_: None, get=id)
    half._pool, half._offloader = SimpleNamespace(free_count=lambda: 12), None
    half._geometry = BlockGeometry(half._info.groups, 16)
    half._exporter = SimpleNamespace(release_for_requests=freed.append)
    request = SimpleNamespace(request_id="r", num_tokens=208)
    half.match(request, 160)  # 3 of 13 blocks are new
    assert freed == []
    half.match(request, 160)  # vLLM lacked one of 13
    assert freed == [14]
    half.allocated(request, ([],), 0)
    half.match(request, 160)  # preempted
    assert freed == [14]


@pytest.mark.parametrize(("groups", "tokens", "taken"), [
    ([(16, None)] + [(16, 1024)] * 6, 35_000, 2188 + 6 * 1090),  # Gemma 3
    ([(544, None)] + [mamba(544)] * 3, 100_000, 184 + 3 * 3),  # Qwen3-Next
])  # fmt: skip
def test_retained_blocks_stay_if_a_prompt_of_windows_or_states_fits_beside_them(half, groups, tokens, taken):
    """All blocks of all groups were counted: a prompt that vLLM admitted at once ended every export."""
    freed = []
    half._identity = SimpleNamespace(resolve_namespace=lambda: None, namespace="n")
    half._questions, half.has_pending_frees = SimpleNamespace(waiting=False), lambda: False
    half._info = SimpleNamespace(unsupported="", groups=cache_groups(groups))
    half._provenance = SimpleNamespace(admit=lambda request, known: True)
    half._matcher = SimpleNamespace(match=lambda request, computed: (0, False))
    half._geometry = BlockGeometry(half._info.groups, groups[0][0], in_flight=InFlight(2 * 8192))
    half._exporter, half._offloader = SimpleNamespace(release_for_requests=freed.append), None
    for free in taken, taken - 1:
        half._pool, half._answered = SimpleNamespace(free_count=lambda free=free: free), ""
        half.match(SimpleNamespace(request_id="r", num_tokens=tokens), 0)
    assert freed == [taken]


@pytest.mark.parametrize("free, tokens, freed", [(1, 1, [2]), (2, 1, []), (3, 33, [4]), (4, 33, []), (0, 0, [])])
def test_retained_blocks_give_way_to_a_request_whose_load_has_ended(half, free, tokens, freed):
    """vLLM lacks blocks for the rest of its prompt, for which it asks nothing; it waited for ``retain_seconds``."""
    given, kept = [], []
    waits = SimpleNamespace(num_computed_tokens=16, num_tokens=16 + tokens, status=RequestStatus.WAITING)
    half._engine.admission.queues = ([waits] if tokens else [],)
    half._info = SimpleNamespace(groups=cache_groups([(16, None)]))
    half._offloader = SimpleNamespace(cancel_for_requests=id, begin_step=lambda *args: kept.append(args))
    half._pool = SimpleNamespace(free_count=lambda: free)
    half._geometry = BlockGeometry(half._info.groups, 16)
    half._exporter = SimpleNamespace(release_for_requests=given.append, begin_step=lambda growth: [], step=1)
    half._tables = SimpleNamespace(each_block=False, begin_step=lambda *_: [])
    half._step_timer, half._matcher.prefetching = SimpleNamespace(begin_step=lambda *_: None), False
    output = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    assert half._follow(output, False) == [] and given == freed
    needed = -(-tokens // 16) + 1 if tokens else 0
    assert kept == [(1, [], needed, True)], "nothing is pinned again of what was freed"


@pytest.mark.parametrize("tokens, ids, filled", [(64, None, (0, 1, 2)), (80, None, (0, 2)), (70, [0, 2, 3], (3,)),
                                                 (96, [1, 2, 3], (1, 2, 3))])  # fmt: skip
def test_groups_that_a_load_does_not_fill_are_cleared_by_vllm(half, tokens, ids, filled):
    """vLLM 0.32 clears no block of the other groups. Behind the last token a recurrent state may have left a
    NaN, which attention multiplies with 0. A state is always loaded as a whole."""
    groups = [*cache_groups([(16, None), (32, None)]), mamba(32)]
    half._geometry, half._info = BlockGeometry(groups, 16), SimpleNamespace(group_ids=ids)
    request = SimpleNamespace(num_tokens=200)
    half._matcher.get = lambda name: SimpleNamespace(hit=SimpleNamespace(tokens=tokens), request=request)
    assert half.filled_groups("r") == filled
    half._matcher.get = lambda name: None
    assert half.filled_groups("r") == ()


def test_failed_pull_fails_aborted_request_too(half):
    half.arrived([PullResult("ABANDONED", {1}, True, "timeout", 0, 0.1)], {"ABANDONED"})
    assert half.counters.take()["pulls|failed"] == 1 and half.ended == [("ABANDONED", True)]


def test_peer_fetch_bad_blocks_are_counted_and_reported_to_source(half):
    result = FetchResult("LOADING", {1}, True, "wrong", 5, 0.1, checksum_mismatch=True)
    half.arrived([result], {"LOADING"})
    assert half.counters.take()["integrity_failures|peer_gpu"] == 1 and half.source.failed == [result]


@pytest.mark.parametrize(
    "source, promoted_tokens, below, sources",
    [
        (NodeStoreSource, 0, ("disk",), {"host": 96}),
        (NodeStoreSource, 64, ("disk",), {"host": 32, "disk": 64}),
        (NodeStoreSource, 200, ("disk",), {"disk": 96}),
        (NodeStoreSource, 64, ("nodes",), {"host": 32, "p2p": 64}),
        (NodeStoreSource, 64, ("disk", "object"), {"host": 32, "external_unspecified": 64}),
        (PeerGpuSource, 64, ("disk",), {"p2p": 96}),
        (PrefillHandoffSource, 0, (), {"p2p": 96}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hit_sources_are_reported_to_vllm(half, source, promoted_tokens, below, sources):
    """In the words of its own metrics; they add up to what was asked about."""
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM asks for it since 0.32")
    made = source.__new__(source)
    made.client = SimpleNamespace(tiers=below)
    half._matcher.get = lambda name: SimpleNamespace(hit=SimpleNamespace(source=made), promoted_tokens=promoted_tokens)
    told = hit_sources(half.hit_sources("r", 96))
    assert {each.value: count for each, count in told.items()} == sources
    assert hit_sources(half.hit_sources("r", 0)) == {}
    half._matcher.get = lambda name: None
    assert [each.value for each in hit_sources(half.hit_sources("r", 96))] == ["p2p"], "it has ended"


@pytest.mark.parametrize("late", [False, True], ids=["namespace first", "workers first"])
@pytest.mark.parametrize("theirs", ["int8", "raw"])
def test_pulls_are_refused_if_ranks_have_different_codecs(late, theirs):
    """A quality record that is written while the engine starts makes "auto" mean two things."""
    opened, closed, identity = [], [], bare_identity("engine/1")
    server = SimpleNamespace(open=lambda *_: opened.append(1), close=closed.append)
    access = PeerAccess(context_of(identity), server, None, None, None, ChecksumClearing(print))

    def settle():
        identity.namespace, identity.wire_codec = SimpleNamespace(hash_block_size=16), "int8"
        access.open_if_ready()

    registers = [m.Register(SimpleNamespace(rank=rank), codec) for rank, codec in enumerate(("int8", theirs))]
    if not late:
        settle()
    for register in registers:
        access.on_message(register)
    if late:
        settle()
    assert bool(opened) == (theirs == "int8")
    assert bool(access.refused) == bool(closed) == (theirs != "int8")


def test_engine_whose_workers_do_not_report_says_so(caplog):
    """As one over two nodes: it computed everything, and its log did not tell why."""
    reasons, opened, identity = [], [], bare_identity("engine/1", SimpleNamespace(hash_block_size=16))
    server = SimpleNamespace(open=lambda *_: opened.append(1), close=reasons.append)
    access = PeerAccess(context_of(identity), server, None, None, None, ChecksumClearing(print))
    access.on_message(m.Described(0, (), ()))
    access.look_for_workers()
    assert "1 of its 2 workers" in reasons[0] and "several nodes" in caplog.text
    for rank in (0, 1):
        access.on_message(m.Described(rank, (), ()))
        access.on_message(m.Register(SimpleNamespace(rank=rank), "raw"))
    access.look_for_workers()
    assert opened and len(reasons) == 1, "it was only late"


def test_worker_that_cannot_be_read_has_reported():
    reasons = []
    server, clearing = SimpleNamespace(close=reasons.append), ChecksumClearing(print)
    access = PeerAccess(context_of(bare_identity()), server, None, None, None, clearing)
    for rank in (0, 1):
        access.on_message(m.Unusable(rank, "no backend"))
    access.look_for_workers()
    assert reasons == ["no backend"] * 2


@pytest.mark.parametrize("shared", [(True, True), (True, False)])
def test_peer_directory_lists_only_engines_with_shared_memory(shared):
    """With host buffers or a wire codec no peer can; then the engines hold nothing that others would ask for."""
    known = []
    sharing, server = SimpleNamespace(opened=known.append), SimpleNamespace(open=lambda *_: None)
    identity = bare_identity("engine/1", SimpleNamespace(hash_block_size=16))
    access = PeerAccess(context_of(identity), server, None, None, sharing, ChecksumClearing(print))
    for rank, can in enumerate(shared):
        access.on_message(m.Register(SimpleNamespace(rank=rank, shared=object() if can else None), "raw"))
    assert known == ([("here", 1)] if all(shared) else [])


def context_of(identity):
    reactor = SimpleNamespace(call_soon=lambda job: job())
    info = SimpleNamespace(world_size=2, engine_id="engine")
    return SimpleNamespace(info=info, identity=identity, reactor=reactor)

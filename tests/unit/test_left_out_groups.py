"""Groups that vLLM keeps no prefixes of: our group 0 is vLLM's group 1, on each way between the two."""

import math
from types import SimpleNamespace

import pytest
from cache_groups import cache_groups
from source_fakes import load_context
from support import FakePool, make_request, step_output
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.leases.pending_leases import PendingLease
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.telemetry.events import PLACES, Label, Removed, Stored
from vllm_kvtier.vllm_compat import kv_events
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.engine_info import EngineInfo
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.wire import messages as m

SIZE = 4
HASHES = [bytes([i]) * 32 for i in range(1, 4)]


def info(**fields):
    given = dict.fromkeys(EngineInfo.__dataclass_fields__)
    return EngineInfo(**{**given, "group_ids": [1], "num_groups": 2, "groups": cache_groups([(SIZE, None)]), **fields})


def test_block_pool_asks_for_groups_by_the_ids_of_vllm():
    fake = FakePool(8, SIZE)
    pool = BlockPool(fake, [1])
    for block, block_hash in enumerate(HASHES, 3):
        fake.cached[block_hash, 1] = block
    assert pool.cached_block(HASHES[0], 0) == 3 and BlockPool(fake).cached_block(HASHES[0], 0) == 0
    assert pool.cached_tokens(HASHES, [0], SIZE) == pool.cached_about(HASHES, [0], SIZE) == 3 * SIZE
    assert BlockPool(fake).cached_tokens(HASHES, [0], SIZE) == 0


def test_block_pool_evicts_content_of_all_groups():
    fake = FakePool(8, SIZE)
    pool = BlockPool(fake, [1, 2], [SIZE, SIZE])
    evicted = []

    def evict(blocks):
        evicted.extend(blocks)
        fake.cached = {name: block for name, block in fake.cached.items() if block not in blocks}

    fake.evict_blocks = evict
    fake.cached |= {(HASHES[0], 0): 3, (HASHES[0], 1): 4, (HASHES[0], 2): 5, (HASHES[1], 2): 6}
    pool.evict(HASHES[:1])
    assert evicted == [4, 5]


def test_block_tables_follow_our_groups_and_forget_checksums_of_all():
    """A block that a ring got has no checksum of earlier content any more."""
    index = ChecksumIndex([SIZE])
    side = SimpleNamespace(_info=info(), _checksum_index=index)
    tables = BlockTables(
        side._info.groups, SIZE, index.remove, lambda t: True,
        lambda ids: KVTierConnectorScheduler._followed(side, ids),
    )  # fmt: skip
    for block in (5, 6, 7):
        index.mark(ChecksumEntry(0, block, 100 + block, SIZE), 1)
    request = make_request("r", list(range(2 * SIZE)), SIZE)
    tracked = SimpleNamespace(request=request)
    tables.begin_step(step_output({"r": SIZE}, new=[("r", ([5], [1, 2]), 0)]), {"r": tracked}.get)
    assert not index.knows(5) and index.knows(6)
    request.num_computed_tokens = SIZE
    tables.begin_step(step_output({"r": SIZE}, cached=[("r", ([6], [3]), SIZE, False)]), {"r": tracked}.get)
    assert not index.knows(6) and index.knows(7)
    assert tables.remove("r").groups == [[1, 2, 3]]


def test_block_tables_leave_out_what_chained_drafts_write_again():
    tables = BlockTables(info().groups, SIZE, lambda ids: None, lambda t: True)
    tables.rewritten = 2
    tracked = SimpleNamespace(request=make_request("r", list(range(3 * SIZE)), SIZE))
    [growth] = tables.begin_step(step_output({"r": 2 * SIZE}, new=[("r", ([1, 2, 3],), 0)]), {"r": tracked}.get)
    assert growth.computed == 2 * SIZE - 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_block_tables_leave_out_what_is_written_again_when_all_drafts_are_wrong(asynchronous):
    """The next step writes again what is before its first token, which is the last known one. With asynchronous
    scheduling that of the step before is not known yet, and its drafts count as computed."""
    tables = BlockTables(info().groups, SIZE, lambda ids: None, lambda t: True, lot=1)
    tables.rewritten, drafts = 2, 3
    tracked = SimpleNamespace(request=make_request("r", list(range(3 * SIZE - 1)), SIZE))
    request = tracked.request
    tables.begin_step(step_output({"r": 3 * SIZE - 1}, new=[("r", ([1, 2, 3, 4],), 0)]), {"r": tracked}.get)
    request.num_computed_tokens = 3 * SIZE - 1 + asynchronous * (1 + drafts)
    request.append_output_token_ids(3 * SIZE)
    growths = tables.begin_step(step_output({"r": 1 + drafts}), {"r": tracked}.get)
    assert not growths, "of the third block no more than two tokens are for good"
    request.append_output_token_ids([7, 7])
    request.num_computed_tokens += 2
    [growth] = tables.begin_step(step_output({"r": 1 + drafts}), {"r": tracked}.get)
    assert growth.computed == 3 * SIZE


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_block_tables_wait_for_the_output_of_a_step_that_computes_on_an_unverified_load(ahead, resumed):
    """Beside a connector whose loads vLLM's forward waits for (LMCache's default): its output says which blocks are
    bad, and what the step computed on them had got a valid checksum and was stored. ``ahead``: vLLM schedules one more
    step before it reads that output."""
    tables = BlockTables(info().groups, SIZE, lambda ids: None, lambda t: True)
    states = {name: SimpleNamespace(request=make_request(name, list(range(6 * SIZE)), SIZE)) for name in "rs"}

    def step(unverified=False, **lists):
        scheduled = dict.fromkeys(states, SIZE)
        grown = tables.begin_step(step_output(scheduled, **lists), states.get, unverified)
        for state in states.values():
            state.request.num_computed_tokens += SIZE
        return {growth.state.request.request_id: growth.computed for growth in grown}

    def extend(*names):
        return [(name, ([1],), states[name].request.num_computed_tokens, False) for name in names]

    assert step(new=[("s", ([1],), 0)]) == {"s": SIZE}
    tables.end_step()
    states["r"].request.num_computed_tokens = 2 * SIZE  # of the other connector's load
    first = ("r", ([2, 3, 4],), 2 * SIZE)
    new = {"cached": [(*first, True), *extend("s")]} if resumed else {"new": [first], "cached": extend("s")}
    assert step(unverified=True, **new) == {"s": 2 * SIZE}, "what runs already has none of those blocks"
    if ahead:
        assert step(cached=extend("r", "s")) == {"s": 3 * SIZE}, "nor is the next part known to be right"
    tables.end_step()
    assert step(cached=extend("r", "s")) == {"r": (4 + ahead) * SIZE, "s": (3 + ahead) * SIZE}


def test_requests_behind_one_with_an_unverified_load_are_followed_later():
    """They may begin with its blocks, which vLLM's prefix cache has at once, and computed on them."""
    tables = BlockTables(info().groups, SIZE, lambda ids: None, lambda t: True)
    states = {name: SimpleNamespace(request=make_request(name, list(range(6 * SIZE)), SIZE)) for name in "ab"}

    def step(name, unverified):
        states[name].request.num_computed_tokens = 2 * SIZE
        output = step_output({name: SIZE}, new=[(name, ([1, 2, 3],), 2 * SIZE)])
        return [growth.state.request.request_id for growth in tables.begin_step(output, states.get, unverified)]

    assert step("a", True) == [] and step("b", False) == []
    for name in "ab":
        tables.end_step()
        states[name].request.num_computed_tokens = 3 * SIZE
    output = step_output(dict.fromkeys("ab", SIZE), cached=[(name, ([4],), 3 * SIZE, False) for name in "ab"])
    assert {growth.state.request.request_id for growth in tables.begin_step(output, states.get, False)} == {"a", "b"}


def test_events_name_the_groups_of_vllm():
    label = Label(HASHES[0], b"", b"\0" * 4 * SIZE)
    groups = [(1, "full_attention", None)]
    stored, removed = kv_events.vllm_events(
        [Stored(0, PLACES[0], [label]), Removed(0, PLACES[0], HASHES[:1])], groups
    )
    assert stored.group_idx == removed.group_idx == 1


@pytest.mark.parametrize(("prompt", "usable"), [(3 * SIZE + 1, 3 * SIZE), (3 * SIZE, 2 * SIZE), (SIZE, 0)])
def test_exports_and_loads_end_where_left_out_groups_hold_nothing(prompt, usable):
    """A ring collects the tokens behind the last boundary. The last token of a prompt is computed in any case."""
    load = load_context([(SIZE, None)], SIZE, pool=BlockPool(FakePool(8, SIZE)), info={"whole_blocks": True})
    assert load.engine.geometry.usable_tokens(prompt, prompt) == usable
    assert load.engine.geometry.lookup_tokens(prompt) // SIZE * SIZE == usable
    table = ExportTable(SIZE, dict.fromkeys(LeaseKind, 8))
    exporter = ExportBuilder(load.engine, table, load.checksum_index)
    request = make_request("r", list(range(prompt)), SIZE, {"do_remote_decode": True})
    exporter.prepare(request)
    request.num_computed_tokens = request.num_tokens
    request.append_output_token_ids(1)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    tracked = RequestState(request, read(request.kv_transfer_params), RequestLifecycle("r"))
    export = exporter.finished(tracked, ([1, 2, 3, 4][: -(-prompt // SIZE)],))
    assert (export.tokens if export is not None else 0) == usable
    assert export is None or export.groups[0].ids == [1, 2, 3][: usable // SIZE]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("known", [0, 3 * SIZE + 2])
@pytest.mark.parametrize("prompt", [3 * SIZE + 1, 3 * SIZE + 3, 4 * SIZE])
def test_handoff_of_unknown_length_is_asked_up_to_where_exports_end(prompt, known, follow):
    """Of a prefill that is followed, and where a router passes on addresses only. The blocks of an engine that tells
    the length may be smaller."""
    asked = []

    def ask(address, timeout, notify=None, rehash=None, **fields):
        asked.append(fields["digest"])
        return PendingLease(address, m.LeaseRequest(1, "", **fields), math.inf)

    peers = SimpleNamespace(ask=ask, follow=ask)
    load = load_context(
        [(SIZE, None)], SIZE, peers, config=KVTierConfig(pull_threshold=1), info={"whole_blocks": True}
    )
    matcher = RequestMatcher(load, [FollowedPrefillSource(load), PrefillHandoffSource(load)])
    params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1, "remote_request_id": "kvtier/e"}
    own = {"follow": follow, "num_tokens": known, "instance": "p/1", "digest": ""}
    request = make_request("r", list(range(prompt)), SIZE, {**params, "remote_block_ids": [], "kvtier": own})
    assert matcher.match(request, 0) == (None, False)
    tail = vr.tail_hash(request, known, SIZE) if 0 < known < prompt else b""
    assert asked == [vr.prefix_digest(vr.block_hashes(request, 3 * SIZE, SIZE), tail)]

"""Hand-offs and pulls that end with recurrent states: where they end, and which engine compares the partial block."""

import numpy as np
import pytest
import torch
from cache_groups import mamba
from pull_fakes import Pair, batch_of, info, keys_of, pull_of
from source_fakes import load_context
from support import make_request

from vllm_kvtier.cache_kinds import get
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks, PendingLease
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.scheduler.matching.transfer_params import read
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import Candidate, Need
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

SIZE = 4
GROUPS = [(SIZE, None), mamba(SIZE)]
TOKENS = list(range(11))


def request(tokens=TOKENS, params=None, **fields):
    made = make_request("r", tokens, SIZE, params)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def tracked(made):
    return RequestState(made, read(made.kv_transfer_params), RequestLifecycle(made.request_id))


# -- the prefill ends a token earlier ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, SIZE, SIZE + 1, 2 * SIZE])
def test_leave_last_token_shortens_prompt_and_hashes(length):
    made = request(TOKENS[:length], max_tokens=1)
    vr.leave_last_token(made, SIZE)
    short = make_request("r", TOKENS[: length - 1], SIZE)
    for each in ("num_tokens", "num_prompt_tokens", "prompt_token_ids", "block_hashes"):
        assert getattr(made, each) == getattr(short, each)
    assert list(made.all_token_ids) == TOKENS[: length - 1] and vr.prompt_tokens(made) == length


@pytest.mark.parametrize("fields", [{"max_tokens": 2}, {"skip_reading_prefix_cache": True}, {"resumable": True}])
def test_leave_last_token_changes_no_request_that_needs_it(fields):
    made = request(**{"max_tokens": 1, **fields})
    vr.leave_last_token(made, SIZE)
    assert made.num_tokens == made.num_prompt_tokens == vr.prompt_tokens(made) == len(TOKENS)


def test_leave_last_token_leaves_the_list_that_requests_share():
    """n > 1 in one process, or a caller that sends its list again: vLLM does not copy it."""
    shared = list(range(20, 33))
    for _ in range(2):
        made = request(shared, max_tokens=1)
        made.prompt_token_ids = shared
        vr.leave_last_token(made, SIZE)
        assert len(made.prompt_token_ids) == made.num_prompt_tokens == len(made.all_token_ids) == 12
    assert shared == list(range(20, 33))


def test_leave_last_token_keeps_a_prompt_of_one_token():
    made = request(TOKENS[:1], max_tokens=1)
    vr.leave_last_token(made, SIZE)
    assert made.num_tokens == 1


# -- leases of exports that end within a block -------------------------------------------------------------------------


def export(tokens, states):
    """Of ``TOKENS[:tokens]``. ``states``: places in the table that have one."""
    made = request()
    hashes = vr.block_hashes(made, tokens, SIZE)
    tail = vr.tail_hash(made, tokens, SIZE) if tokens % SIZE else b""
    places = -(-tokens // SIZE)
    groups = [
        GroupBlocks(SIZE, list(range(1, places + 1))),
        GroupBlocks(SIZE, [9 * (i in states) for i in range(places)], get("mamba")),
    ]
    return Export(
        "e", LeaseKind.RETAINED, tokens, hashes, vr.prefix_digest(hashes, tail), b"", groups, [], -1, float("inf"),
        tail=tail,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "asked", "partial", "start", "leased"),
    [
        ({2}, 2, 10, 0, 10),  # whole export, with the state at its end
        ({2}, 2, 10, 8, 10),  # from its last boundary on
        ({2}, 2, 9, 0, None),  # the asker has no use for so many tokens
        ({2}, 2, 0, 0, None),  # nor for a partial block
        ({0, 2}, 2, 0, 0, 4),
        ({0, 2}, 1, 10, 0, 4),  # the asker's second block is another
        ({1}, 2, 10, 0, 8),  # no state at the end
    ],
)
def test_lease_by_hashes_ends_where_a_state_is(states, asked, partial, start, leased):
    table = ExportTable(SIZE, dict.fromkeys(LeaseKind, 9))
    table.add(export(10, states))
    hashes = [bytes(h) for h in request().block_hashes[:asked]]
    got = table.lease_by_hashes(hashes, b"", start, "reader", 1.0, partial_up_to=partial)
    assert (got.tokens if isinstance(got, Lease) else None) == leased
    assert leased or got is Refusal.NOTHING


# -- the reader --------------------------------------------------------------------------------------------------------


class Peers:
    """One engine, whose answers the test makes."""

    def __init__(self):
        self.asked, self.released = [], []

    def ask(self, address, timeout, rehash=None, **fields):
        self.asked.append(fields)
        return PendingLease(address, m.LeaseRequest(1, "", **fields), 9.0)

    def release(self, leased, done):
        self.released.append((leased.lease, done))


def looked_up(source, made, candidate):
    t = tracked(made)
    return t, source.lookup(t, candidate, Need(0, made.num_tokens - 1, made.num_tokens - 1, True))


@pytest.mark.parametrize("same", [True, False])
def test_retained_source_compares_the_partial_block(same):
    """Other tokens there: the lease goes back, and whole blocks are asked for."""
    peers = Peers()
    source = RetainedBlocksSource(load_context(GROUPS, SIZE, peers))
    source._config = source._config.__class__(bidirectional=True, pull_threshold=1)
    made = request()
    t, pending = looked_up(source, made, Candidate(source, ("h", 1)))
    assert peers.asked[0]["partial_up_to"] == 10, "the last token is computed here"
    theirs = made if same else request([*TOKENS[:9], 99, 99])
    tail = vr.tail_hash(theirs, 10, SIZE)
    pending.answer.outcome = LeasedBlocks(("h", 1), "i", 7, 0, 10, [[1, 2, 3], [0, 0, 4]], [], tail=tail)
    result = pending.poll()
    if same:
        assert result.found and source.fits(_with(t, pending), result) and not peers.released
        return
    assert not result.found and peers.released == [(7, False)]
    (again,) = result.candidates
    assert again.whole_blocks and again.address == ("h", 1)
    looked_up(source, made, again)
    assert peers.asked[1]["partial_up_to"] == 0


def test_retained_source_that_gets_a_partial_block_for_whole_ones_asks_no_more():
    """The request would be asked for without end, and never be scheduled."""
    peers = Peers()
    source = RetainedBlocksSource(load_context(GROUPS, SIZE, peers))
    source._config = source._config.__class__(bidirectional=True, pull_threshold=1)
    _, pending = looked_up(source, request(), Candidate(source, ("h", 1), whole_blocks=True))
    pending.answer.outcome = LeasedBlocks(("h", 1), "i", 7, 0, 10, [[1, 2, 3], [0, 0, 4]], [], tail=b"")
    result = pending.poll()
    assert (result.code, result.candidates, peers.released) == ("malformed", (), [(7, False)])


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1]])
def test_retained_source_asks_for_no_more_than_a_message_takes(groups):
    """The peer would end the connection, and with it the leases of all requests."""
    made, peers = request(), Peers()
    made.block_hashes = [bytes(32)] * (m.MAX_BLOCK_HASHES + 1)
    made._all_token_ids = range(SIZE * len(made.block_hashes) + 1)  # all that its length is taken from
    source = RetainedBlocksSource(load_context(groups, SIZE, peers))
    _, pending = looked_up(source, made, Candidate(source, ("h", 1)))
    m.decode_engine(m.encode(pending.answer.request))
    assert len(peers.asked[0]["block_hashes"]) == m.MAX_BLOCK_HASHES


def _with(t, pending):
    t.pending = pending
    return t


@pytest.mark.parametrize(("said", "asked"), [(None, 10), (8, 8), (10, 10), (11, 10), (0, 10)])
def test_handoff_source_asks_for_what_the_export_has(said, asked):
    """A prefill engine that has no state behind the last token but one exports less, and says how much."""
    ours = {} if said is None else {"instance": "i", "num_tokens": said, "digest": "00" * 16}
    params = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1, "remote_request_id": "kvtier/x"}
    params["kvtier"] = ours
    params["remote_block_ids"] = [[1], [1]]
    peers = Peers()
    source = PrefillHandoffSource(load_context(GROUPS, SIZE, peers))
    source._config = source._config.__class__(pull_threshold=1)
    made = request(params=params)
    t, _ = looked_up(source, made, Candidate(source, ("h", 1)))
    hashes = vr.block_hashes(made, asked, SIZE)
    assert peers.asked[0]["digest"] == vr.prefix_digest(hashes, job_builder.tail_hash(t, asked, SIZE))


# -- the workers -------------------------------------------------------------------------------------------------------


def state_cache(blocks, seed):
    """States of two layers, each a cell of 40 bytes and padding."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randint(0, 256, (2, blocks, 64), dtype=torch.uint8, generator=generator)
    regions = tuple(
        Region(f"l{n}", memory[n].data_ptr(), 64, 1, 0, 0, 1, 0, 40, cell_tokens=SIZE, packing="gdn", dtype="state")
        for n in range(2)
    )
    return CacheView([GroupView(0, SIZE, "mamba", None, regions)], blocks, "cpu", [memory.untyped_storage()])


def state_pair():
    pair = Pair()
    pair.here, pair.there = (CacheMemory(state_cache(9, seed), False) for seed in (1, 2))
    pair.pulls = Pulls(pair.transport, pair.here, 0)
    pair.pulls.add_engine("s/1", [info(pair.there)])
    return pair


@pytest.mark.parametrize("valid", [1, 3, SIZE])
def test_pulled_state_is_whole_whatever_tokens_of_its_block_are_computed(valid):
    pair = state_pair()
    pair.there.compute_checksums([batch_of([5], [valid])], None)
    result = pair.run(pair.order(pull_of([2], [5], [valid])))
    assert not result.failed and pair.equal(2, 5)


@pytest.mark.parametrize("byte", [0, 20, 39])
@pytest.mark.parametrize("layer", [0, 1])
def test_pulled_state_that_changed_in_any_byte_is_noticed(layer, byte):
    """As by a step that went on: behind the last token, vLLM changes it in place."""
    pair = state_pair()
    pair.there.compute_checksums([batch_of([5], [3])], None)
    pair.there.view.pages(pair.there.view.groups[0].regions[layer])[5, 0, 0, byte] ^= 1
    result = pair.run(pair.order(pull_of([2], [5], [3])))
    assert result.bad_blocks == {2} and result.checksum_mismatch


@pytest.mark.parametrize(("valid", "key"), [(2, 5), (3, 6)])
def test_pulled_state_of_other_tokens_is_noticed(valid, key):
    """Behind fewer tokens of the same block, whose key is another; or of another prompt."""
    pair = state_pair()
    pair.there.compute_checksums([batch_of([5], [3])], None)
    keys = keys_of([key]) if valid == 3 else keys_of([5]) ^ np.uint64(valid)
    result = pair.run(pair.order(pull_of([2], [5], [valid], keys=keys)))
    assert result.bad_blocks == {2} and result.checksum_mismatch

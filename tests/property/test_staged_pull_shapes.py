"""Pulls through the ring: what lands equals what a plain reference says, for any two sizes, stages and layouts; and
what was spoilt is found."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_caches import Group, Layout, content, expected, keys_of, pull_of, ranks_of, sums_of
from pull_fakes import FakeTransport
from support import WITHOUT_SHRINKING
from test_fetching import BLOCKS, Case, check, reads_alone

from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.shapes.read_paths import ReadPath, reach
from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.nixl_pull.pulls import Pulls


def with_agents(ranks):
    return [msgspec.structs.replace(r.info, agent=f"agent {r.info.rank}", agent_metadata=b"metadata") for r in ranks]


def pulls_of(rank, number, infos, chunk_bytes=1 << 16, polls=0):
    transport = FakeTransport()
    transport.polls = polls
    pulls = Pulls(transport, rank.memory, number, rank.heads)
    pulls.add_engine("s/1", infos)
    staged_reads.CHUNK_BYTES = chunk_bytes
    return pulls, transport


def ended(pulls, rounds=100_000):
    results = []
    for _ in range(rounds):
        results += pulls.poll()
        if not pulls.active:
            return results
    raise AssertionError("pulls do not end")


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch):
    monkeypatch.setattr(staged_reads, "CHUNK_BYTES", staged_reads.CHUNK_BYTES)


@given(seed=st.integers(0, 1 << 32), corrupt=st.booleans())
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_staged_pulls_equal_reference(seed, corrupt):
    case = Case(seed)
    infos, ours = with_agents(case.source), with_agents(case.ours)
    for found in (reach(ours, infos), reach(infos, ours)):
        assert {ReadPath.MAPPED, ReadPath.STAGED} <= found.paths, found.reason
    spoilt = {}
    if corrupt:
        for block in case.rng.permutation(np.arange(1, BLOCKS))[:3].tolist():
            where = case.spoil(block)
            spoilt[block] = lambda number, group, where=where: reads_alone(case, number, group, where)
    orders = [(order, pairs) for order, pairs in case.orders() if pairs]
    for number, rank in enumerate(case.ours):
        pulls, transport = pulls_of(
            rank, number, infos, int(case.rng.choice([1, 1000, 5000, 1 << 16])), int(case.rng.integers(3))
        )
        for order, _ in orders:
            assert pulls.start(PullJob(order.request_id, "s/1", order.groups, 20.0, staged=True)) is None
        results = {result.request_id: result for result in ended(pulls)}
        check(case, number, orders, results, spoilt)
        ring = pulls._staged.ring
        assert not orders or (sorted(ring.free) == list(range(staged_reads.NUM_CHUNKS)) and not transport.running)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40, phases=WITHOUT_SHRINKING, deadline=None)
def test_direct_pulls_are_chosen_only_where_pages_are_equal(seed):
    """The reference for the path: whatever NIXL copies byte for byte is what the model says."""
    case = Case(seed)
    infos, ours = with_agents(case.source), with_agents(case.ours)
    if ReadPath.DIRECT not in reach(ours, infos).paths:
        return
    orders = [(order, pairs) for order, pairs in case.orders() if pairs]
    for number, rank in enumerate(case.ours):
        pulls, _ = pulls_of(rank, number, infos)
        for order, _ in orders:
            assert pulls.start(PullJob(order.request_id, "s/1", order.groups, 20.0)) is None
        results = {result.request_id: result for result in ended(pulls)}
        assert not any(result.failed for result in results.values())
        for order, pairs in orders:
            for group, local, remote in pairs:
                valid = case.valid[remote]
                for n, region in enumerate(rank.view.groups[group].regions):
                    cells = min(max(-(-(valid - region.first_token) // region.cell_tokens), 0), region.tokens)
                    page = rank.view.pages(region)[local].numpy()
                    want = expected(case.model, case.content, rank, number, *case.mine, group, remote)[n]
                    assert np.array_equal(page[:, :cells], want[:, :cells]), order.request_id


@pytest.mark.parametrize("mine", [1, 2, 8])
def test_staged_pull_finds_a_bad_word_of_each_source_rank(mine):
    model = (Group(layers=2, heads=4),)
    kept = content(model, 3, BLOCKS)
    for bad in range(4):
        source = ranks_of(model, kept, 4, layout=Layout(token=True, blocks=bad % 2 == 0))
        for rank in source:
            sums_of(rank, model, range(1, BLOCKS))
        source[bad].view.pages(source[bad].view.groups[0].regions[1])[5, 0, 3, 15] ^= 128
        found = []
        for number, rank in enumerate(ranks_of(model, BLOCKS, mine)):
            pulls, _ = pulls_of(rank, number, with_agents(source))
            assert not pulls.start(PullJob("r", "s/1", [pull_of([2, 3], [5, 6], 4)], 20.0, staged=True))
            [result] = ended(pulls)
            assert result.checksum_mismatch == bool(result.bad_blocks)
            found.append((number, result.bad_blocks))
        heads = [range(n * 4 // mine, max((n + 1) * 4 // mine, n * 4 // mine + 1)) for n in range(mine)]
        assert found == [(n, {2} if bad in heads[n] else set()) for n in range(mine)]


def test_staged_pull_rejects_block_of_another_key():
    model = (Group(layers=2, heads=4),)
    source = ranks_of(model, content(model, 3, BLOCKS), 2)
    for rank in source:
        sums_of(rank, model, range(1, BLOCKS))
    [rank] = ranks_of(model, BLOCKS, 1)
    pulls, _ = pulls_of(rank, 0, with_agents(source))
    order = pull_of([2, 3], [5, 6], 4, keys=keys_of([5, 9]))
    assert not pulls.start(PullJob("r", "s/1", [order], 20.0, staged=True))
    assert ended(pulls)[0].bad_blocks == {3} and not rank.view.pages(rank.view.groups[0].regions[0])[3].any()

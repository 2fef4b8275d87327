"""Blocks of other sizes than ours, read from mapped memory and through the ring: what lands equals a plain model of the
prompt, for any sizes, ranks, layouts and packings; and what was spoilt is found."""

import numpy as np
import pytest
from block_sizes import BlockSizeCase
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_caches import order_of
from support import WITHOUT_SHRINKING
from test_staged_pull_shapes import ended, pulls_of, with_agents

from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.shapes.read_paths import ReadPath, reach
from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch):
    monkeypatch.setattr(staged_reads, "CHUNK_BYTES", staged_reads.CHUNK_BYTES)


def mapped(case, number, infos, groups):
    rank = case.ours[number]
    copier = HostPeerCopier(rank.view, rank.memory.table, int(case.rng.choice([1, 300, 1 << 20])))
    fetches = PeerFetches(rank.view, rank.memory.table, rank.heads, number, copier=copier)
    fetches.add_engine("s/1", infos)
    assert fetches.start([order_of(*groups)]) == []
    results = []
    while fetches.active:
        results += fetches.poll()
    return results


def staged(case, number, infos, groups):
    pulls, _ = pulls_of(case.ours[number], number, infos, int(case.rng.choice([1, 1000, 5000, 1 << 16])))
    assert pulls.start(PullJob("r", "s/1", groups, 20.0, staged=True)) is None
    results = ended(pulls)
    assert sorted(pulls._staged.ring.free) == list(range(staged_reads.NUM_CHUNKS))
    return results


@pytest.mark.parametrize("read", [mapped, staged])
@given(seed=st.integers(0, 1 << 32), corrupt=st.booleans())
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_blocks_of_other_sizes_equal_plain_model(read, seed, corrupt):
    case = BlockSizeCase(seed)
    infos = with_agents(case.source)
    for found in (reach(with_agents(case.ours), infos), reach(infos, with_agents(case.ours))):
        assert {ReadPath.MAPPED, ReadPath.STAGED} <= found.paths, found.reason
        assert case.ratio == 1 or ReadPath.DIRECT not in found.paths
    spoilt = case.spoil() if corrupt else None
    starts = [int(case.rng.integers(len(local))) for local in case.local]
    found = set()
    for number in range(len(case.ours)):
        [result] = read(case, number, infos, case.pulls(starts))
        bad = result.bad_blocks
        assert result.failed == result.checksum_mismatch == bool(bad)
        if spoilt is None:
            assert not bad
        else:  # on the ranks that read the spoilt one
            assert bad <= case.touched(*spoilt[:2])
        found |= bad
        case.check(number, starts, bad)
        table = case.ours[number].memory.table.numpy()
        assert case.ratio == 1 or not table.any(), "checksums of other blocks than ours"
    if spoilt is not None and len(case.source) == 1:
        group, place, _ = spoilt
        wanted = set(case.local[group][starts[group] :])
        assert found == case.touched(group, place) & wanted


@pytest.mark.parametrize("shifts", [lambda known: np.full_like(known, 1000), lambda known: None])
def test_row_with_shift_that_no_part_has_is_bad(shifts):
    """Nor may a job leave them out: the source's checksums are right, wherever its tokens go."""
    case = next(c for c in map(BlockSizeCase, range(100)) if c.ratio > 1 and len(c.model) == 1)
    groups = case.pulls([0])
    groups[0].shifts = shifts(groups[0].shifts)
    [result] = mapped(case, 0, with_agents(case.source), groups)
    assert result.bad_blocks == set(case.local[0]) and result.checksum_mismatch


def test_staged_row_with_shift_that_no_part_has_fails():
    case = next(c for c in map(BlockSizeCase, range(100)) if c.ratio > 1 and len(c.model) == 1)
    groups = case.pulls([0])
    groups[0].shifts[0] = 1000
    pulls, _ = pulls_of(case.ours[0], 0, with_agents(case.source))
    result = pulls.start(PullJob("r", "s/1", groups, 20.0, staged=True))
    assert result.failed and result.bad_blocks == set(case.local[0]) and "1000" in result.reason
    assert not pulls.active

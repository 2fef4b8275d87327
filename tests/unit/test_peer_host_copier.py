"""Blocks out of other processes' caches by plain copies: what arrives, what is found to be wrong, and processes that
die."""

import time

import msgspec
import numpy as np
import pytest
import torch
from peer_caches import Group, Layout, content, expected, keys_of, pull_of, rank_of, ranks_of, sums_of
from peer_process import PeerProcess
from support import stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.worker.peer_fetch import process_memory
from vllm_kvtier.worker.peer_fetch.base import CopyJob
from vllm_kvtier.worker.peer_fetch.fetch_jobs import make_peer_copier
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

MODEL = (Group(layers=3, heads=4), Group(layers=2, heads=1, kind="mla", inner=12))
BLOCKS = 16


class Reader:
    """A rank that reads; by default the only one, of another layout than the source's."""

    def __init__(self, source, number=0, tp=1, stages=1, layout=None, model=MODEL, piece_bytes=600, kept=BLOCKS):
        self.model, self.number, self.tp, self.stages, self.source = model, number, tp, stages, source
        self.rank = rank_of(model, kept, number, tp, stages, layout or Layout(token=True, gap=(4, 0, 4)))
        self.table = self.rank.memory.table
        self.table.fill_(77)
        self.copier = HostPeerCopier(self.rank.view, self.table, piece_bytes)
        self.copier.add("s/1", map_source_ranks(self.rank.view.groups, self.rank.heads, number, source.infos))

    def copy(self, *groups, **more):
        copy = self.copier.start([CopyJob("s/1", list(groups), **more)])
        assert copy.wait(20)
        return copy

    def landed(self, local, remote, group=0):
        pages = [self.rank.view.pages(r)[local].numpy() for r in self.rank.view.groups[group].regions]
        wanted = expected(
            self.model, self.source.content, self.rank, self.number, self.tp, self.stages, group, remote
        )
        return all(np.array_equal(a, b) for a, b in zip(pages, wanted, strict=True))

    def untouched(self, local, group=0):
        return not any(self.rank.view.pages(r)[local].any() for r in self.rank.view.groups[group].regions)


@pytest.fixture
def source():
    made = []

    def start(**more):
        more = {"model": MODEL, "seed": 1, "blocks": BLOCKS} | more
        made.append(PeerProcess(**more))
        return made[-1]

    yield start
    for each in made:
        each.end()


ANOTHER = Layout(token=True, blocks=True, gap=(8, 4, 20))


@pytest.mark.parametrize(
    "theirs, mine, layout", [(1, 1, Layout()), (2, 2, ANOTHER), (1, 4, ANOTHER), (4, 2, Layout()), (8, 1, ANOTHER)]
)
def test_peer_host_copier_reads_process_of_any_size_and_layout(source, theirs, mine, layout):
    there = source(tp=theirs, layout=layout)
    local, remote = [3, 9, 5, 1], [2, 14, 8, 6]
    for number in range(mine):
        reader = Reader(there, number, mine)
        copy = reader.copy(pull_of(local, remote, 4), pull_of([7, 2], [3, 11], 4, group=1))
        assert not copy.bad(0) and not copy.why(0) and copy.nbytes
        assert all(map(reader.landed, local, remote)) and reader.landed(7, 3, 1) and reader.landed(2, 11, 1)
        assert all(reader.untouched(i) for i in (4, 6, 8, 10)) and all(reader.table[[4, 6, 8, 10]] == 77)
        whole = min(theirs, 4) == min(mine, 4)
        assert [bool(s) for s in reader.table[local]] == [whole] * 4
        assert all(reader.table[[7, 2]]), "latents are whole everywhere"
        if whole:  # what peers read is what we would have computed
            ours = reader.table[local].clone()
            reader.rank.memory.compute_checksums([_batch(local, remote)], None)
            assert torch.equal(reader.table[local], ours)


def _batch(local, remote, group=0):
    from vllm_kvtier.jobs.transfer_jobs import ChecksumJob

    return ChecksumJob(group, np.array(local), keys_of(remote), np.full(len(local), 4, np.int32))


def test_peer_copy_detects_bad_bytes_checksums_and_keys_per_block(source):
    there = source(tp=2, checksums_ready=[i for i in range(1, BLOCKS) if i not in (11, 13)])
    there.poke(0, 0, 1, 2, outer=1, cell=3, byte=15)
    there.poke(1, 0, 2, 4)
    there.table(1, 6, 1)
    reader = Reader(there)
    remote = [2, 4, 6, 8, 10, 11, 12, 14]
    keys = keys_of(remote)
    keys[4] ^= np.uint64(1)
    local = list(range(1, 9))
    copy = reader.copy(pull_of(local, remote, 4, keys=keys))
    # Block 10 is asked for by another key, and block 11 never had a checksum.
    assert copy.bad(0) == {1, 2, 3, 5, 6} and not copy.why(0)
    assert all(reader.landed(i, r) for i, r in zip(local, remote, strict=True) if i not in copy.bad(0))
    assert reader.untouched(5) and reader.untouched(6), "what was not checked never comes into the cache"
    assert not reader.table[local].any()
    there.poke(0, 0, 1, 2, outer=1, cell=3, byte=15)
    assert not reader.copy(pull_of([1], [2], 4)).bad(0) and reader.landed(1, 2)


def test_peer_copy_reads_only_valid_tokens(source):
    model = (Group(layers=2, heads=2, cells=4, parts=2),)
    there = [PeerOfUs(model, [6, 3], Layout(gap=(0, 0, 12)))]
    reader = Reader(there[0], model=model)
    copy = reader.copy(pull_of([5, 6], [1, 2], [6, 3]))
    assert not copy.bad(0) and all(reader.table[[5, 6]])
    for local, block, tokens in ((5, 1, 6), (6, 2, 3)):
        for at, region in enumerate(reader.rank.view.groups[0].regions):
            page, part = reader.rank.view.pages(region)[local].numpy(), at % 2
            cells = min(4, max(0, tokens - 4 * part))
            wanted = there[0].content[0][at // 2, part][block]
            assert np.array_equal(page[:, :cells], wanted[:, :cells]) and not page[:, cells:].any()


class PeerOfUs:
    """A source in this process: blocks 1 .. with so many tokens each."""

    def __init__(self, model, tokens, layout=None, blocks=BLOCKS):
        self.content = content(model, 5, blocks)
        self.ranks = ranks_of(model, self.content, 1, 1, layout)
        valid = dict(enumerate(tokens, 1))
        for rank in self.ranks:
            sums_of(rank, model, list(valid), valid)
        self.infos = [rank.info for rank in self.ranks]


def test_peer_host_copier_copies_one_piece_per_call(source):
    """One piece a call, so that the caller is never blocked for long."""
    there = PeerOfUs(MODEL, [4] * 15)
    block = sum(r.block_bytes for r in there.ranks[0].view.groups[0].regions)
    reader = Reader(there, piece_bytes=2 * block)
    even = [i for i in range(1, BLOCKS) if i % 2 == 0]
    copy = reader.copier.start([CopyJob("s/1", [pull_of(even, even, 4)])])
    assert not reader.table[even].any(), "until it is checked nothing is vouched for"
    calls = 0
    while not copy.done():
        calls += 1
        assert [i for i in even if reader.landed(i, i)] == even[: 2 * calls]
    assert calls == 4 and copy.done() and copy.nbytes == len(even) * block and all(reader.table[even])


def test_peer_host_copier_block_larger_than_a_piece_is_one_piece(source):
    there = PeerOfUs(MODEL, [4] * 15)
    reader = Reader(there, piece_bytes=1)
    copy = reader.copier.start([CopyJob("s/1", [pull_of([2, 4], [4, 2], 4)])])
    assert [copy.done() for _ in range(3)] == [False, False, True] and not copy.bad(0) and reader.landed(2, 4)


def test_peer_host_copier_source_killed_marks_rest_bad(source):
    there = source()
    reader = Reader(there)
    remote = [i for i in range(1, BLOCKS) if i % 2 == 0]
    jobs = [CopyJob("s/1", [pull_of(remote, remote, 4)]), CopyJob("s/1", [pull_of([1], [2], 4)])]
    copy = reader.copier.start(jobs)
    assert not copy.done()
    there.kill()
    assert copy.wait(5)
    assert copy.bad(0) == set(remote) and copy.bad(1) == {1} and "has ended" in copy.why(0) and copy.why(1)
    assert all(reader.landed(i, i) or reader.untouched(i) for i in remote) and reader.untouched(1)
    with pytest.raises(KVTierError, match="has ended"):
        reader.copier.remove("s/1")
        reader.copier.add("s/1", map_source_ranks(reader.rank.view.groups, reader.rank.heads, 0, there.infos))


@pytest.mark.parametrize("tp", [1, 2])
def test_peer_host_copier_detects_overwritten_blocks(source, tp):
    """A source that breaks its word: whatever is reported as right is what was asked for."""
    model = (Group(layers=4, heads=2, cells=16, inner=512),)
    there = source(model=model, tp=tp)
    reader, right, wrong = Reader(there, model=model), 0, 0
    there.storm(tp - 1, 5, 1.5)
    until = time.monotonic() + 2
    while time.monotonic() < until or not right:
        for region in reader.rank.view.groups[0].regions:
            reader.rank.view.pages(region)[2] = 0
        bad = reader.copy(pull_of([2], [5], 16)).bad(0)
        assert bad or reader.landed(2, 5)
        right, wrong = right + (not bad), wrong + bool(bad)
    there.heard()
    assert right and wrong


def test_peer_host_copier_reads_stopped_process(source):
    there = source()
    reader = Reader(there)
    stop(there.process.pid)
    copy = reader.copy(pull_of([1], [2], 4))
    assert not copy.bad(0) and reader.landed(1, 2)


def test_peer_host_copier_expired_job_reads_nothing(source):
    reader = Reader(PeerOfUs(MODEL, [4] * 15))
    copy = reader.copy(pull_of([2, 4], [2, 4], 4), until=time.monotonic())
    assert copy.bad(0) == {2, 4} and "in time" in copy.why(0) and not copy.nbytes and reader.untouched(2)


def test_peer_host_copier_unread_group_is_bad(source):
    there = PeerOfUs(MODEL, [4] * 15)
    reader = Reader(there)
    parts = map_source_ranks(reader.rank.view.groups[:1], reader.rank.heads[:1], 0, there.infos)
    reader.copier.add("s/2", parts)
    copy = reader.copier.start([CopyJob("s/2", [pull_of([2], [2], 4), pull_of([5], [3], 4, group=1)])])
    assert copy.wait(5) and copy.bad(0) == {5} and reader.landed(2, 2)


def test_peer_host_copier_dead_rank_makes_blocks_bad(source):
    """A rank of the source after the other: what the first brought is no use alone."""
    whole, half = source(tp=2), source(tp=2)
    infos = [whole.infos[0], half.infos[1]]
    mixed = type("Mixed", (), {"infos": infos, "content": whole.content})
    reader = Reader(mixed, piece_bytes=1 << 20)
    half.kill()
    copy = reader.copy(pull_of([2], [2], 4))
    assert copy.bad(0) == {2} and str(half.process.pid) in copy.why(0) and reader.table[2] == 0


def test_peer_host_copier_writes_nothing_after_close(source):
    reader = Reader(PeerOfUs(MODEL, [4] * 15))
    copy = reader.copier.start([CopyJob("s/1", [pull_of([2, 4], [2, 4], 4)])])
    reader.copier.close()
    assert copy.wait(5) and copy.bad(0) == {2, 4} and reader.untouched(2)
    reader.copier.close()


def test_peer_host_copier_equal_sources_share_and_free_scratch(source):
    there = PeerOfUs(MODEL, [4] * 15)
    reader = Reader(there)
    parts = map_source_ranks(reader.rank.view.groups, reader.rank.heads, 0, there.infos)
    for name in ("s/2", "s/3"):
        reader.copier.add(name, parts)
        reader.copier.add(name, parts)
    assert len(reader.copier._scratches) == 2
    copy = reader.copier.start([CopyJob("s/2", [pull_of([2], [2], 4)])])
    for name in ("s/1", "s/2", "s/3", "s/3"):
        reader.copier.remove(name)
    assert copy.wait(5) and not copy.bad(0) and reader.landed(2, 2), "what is under way goes on"
    del copy
    assert not reader.copier._scratches and not reader.copier._sources


def test_peer_host_copier_reads_different_layouts_at_once():
    sources = [PeerOfUs(MODEL, [4] * 15, layout) for layout in (Layout(), Layout(token=True), ANOTHER)]
    reader = Reader(sources[0])
    for number, there in enumerate(sources):
        reader.copier.add(
            f"layout {number}", map_source_ranks(reader.rank.view.groups, reader.rank.heads, 0, there.infos)
        )
    copy = reader.copier.start([CopyJob(f"layout {n}", [pull_of([n + 1], [2 * n + 2], 4)]) for n in range(3)])
    assert copy.wait(5) and not any(copy.bad(n) for n in range(3))
    assert all(reader.landed(n + 1, 2 * n + 2) for n in range(3))


def test_peer_copy_writes_only_our_blocks(source):
    """Pages with gaps all around: every byte that is not a block's own stays."""
    there = PeerOfUs(MODEL, [4] * 15)
    reader = Reader(there, layout=Layout(blocks=True, gap=(4, 8, 12)))
    view, seen = reader.rank.view, []
    for storage in view._storages:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        whole.fill_(0xA5)
        seen.append((whole, whole.clone()))
    reader.copy(pull_of([2, 9], [2, 4], 4))
    pages = {id(w): torch.zeros_like(w, dtype=torch.bool) for w, _ in seen}
    for region in view.groups[0].regions:
        for whole, _ in seen:
            at = region.base - whole.data_ptr()
            if 0 <= at < len(whole):
                for block in (2, 9):
                    shape = (region.outer, region.tokens, region.inner)
                    strides = (region.outer_stride, region.token_stride, 1)
                    start = at + block * region.block_stride
                    torch.as_strided(pages[id(whole)], shape, strides, start).fill_(True)
    for whole, before in seen:
        own = pages[id(whole)]
        assert torch.equal(whole[~own], before[~own])
    assert reader.landed(2, 2) and reader.landed(9, 4)


@pytest.mark.parametrize("inner, gap", [(16, (0, 0, 0)), (16, (4, 0, 0)), (12, (0, 0, 0)), (20, (4, 4, 4))])
def test_host_copy_of_any_alignment(inner, gap):
    model = (Group(layers=1, heads=2, inner=inner),)
    there = PeerOfUs(model, [4] * 15, Layout(gap=gap))
    reader = Reader(there, model=model, layout=Layout(token=True, gap=(8, 4, 0)))
    assert not reader.copy(pull_of([1, 2, 3], [3, 2, 1], 4)).bad(0)
    assert all(map(reader.landed, (1, 2, 3), (3, 2, 1)))


def test_make_peer_copier_of_cpu_cache_is_host_copier():
    rank = rank_of(MODEL, 4, 0)
    assert isinstance(make_peer_copier(rank.view, rank.memory.table), HostPeerCopier)


def test_peer_host_copier_checks_process_identity(source, monkeypatch):
    there = source()
    told = msgspec.structs.replace(there.infos[0].shared, started=there.infos[0].shared.started + 1)
    rank = rank_of(MODEL, 4, 0)
    copier = HostPeerCopier(rank.view, rank.memory.table)
    infos = [msgspec.structs.replace(there.infos[0], shared=told)]
    with pytest.raises(KVTierError, match="another has its pid"):
        copier.add("s/1", map_source_ranks(rank.view.groups, rank.heads, 0, infos))
    assert not copier._sources
    monkeypatch.setattr(process_memory, "_node", lambda pid: "here")
    with pytest.raises(KVTierError, match="another node"):
        copier.add("s/1", map_source_ranks(rank.view.groups, rank.heads, 0, there.infos))

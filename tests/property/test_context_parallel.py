"""Reads between engines with decode context parallelism: what lands equals a plain model of the prompt, each rank's
tokens being where vLLM's own rule puts them; what cannot be translated is refused; and what was exchanged is found."""

import msgspec
import numpy as np
import pytest
import torch
from context_shards import LAYERS, WIDTH, Shape, ShardedRank, slots
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_caches import keys_of, order_of
from support import WITHOUT_SHRINKING
from test_staged_pull_shapes import ended, pulls_of, with_agents
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull, PullJob
from vllm_kvtier.shapes.read_paths import ReadPath, reach
from vllm_kvtier.vllm_compat.layout.context_parallel import ContextShard
from vllm_kvtier.worker.integrity.checksums import counted_cells
from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

BLOCKS = 32  # more than the longest prompt has of the smallest size, and the null block


@pytest.fixture(autouse=True)
def chunk_bytes(monkeypatch):
    monkeypatch.setattr(staged_reads, "CHUNK_BYTES", staged_reads.CHUNK_BYTES)


def shape(rng, kv_heads=None) -> Shape:
    kv_heads = int(rng.choice([0, 0, 1, 2])) if kv_heads is None else kv_heads
    dcp = int(rng.choice([1, 2, 4]))
    tp = dcp * max(1, kv_heads) if dcp > 1 else int(rng.choice([1, 2]))
    block, parts = int(rng.choice([4, 8])), int(rng.choice([1, 1, 2]))
    kernel_block = block // parts
    run = int(rng.choice([1, 2, kernel_block, kernel_block]))
    return Shape(tp, dcp, run, block, parts, kv_heads, bool(rng.integers(2)))


class Prompt:
    """A prompt of any length that the engine of shape ``theirs`` has, and that one of shape ``mine`` reads."""

    def __init__(self, rng, theirs: Shape, mine: Shape, shards=None):
        self.rng, self.theirs, self.mine = rng, theirs, mine
        self.length = int(rng.integers(1, 3 * max(theirs.virtual, mine.virtual) + 1))
        sizes = (LAYERS, self.length, max(1, theirs.kv_heads), WIDTH)
        self.content = rng.integers(0, 256, sizes, dtype=np.uint8)
        self.ids, self.local = (self._blocks(-(-self.length // each.virtual)) for each in (theirs, mine))
        self.source = [ShardedRank(theirs, n, BLOCKS, shards and shards[n]) for n in range(theirs.tp)]
        self.ours = [ShardedRank(mine, n, BLOCKS) for n in range(mine.tp)]
        valid = np.minimum(theirs.virtual, self.length - np.arange(len(self.ids)) * theirs.virtual).astype(np.int32)
        for number, rank in enumerate(self.source):
            rank.write(self.ids, self.content)
            assert rank.memory.compute_checksums([ChecksumJob(0, self.ids, keys_of(self.ids), valid)], None).done()
            rank.info = rank.rank.info = msgspec.structs.replace(rank.info, rank=number)
        for number, rank in enumerate(self.ours):
            rank.info = rank.rank.info = msgspec.structs.replace(rank.info, rank=number)
        self.infos = with_agents(self.source)

    def _blocks(self, count):
        return self.rng.permutation(np.arange(1, BLOCKS))[:count]

    def reach(self):
        return reach(with_agents(self.ours), self.infos)

    def pull(self, start: int) -> GroupPull:
        """From block ``start`` of ours on, as the scheduler side makes it."""
        rows, s, b = [], self.theirs.virtual, self.mine.virtual
        for position in range(start, len(self.local)):
            for place in range(position * b // s, -(-min((position + 1) * b, self.length) // s)):
                valid = min(s, self.length - place * s)
                rows.append((self.local[position], self.ids[place], valid, position * b - place * s))
        local, remote, valid, shifts = np.array(rows, np.int64).T
        shifts = None if s == b else shifts.astype(np.int32)
        return GroupPull(0, local, remote, keys_of(remote), valid.astype(np.int32), shifts)

    def read(self, path: ReadPath, number: int, start: int):
        rank, pull = self.ours[number], self.pull(start)
        if path is ReadPath.MAPPED:
            copier = HostPeerCopier(rank.view, rank.memory.table, int(self.rng.choice([1, 300, 1 << 20])))
            fetches = PeerFetches(rank.view, rank.memory.table, rank.rank.heads, number, copier=copier)
            fetches.add_engine("s/1", self.infos)
            results = fetches.start([order_of(pull)])
            while fetches.active:
                results += fetches.poll()
        else:
            pulls, _ = pulls_of(rank.rank, number, self.infos, int(self.rng.choice([1, 1000, 1 << 16])))
            assert pulls.start(PullJob("r", "s/1", [pull], 20.0, staged=path is ReadPath.STAGED)) is None
            results = ended(pulls)
        [result] = results
        return result


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("interleave", [1, 2, 8])
def test_rule_of_slots_is_vllms(size, interleave):
    """The harness: ranks have as many tokens as vLLM's attention takes, each of them once; and of a block of any
    length, as many cells count in the checksum as are filled, none of them twice."""
    shape = Shape(size, size, interleave, 8)
    for tokens in range(1, 3 * 8 * size):
        blocks = np.array([5, 2, 9])
        found = [slots(blocks, tokens, 8, ContextShard(size, k, interleave)) for k in range(size)]
        assert (sum((each >= 0).astype(int) for each in found) == 1).all()
        for k, each in enumerate(found):
            assert (each >= 0).sum() == get_dcp_local_seq_lens(torch.tensor([tokens]), size, k, interleave).item()
            if tokens <= 8 * size:
                region = ShardedRank(shape, k, 3).view.groups[0].regions[0]
                cells = counted_cells(region, np.array([tokens]))[0]
                held = region.inner // WIDTH  # tokens of a cell on this rank
                assert cells == -(-(each >= 0).sum() // held)


@pytest.mark.parametrize("path", ReadPath)
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=80, phases=WITHOUT_SHRINKING, deadline=None)
def test_reads_equal_plain_model(path, seed):
    rng = np.random.default_rng(seed)
    theirs = shape(rng)
    mine = theirs if rng.random() < 0.4 else shape(rng, theirs.kv_heads)
    prompt = Prompt(rng, theirs, mine)
    found = prompt.reach()
    same = (theirs.dcp, theirs.interleave * (theirs.dcp > 1), theirs.block) == (
        mine.dcp, mine.interleave * (mine.dcp > 1), mine.block
    )  # fmt: skip
    if theirs == mine:
        assert ReadPath.DIRECT in found.paths, found.reason
    elif not same and not (theirs.in_runs and mine.in_runs):
        assert not found.paths and found.reason
    if path not in found.paths:
        return
    start = int(rng.integers(len(prompt.local)))
    for number, rank in enumerate(prompt.ours):
        result = prompt.read(path, number, start)
        assert not result.failed and not result.bad_blocks, (theirs, mine, result.reason)
        assert not len(rank.wrong(prompt.local, prompt.content, start * mine.virtual)), (theirs, mine)
        others = np.setdiff1d(np.arange(BLOCKS), prompt.local[start:])
        for region in rank.view.groups[0].regions:
            assert not rank.view.pages(region)[others].any()


PAIRS = {
    "to DCP": (Shape(1, 1, 1, 8), Shape(2, 2, 8, 8)),
    "to DCP 4, more heads": (Shape(1, 1, 1, 4, kv_heads=2), Shape(8, 4, 4, 4, kv_heads=2)),
    "from DCP": (Shape(4, 4, 8, 8), Shape(2, 1, 1, 8)),
    "from DCP 2 to 4": (Shape(2, 2, 4, 4), Shape(4, 4, 4, 4)),
    "kernel blocks": (Shape(1, 1, 1, 4), Shape(2, 2, 4, 8, parts=2)),
}


@pytest.mark.parametrize("path", [ReadPath.MAPPED, ReadPath.STAGED])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_run_are_read_by_engines_with_and_without(name, path, seed):
    theirs, mine = PAIRS[name]
    prompt = Prompt(np.random.default_rng(seed), theirs, mine)
    assert path in prompt.reach().paths, prompt.reach().reason
    for number, rank in enumerate(prompt.ours):
        assert not prompt.read(path, number, 0).failed
        assert not len(rank.wrong(prompt.local, prompt.content))


@pytest.mark.parametrize("path", [ReadPath.MAPPED, ReadPath.STAGED])
@pytest.mark.parametrize("name", PAIRS)
def test_flipped_byte_is_found_by_each_rank_that_reads_it(name, path):
    theirs, mine = PAIRS[name]
    for bad in range(theirs.tp):
        prompt = Prompt(np.random.default_rng(bad), theirs, mine)
        spoilt = prompt.source[bad]
        prompt.ids[:1], first = prompt.ids[:1], int(prompt.ids[0])
        region = spoilt.view.groups[0].regions[0]
        if not counted_cells(region, np.array([min(prompt.length, theirs.virtual)]))[0]:
            continue
        spoilt.view.pages(region)[first, 0, 0, 3] ^= 1
        touched = set(prompt.local[: -(-theirs.virtual // mine.virtual)].tolist())
        found = [prompt.read(path, number, 0).bad_blocks for number in range(mine.tp)]
        assert any(found) or theirs.dcp == 1 < theirs.tp  # another rank may have the same
        assert all(bad_blocks <= touched for bad_blocks in found)
        for rank, bad_blocks in zip(prompt.ours, found, strict=True):
            wrong = {int(prompt.local[token // mine.virtual]) for token in rank.wrong(prompt.local, prompt.content)}
            assert wrong <= bad_blocks


@pytest.mark.parametrize("interleave", [1, 4])
def test_exchanged_descriptions_are_noticed(interleave):
    """A control: if ranks described themselves as each other, the comparison with the model would fail."""
    shape = Shape(2, 2, interleave, 4)
    exchanged = [shape.shard(1), shape.shard(0)]
    prompt = Prompt(np.random.default_rng(3), shape, shape, exchanged)
    for number in range(2):
        prompt.read(ReadPath.DIRECT, number, 0)
    assert any(len(rank.wrong(prompt.local, prompt.content)) for rank in prompt.ours)


def test_ranks_with_exchanged_numbers_are_read_by_what_they_hold():
    shape = Shape(2, 2, 1, 4)
    prompt = Prompt(np.random.default_rng(4), shape, shape)
    prompt.infos = [msgspec.structs.replace(info, rank=1 - info.rank) for info in prompt.infos]
    for number, rank in enumerate(prompt.ours):
        assert not prompt.read(ReadPath.DIRECT, number, 0).failed
        assert not len(rank.wrong(prompt.local, prompt.content))


REFUSED = {
    "other runs": (Shape(2, 2, 1, 4), Shape(2, 2, 4, 4), "here, as tokens, runs of 1 over 2 ranks there"),
    "short runs to none": (Shape(2, 2, 1, 4), Shape(1, 1, 1, 4), "here, as tokens, runs of 1 over 2 ranks there"),
    "none to short runs": (Shape(1, 1, 1, 4), Shape(2, 2, 2, 4), "runs of 2 over 2 ranks here, as tokens there"),
    "as many tokens": (Shape(1, 1, 1, 8), Shape(2, 2, 4, 4), "4 cells of 1 tokens a part of a block here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_runs_are_refused(name):
    theirs, mine, words = REFUSED[name]
    found = Prompt(np.random.default_rng(1), theirs, mine).reach()
    assert not found.paths and words in found.reason

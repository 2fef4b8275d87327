"""What is fetched from another engine equals what a plain reference says, for any two sizes, layouts and models; and
what was spoilt is found, exactly that."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_caches import Group, Layout, content, expected, head_range, keys_of, order_of, pull_of, ranks_of, sums_of
from support import WITHOUT_SHRINKING

from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

BLOCKS = 14


def random_model(rng, theirs, mine):
    groups = []
    for _ in range(rng.integers(1, 4)):
        mla = rng.random() < 0.3
        heads = 1 if mla else int(rng.choice([1, 2, 4, 8]))
        groups.append(
            Group(
                layers=int(rng.integers(1, 3)) * max(theirs[1], mine[1]),
                heads=heads,
                cells=int(rng.choice([1, 2, 4])),
                inner=int(rng.choice([4, 8, 12, 16, 32])),
                cell_tokens=int(rng.choice([1, 1, 2, 4])),
                kind="mla" if mla else "full",
                parts=int(rng.choice([1, 1, 2])),
            )
        )
    return tuple(groups)


def random_layout(rng):
    gap = tuple(int(n) * 4 for n in rng.integers(0, 4, 3)) if rng.random() < 0.5 else (0, 0, 0)
    return Layout(bool(rng.integers(2)), bool(rng.integers(2)), gap)


class Case:
    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        sizes = [(int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 1, 2]))) for _ in range(2)]
        self.theirs, self.mine = sizes
        self.model = random_model(rng, *sizes)
        self.content = content(self.model, seed, BLOCKS)
        self.source = ranks_of(self.model, self.content, *self.theirs, random_layout(rng))
        self.ours = ranks_of(self.model, BLOCKS, *self.mine, random_layout(rng))
        # Block b is of group b modulo their number, as in ``sums_of``.
        self.valid = {}
        for block in range(1, BLOCKS):
            tokens = self.model[block % len(self.model)].tokens
            self.valid[block] = int(rng.integers(1, tokens + 1)) if rng.random() < 0.3 else tokens
        for rank in self.source:
            sums_of(rank, self.model, range(1, BLOCKS), self.valid)

    def orders(self):
        """Some requests: [(order, [(group, local, remote)])]."""
        free = self.rng.permutation(np.arange(1, BLOCKS)).tolist()
        remote = self.rng.permutation(np.arange(1, BLOCKS)).tolist()
        made = []
        for number in range(self.rng.integers(1, 4)):
            groups, pairs = [], []
            for group in range(len(self.model)):
                mine = [b for b in remote if b % len(self.model) == group]
                count = min(len(mine), len(free), int(self.rng.integers(0, 4)))
                local, far = [free.pop() for _ in range(count)], mine[:count]
                groups.append(pull_of(local, far, [self.valid[b] for b in far], group))
                pairs += [(group, *pair) for pair in zip(local, far, strict=True)]
            made.append((order_of(*groups, name=f"r{number}"), pairs))
        return made

    def spoil(self, block):
        """Flip a bit that counts of a block somewhere in the source; (rank, layers and heads that it has)."""
        number = int(self.rng.integers(len(self.source)))
        rank, group = self.source[number], block % len(self.model)
        regions = rank.view.groups[group].regions
        counts = [
            (r, min(r.tokens, -(-(self.valid[block] - r.first_token) // r.cell_tokens)))
            for r in regions
            if self.valid[block] > r.first_token
        ]
        region, cells = counts[self.rng.integers(len(counts))]
        where = [int(self.rng.integers(n)) for n in (region.outer, cells, region.inner)]
        rank.view.pages(region)[(block, *where)] ^= 1 << int(self.rng.integers(8))
        return number


def check(case, number, orders, results, spoilt):
    rank, stages = case.ours[number], case.mine[1]
    assert sorted(results) == sorted(order.request_id for order, _ in orders)
    for order, pairs in orders:
        bad = results[order.request_id].bad_blocks
        for group, local, remote in pairs:
            wanted = expected(case.model, case.content, rank, number, case.mine[0], stages, group, remote)
            pages = [rank.view.pages(r)[local].numpy() for r in rank.view.groups[group].regions]
            readers = spoilt.get(remote)
            if readers is None:
                assert local not in bad
            elif local not in bad:
                assert not readers(number, group), "what was read was spoilt"
            for region, page, want in zip(rank.view.groups[group].regions, pages, wanted, strict=True):
                cells = -(-(case.valid[remote] - region.first_token) // region.cell_tokens)
                cells = min(max(cells, 0), region.tokens)
                assert not page[:, cells:].any()
                if local not in bad:
                    assert np.array_equal(page[:, :cells], want[:, :cells])
            table = int(rank.memory.table[local])
            if table:  # then it is what we would make of it
                ours = rank.memory._checksums.compute(
                    group, [local], keys_of([remote]), np.array([case.valid[remote]])
                )
                assert local not in bad and table == int(ours)
        assert results[order.request_id].failed == bool(bad)
        assert results[order.request_id].checksum_mismatch == bool(bad)


@given(seed=st.integers(0, 1 << 32), corrupt=st.booleans())
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_peer_fetch_equals_reference(seed, corrupt):
    case = Case(seed)
    spoilt = {}
    if corrupt:
        for block in case.rng.permutation(np.arange(1, BLOCKS))[:3].tolist():
            where = case.spoil(block)
            spoilt[block] = lambda number, group, where=where: reads_alone(case, number, group, where)
    infos = [rank.info for rank in case.source]
    orders = case.orders()
    for number, rank in enumerate(case.ours):
        copier = HostPeerCopier(rank.view, rank.memory.table, int(case.rng.choice([1, 300, 1 << 20])))
        fetches = PeerFetches(rank.view, rank.memory.table, rank.heads, number, copier=copier)
        fetches.add_engine("s/1", infos)
        assert fetches.start([order for order, _ in orders]) == []
        results = {}
        while fetches.active:
            results |= {result.request_id: result for result in fetches.poll()}
        check(case, number, orders, results, spoilt)


def reads_alone(case, number, group, where):
    """Whether rank ``number`` of ours can get what it needs of a group from no rank but ``where``, or is sure to."""
    g = case.model[group]
    place, theirs = number % case.mine[0], where % case.theirs[0]
    if len(case.source) == 1:
        return True
    if case.theirs == case.mine:
        return number == where
    if g.kind == "mla" or g.heads < case.theirs[0] or case.theirs[1] > 1 or case.mine[1] > 1:
        return False  # others hold the same, or the layers are elsewhere
    ours, span = head_range(g, case.mine[0], place), head_range(g, case.theirs[0], theirs)
    mine = range(ours.first, ours.first + max(1, g.heads // case.mine[0]))
    held = range(span.first, span.first + max(1, g.heads // case.theirs[0]))
    return bool(set(mine) & set(held))


@pytest.mark.parametrize("mine", [1, 2, 8])
def test_peer_fetch_finds_bad_block_of_each_source_rank(mine):
    """The reference for finding: of every rank that is read, any word that counts."""
    model = (Group(layers=2, heads=4),)
    kept = content(model, 3, BLOCKS)
    for bad in range(4):
        source = ranks_of(model, kept, 4)
        for rank in source:
            sums_of(rank, model, range(1, BLOCKS))
        source[bad].view.pages(source[bad].view.groups[0].regions[1])[5, 0, 3, 15] ^= 128
        found = []
        for number, rank in enumerate(ranks_of(model, BLOCKS, mine)):
            fetches = PeerFetches(rank.view, rank.memory.table, rank.heads, number)
            fetches.add_engine("s/1", [r.info for r in source])
            assert not fetches.start([order_of(pull_of([2, 3], [5, 6], 4))])
            while fetches.active:
                found += [(number, result.bad_blocks) for result in fetches.poll()]
        heads = [range(n * 4 // mine, max((n + 1) * 4 // mine, n * 4 // mine + 1)) for n in range(mine)]
        assert found == [(n, {2} if bad in heads[n] else set()) for n in range(mine)]

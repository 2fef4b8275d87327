"""The kernel that copies from other GPUs' caches against the plain reference, bit for bit: any layouts on both sides,
any numbers of ranks, several sources at once; and that whatever is wrong shows, in exactly these blocks."""

import sys
from dataclasses import replace

import numpy as np
import peer_engines as engines
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from peer_engines import Layer, Layout
from vllm_kvtier.kernels import peer_copy, peer_copy_plan

from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.device.cuda_driver import Driver
from vllm_kvtier.worker.peer_fetch.kernel_args import Batch, GroupTable, max_words, pack, room

SPREADS = [(1, 1, 2), (1, 2, 4), (2, 1, 4), (4, 2, 4), (2, 4, 8), (1, 3, 3), (2, 2, 1), (1, 2, 1), (4, 2, 2)]


class Copies:
    """Launches of jobs into one rank; the interpreter or a GPU."""

    def __init__(self, target: engines.Rank, shape: peer_copy_plan.Shape, checked: bool = True, max_rows: int = 64):
        shape = replace(shape, max_rows=max_rows)
        self.target, self.shape = target, shape
        device = target.memory.device
        self.cuda = device.type == "cuda"
        scratch = (
            torch.full((room(shape),), -1, dtype=torch.int64, device=device),
            torch.full((max_rows,), -1, dtype=torch.int64, device=device),
        )
        self.page_copier = peer_copy.PeerPageCopier(
            scratch, shape, checked, Driver(device.index).launch if self.cuda else None
        )
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.checked, self.flags = checked, set()
        self.rounds = 0

    def run(self, jobs: list[tuple[list, engines.GroupPull]]) -> list[list[set[int]]]:
        """Our blocks that are wrong, by job and part. ``jobs``: (parts, blocks)."""
        device = self.target.memory.device
        batches, owners = [], []
        for number, (parts, pull) in enumerate(jobs):
            for which, part in enumerate(parts):
                info = part.source
                for group in part.groups:
                    where = (info.num_blocks, info.checksum_table_addr, lambda a, n: a, device, self.shape)
                    batches.append(Batch(GroupTable(group, *where), pull))
                    owners.append((number, which))
        self.flags = {kind.flags for b in batches for kind in b.table.kinds}
        room_ = max_words(batches, self.shape)
        words = torch.full((room_,), -1, dtype=torch.int64, pin_memory=self.cuda)
        rows = sum(len(b) for b in batches)
        verdicts = torch.full((rows + 8,), 77, dtype=torch.uint8, pin_memory=self.cuda)
        entries = self.target.table.data_ptr()
        rounds, places = pack(batches, words.numpy(), verdicts.data_ptr(), entries, self.shape)
        self.rounds = len(rounds)
        for _ in range(2 if self.cuda else 1):  # the second time by the compiled kernels alone, and that one shows
            if self.cuda:
                torch.cuda.synchronize()
            verdicts.fill_(77)
            for each in rounds:
                self.page_copier.launch(words.data_ptr() + 8 * each.at, each.words, each.rows, each.moves, self.stream)
            if self.cuda:
                torch.cuda.synchronize()
        assert (verdicts[rows:] == 77).all()
        bad = [[set() for _ in parts] for parts, _ in jobs]
        for (number, which), batch, (first, n) in zip(owners, batches, places, strict=True):
            told = verdicts[first : first + n].numpy()
            assert set(told.tolist()) <= ({peer_copy.GOOD, peer_copy.BAD} if self.checked else {77})
            bad[number][which] = set(batch.pull.local[told != peer_copy.GOOD].tolist())
        return bad


@st.composite
def layouts(draw, unit: int):
    gaps = tuple(draw(st.sampled_from([0, 0, 1, 3])) for _ in range(3))
    return Layout(draw(st.sampled_from(engines.ORDERS)), gaps, unit, unit * draw(st.sampled_from([0, 1, 2])))


@st.composite
def questions(draw):
    tokens = draw(st.sampled_from([1, 4, 8]))
    unit = draw(st.sampled_from([4, 8, 16]))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([1, 2])) if tokens > 1 else 1
        cell_tokens = draw(st.sampled_from([n for n in (1, 2, tokens) if tokens // parts % n == 0]))
        layers.append(Layer(unit * draw(st.sampled_from([1, 2, 5, 8, 17])), tokens, parts, cell_tokens))
    spread = draw(st.sampled_from(SPREADS))
    sources = [draw(layouts(unit)) for _ in range(draw(st.integers(1, 2)))]
    tiles = draw(st.sampled_from([((256, 1), (64, 4)), ((128, 2),), ((64, 1), (32, 2)), ((32, 4),)]))
    shape = peer_copy_plan.Shape(tiles, warps=draw(st.sampled_from([1, 4])), programs=draw(st.integers(1, 5)))
    return layers, spread, sources, draw(layouts(unit)), shape, draw(st.integers(0, 2**31))


# On a GPU nearly every example compiles kernels of its own.
@given(questions(), st.data())
@settings(max_examples=10 if torch.cuda.is_available() else 30)
def test_peer_copy_equals_reference(kernel_device, question, data):
    layers, (theirs, mine, heads), there, here, shape, seed = question
    blocks = 10
    sources = [
        engines.engine(layers, layout, heads, theirs, 7, kernel_device, seed + 10 * i) for i, layout in enumerate(there)
    ]
    for ranks in sources:
        engines.same_heads(ranks)
    rank = data.draw(st.integers(0, mine - 1), label="rank")
    target = engines.engine(layers, here, heads, mine, blocks, kernel_device, seed + 99)[rank]
    local = data.draw(st.permutations(range(blocks)), label="our blocks")
    tokens = layers[0].tokens
    jobs, pulls = [], []
    for ranks in sources:
        n = data.draw(st.integers(1, min(7, blocks // len(sources))))
        mine_, local = local[:n], local[n:]
        remote = data.draw(st.permutations(range(7)))[:n]
        keys = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=n, max_size=n))
        valid = [data.draw(st.one_of(st.just(tokens), st.integers(0, tokens))) for _ in range(n)]
        for each in ranks:
            each.vouch(remote, keys, valid)
        pulls.append(engines.pull(mine_, remote, keys, valid))
        jobs.append((map_source_ranks((target.group,), (target.heads,), rank, [r.info() for r in ranks]), pulls[-1]))
    # One thing goes wrong, after the checksums were made, or nothing.
    wrong = data.draw(st.sampled_from(["nothing", "byte", "key", "sum"]), label="wrong")
    number = data.draw(st.integers(0, len(jobs) - 1))
    parts, pull = jobs[number]
    row = data.draw(st.integers(0, len(pull.local) - 1))
    part = data.draw(st.sampled_from(parts))
    victim = sources[number][part.source.rank]
    if wrong == "byte":
        region = data.draw(st.integers(0, len(victim.group.regions) - 1))
        r = victim.group.regions[region]
        where = [data.draw(st.integers(0, n - 1)) for n in (r.outer, r.tokens, r.inner)]
        victim.poke(region, int(pull.remote[row]), *where, flip=1 << data.draw(st.integers(0, 7)))
        counts = where[1] < engines.cells(r, int(pull.valid[row]))
    elif wrong == "key":
        pull.keys[row] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    elif wrong == "sum":
        victim.table[int(pull.remote[row])] ^= 1 << data.draw(st.integers(0, 62))

    expected, right = target.data(), {}
    for ranks, (parts, pull_) in zip(sources, jobs, strict=True):
        expected, found = engines.expect(target, {r.number: r for r in ranks}, parts, [pull_], expected)
        right |= found
    copies = Copies(target, shape)
    bad = copies.run(jobs)
    assert (target.data() == expected).all()
    all_bad = {b for parts in bad for blocks_ in parts for b in blocks_}
    assert all_bad == {block for block, good in right.items() if not good}
    touched = int(pull.local[row])
    if wrong == "nothing" or (wrong == "byte" and not counts):
        assert not all_bad
    elif wrong == "key":
        assert all_bad == {touched} and all(touched in b for b in bad[number])
    else:
        assert all_bad == {touched}
        assert [touched in b for b in bad[number]] == [each is part for each in jobs[number][0]]


PLAIN = Layout()


def simple(device, inner=64, tokens=4, layers=2, heads=1, blocks=9, here=PLAIN, there=PLAIN, ranks=(1, 1), rank=0):
    layers = [Layer(inner, tokens)] * layers
    source = engines.engine(layers, there, heads, ranks[0], blocks, device, 1)
    target = engines.engine(layers, here, heads, ranks[1], blocks, device, 5)[rank]
    return source, target, map_source_ranks((target.group,), (target.heads,), rank, [r.info() for r in source])


def copied(device, shape, n=7, **how):
    """Copies n blocks; asserts that all is right and nothing else was written."""
    source, target, parts = simple(device, **how)
    tokens = source[0].group.block_tokens
    pull = engines.pull(range(2, 2 + n), range(n), np.arange(n) * 3 + 1, [tokens] * n)
    for rank in source:
        rank.vouch(pull.remote, pull.keys, pull.valid)
    expected, _ = engines.expect(target, {r.number: r for r in source}, parts, [pull], target.data())
    copies = Copies(target, shape)
    assert copies.run([(parts, pull)]) == [[set() for _ in parts]]
    assert (target.data() == expected).all()
    return copies


@pytest.mark.parametrize("inner, tokens", [(16 << 10, 3), (40 << 10, 1), (8 << 10, 1), (656, 64), (20, 3)])
def test_peer_copy_default_shape_copies_pages_of_every_size(kernel_device, inner, tokens):
    """Larger than a tile of each form, exactly one, and less than one; 656 bytes a token is fp8_ds_mla."""
    copied(kernel_device, peer_copy_plan.SHAPE, inner=inner, tokens=tokens)


@pytest.mark.parametrize("here, there, flags", [
    (0, 0, {"SPLIT": False, "PAIRS": True}),
    (8, 0, {"SPLIT": False, "PAIRS": False}),
    (0, 8, {"SPLIT": False, "PAIRS": False}),
    (4, 16, {"SPLIT": True, "PAIRS": False}),
    (16, 12, {"SPLIT": True, "PAIRS": False}),
])  # fmt: skip
def test_peer_copy_is_independent_of_alignment(kernel_device, here, there, flags):
    copies = copied(kernel_device, peer_copy_plan.SHAPE, here=Layout(at=here), there=Layout(at=there))
    assert [flags | dict(f) for f in copies.flags] == [dict(f) for f in copies.flags]


@pytest.mark.parametrize("here", engines.ORDERS)
@pytest.mark.parametrize("there", engines.ORDERS)
def test_peer_copy_of_any_dimension_order_equals_reference(kernel_device, here, there):
    shape = peer_copy_plan.Shape(((64, 2),), warps=1, programs=3)
    copied(kernel_device, shape, inner=32, heads=3, here=Layout(here, (1, 0, 2)), there=Layout(there, (0, 2, 1)))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4)])
def test_peer_copy_between_different_head_divisions_equals_reference(kernel_device, ranks):
    for rank in range(ranks[1]):
        copies = copied(kernel_device, peer_copy_plan.SHAPE, heads=4, inner=64, tokens=16, ranks=ranks, rank=rank)
        dense = [dict(f)["TARGET_DENSE"] and dict(f)["SOURCE_DENSE"] for f in copies.flags]
        assert all(dense), "no address needs a division"


def test_peer_copy_is_independent_of_programs_and_tile_shape(kernel_device):
    for tiles in (((64, 1),), ((128, 4),), ((512, 2),)):
        for programs, warps in ((1, 1), (2, 4), (7, 4), (64, 8)):
            copied(kernel_device, peer_copy_plan.Shape(tiles, warps, programs), 5, inner=128, tokens=8, layers=3)


def test_peer_copy_of_more_rows_than_one_launch_runs_in_rounds(kernel_device):
    source, target, parts = simple(kernel_device, inner=32, blocks=16)
    n = 13
    pull = engines.pull(range(1, 1 + n), range(n), range(n), [4] * n)
    source[0].vouch(pull.remote, pull.keys, pull.valid)
    source[0].poke(0, 5, 0, 0, 0)
    expected, _ = engines.expect(target, {0: source[0]}, parts, [pull], target.data())
    copies = Copies(target, peer_copy_plan.Shape(((32, 4),), 1, 2), max_rows=8)
    assert copies.run([(parts, pull)]) == [[{6}]] and copies.rounds == 2
    assert (target.data() == expected).all()


def test_peer_copy_without_checksums_marks_all_blocks_bad(kernel_device):
    """For measurements: bytes arrive without verification."""
    source, target, parts = simple(kernel_device)
    pull = engines.pull([3, 4], [1, 2], [0, 0], [4, 4])
    expected, _ = engines.expect(target, {0: source[0]}, parts, [pull], target.data())
    copies = Copies(target, peer_copy_plan.SHAPE, checked=False)
    untouched = target.table.clone()
    assert copies.run([(parts, pull)]) == [[{3, 4}]]
    assert (target.table == untouched).all()
    target.table[[3, 4]] = 0  # as the reference has it, which found the checksums wrong
    assert (target.data() == expected).all()


def test_peer_copy_detects_source_overwritten_during_read(kernel_device):
    """Its table still says what was there: the words that were stored are the words that were summed."""
    source, target, parts = simple(kernel_device, layers=3)
    pull = engines.pull([1, 2, 3], [4, 5, 6], [7, 7, 7], [4, 4, 4])
    source[0].vouch(pull.remote, pull.keys, pull.valid)
    last = source[0].group.regions[-1]
    source[0].view.pages(last)[5].fill_(0)
    assert Copies(target, peer_copy_plan.SHAPE).run([(parts, pull)]) == [[{2}]]
    assert target.table[2] == 0 and target.table[1] == source[0].table[4]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 40))
def test_peer_copy_plan_divides_tiles_evenly_over_programs(segments, programs):
    groups, tiles = np.array(segments, dtype=np.int64).T
    wanted = [(s, g, t) for s, (m, k) in enumerate(segments) for g in range(m) for t in range(k)]
    found = []
    for segment, group, tile, count in peer_copy_plan.starts(groups, tiles, programs).tolist():
        at = wanted.index((segment, group, tile))
        found += wanted[at : at + count]
    assert found == wanted
    counts = peer_copy_plan.starts(groups, tiles, programs)[:, 3]
    assert counts.max() - counts.min() <= 1 and len(counts) == min(programs, len(wanted))


def test_copy_not_word_aligned_is_refused():
    table = np.zeros((1, len(peer_copy_plan.REGION_FIELDS)), dtype=np.int64)
    names = peer_copy_plan.REGION_FIELDS
    values = {"source_base": 2, "words": 8, "cell_words": 8, "tokens": 1, "word": 8, "outers": 1}
    for name, value in values.items():
        table[0, names.index(name)] = value
    with pytest.raises(ValueError, match="multiples of 4 bytes"):
        peer_copy_plan.plan(table)


def test_peer_copy_of_too_many_page_kinds_is_refused():
    """Segments for each kind of page, of every job, must fit the scratch on the device."""
    source, target, parts = simple(torch.device("cpu"))
    each = parts[0].groups[0].regions[0]
    regions = [replace(each, source=structs.replace(each.source, block_stride=256 + 16 * i)) for i in range(65)]
    part = replace(parts[0].groups[0], regions=tuple(regions))
    where = (2, source[0].table.data_ptr(), lambda a, n: a, torch.device("cpu"), peer_copy_plan.SHAPE)
    GroupTable(replace(part, regions=part.regions[:64]), *where)
    with pytest.raises(ValueError, match="65 kinds"):
        GroupTable(part, *where)


def test_peer_copy_from_larger_blocks_compiles_few_kernels():
    """Each takes about a second, for which all other pulls of the engine wait; there was one for each number of tokens
    before or behind those of our block."""

    def group(tokens):
        region = Region("l", 1 << 20, 8 * tokens * 512, 8, tokens * 512, 0, tokens, 512, 512)
        return GroupView(0, tokens, "full", None, (region,))

    heads = (HeadRange(0, 8),)
    info = RankInfo(0, "a", b"", "VRAM", 0, 9, (group(256),), CacheGeometry((), sys.byteorder), 1 << 30, heads)
    [part] = map_source_ranks((group(16),), heads, 0, [info])
    where = (9, 1 << 30, lambda a, n: a, torch.device("cpu"), peer_copy_plan.SHAPE)
    tables = [GroupTable(each, *where) for each in part.groups]
    flags = {kind.flags for table in tables for kind in table.kinds}
    assert max(len(table._cells) for table in tables) <= 3, "each pull goes through them: 1536 with 64 layers"
    assert len(part.groups) == 16 and len(flags) == len({dict(f)["COLUMNS"] for f in flags})


def test_peer_copy_without_triton_raises(monkeypatch):
    monkeypatch.setattr(peer_copy, "triton", None)
    with pytest.raises(RuntimeError, match="need Triton"):
        peer_copy.PeerPageCopier((None, None))

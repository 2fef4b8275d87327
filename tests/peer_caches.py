"""Engines' caches for tests of peer fetches: the same content divided over ranks, in any layout.

An engine's content is ``content(model, seed, blocks)``: by group and layer uint8 [blocks, heads, cells, inner]. A rank
has its heads and layers, in pages of any strides.
"""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull, PeerFetchJob
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.peer_fetch import process_memory


@dataclass(frozen=True)
class Group:
    layers: int = 2
    heads: int = 4  # 1 and "mla": on every rank
    cells: int = 4
    inner: int = 16
    cell_tokens: int = 1
    kind: str = "full"
    parts: int = 1  # of a block, each with ``cells``
    packed: bool = False  # the numbers (2 bytes) of a cell's tokens are in an order of their own: ``shuffled``

    @property
    def tokens(self) -> int:
        return self.cells * self.cell_tokens * self.parts


@dataclass(frozen=True)
class Layout:
    """``token``: tokens outside of heads in a page. ``blocks``: layers inside of blocks. ``gap``: bytes after each
    cell, after each row of them, and after each page."""

    token: bool = False
    blocks: bool = False
    gap: tuple[int, int, int] = (0, 0, 0)


def shuffled(region: Region) -> torch.Tensor | None:
    """As ``CacheView.token_layout``."""
    if not region.separable:
        return None
    numbers = region.inner // 2 // region.cell_tokens
    order = np.random.default_rng(region.cell_tokens).permutation(region.cell_tokens * numbers)
    return torch.from_numpy(order.reshape(region.cell_tokens, numbers))


@dataclass
class Rank:
    view: CacheView
    heads: tuple[m.HeadRange, ...]
    memory: CacheMemory
    info: m.RankInfo = field(init=False)

    def __post_init__(self):
        shared = process_memory.share([*self.view.spans, (self.memory.table.data_ptr(), 8 * self.view.num_blocks)])
        self.info = m.RankInfo(
            0, "", b"", "DRAM", 0, self.view.num_blocks, self.view.groups, self.view.geometry(),
            self.memory.table.data_ptr(), self.heads, shared,
        )  # fmt: skip


def content(model, seed, blocks):
    rng = np.random.default_rng(seed)
    return [
        {
            (layer, part): rng.integers(0, 256, (blocks, g.heads, g.cells, g.inner), dtype=np.uint8)
            for layer in range(g.layers)
            for part in range(g.parts)
        }
        for g in model
    ]


def head_range(group: Group, size: int, place: int) -> m.HeadRange:
    if group.kind == "mla":
        return m.HeadRange(0, 1)
    if group.heads >= size:
        return m.HeadRange(place * (group.heads // size), group.heads)
    return m.HeadRange(place // (size // group.heads), group.heads)


def held(group: Group, size: int) -> int:
    return 1 if group.kind == "mla" else max(1, group.heads // size)


def rank_of(model, kept, number, tp=1, stages=1, layout=None) -> Rank:
    """Rank ``number`` of tp * stages, with its part of ``kept``: ``content``, or a number of blocks of zeros."""
    layout = layout or Layout()
    blocks = kept if isinstance(kept, int) else len(next(iter(kept[0].values())))
    stage, place = divmod(number, tp)
    groups, storages, writes = [], [], []
    for index, g in enumerate(model):
        outer = held(g, tp)
        span = m.HeadRange(0, 1) if g.kind == "mla" else head_range(g, tp, place)
        mine = range(stage * g.layers // stages, (stage + 1) * g.layers // stages)
        names = [(layer, part) for layer in mine for part in range(g.parts)]
        cell_gap, row_gap, page_gap = layout.gap
        cell = g.inner + cell_gap
        counts = (g.cells, outer) if layout.token else (outer, g.cells)
        row = counts[1] * cell + row_gap
        page = counts[0] * row + page_gap
        strides = (cell, row) if layout.token else (row, cell)
        block_stride = page * len(names) if layout.blocks else page
        region_stride = page if layout.blocks else page * blocks
        memory = torch.zeros(page * len(names) * blocks + 64, dtype=torch.uint8)
        base = -(-memory.data_ptr() // 64) * 64
        regions = tuple(
            Region(
                f"g{index}.l{layer}", base + at * region_stride, block_stride, outer,
                strides[0] if outer > 1 else 0, part * g.cells * g.cell_tokens, g.cells,
                strides[1] if g.cells > 1 else 0, g.inner, g.cell_tokens, "shuffled" if g.packed else "", "uint8",
                separable=g.packed,
            )
            for at, (layer, part) in enumerate(names)
        )  # fmt: skip
        groups.append(GroupView(index, g.tokens, g.kind, None, regions))
        storages.append(memory.untyped_storage())
        writes.append((regions, names, span, outer))
    view = CacheView(groups, blocks, "cpu", storages, token_layout=shuffled)
    if not isinstance(kept, int):
        for g, (regions, names, span, outer) in enumerate(writes):
            for region, name in zip(regions, names, strict=True):
                view.pages(region).numpy()[:] = kept[g][name][:, span.first : span.first + outer]
    made = Rank(view, tuple(span for _, _, span, _ in writes), CacheMemory(view, host_buffer=False))
    made.info = msgspec.structs.replace(made.info, rank=number)
    return made


def ranks_of(model, kept, tp=1, stages=1, layout=None) -> list[Rank]:
    return [rank_of(model, kept, number, tp, stages, layout) for number in range(tp * stages)]


def expected(model, kept, rank: Rank, number, tp, stages, group, block):
    """By region of the rank's group: uint8 [outer, cells, inner] of a block of the content."""
    stage, place = divmod(number, tp)
    g = model[group]
    span = m.HeadRange(0, 1) if g.kind == "mla" else head_range(g, tp, place)
    mine = range(stage * g.layers // stages, (stage + 1) * g.layers // stages)
    names = [(layer, part) for layer in mine for part in range(g.parts)]
    return [kept[group][name][block, span.first : span.first + held(g, tp)] for name in names]


def keys_of(ids):
    return np.array([0x9E3779B97F4A7C15 * (int(i) + 1) & (1 << 64) - 1 for i in ids], np.uint64)


def sums_of(rank: Rank, model, ids, valid=None):
    """Make the checksums of these blocks: block b is of group b modulo their number."""
    for group, g in enumerate(model):
        blocks = np.array([i for i in ids if i % len(model) == group], np.int64)
        if len(blocks):
            tokens = np.full(len(blocks), g.tokens) if valid is None else np.array([valid[i] for i in blocks])
            batch = ChecksumJob(group, blocks, keys_of(blocks), tokens.astype(np.int32))
            assert rank.memory.compute_checksums([batch], None).done()


def pull_of(local, remote, tokens, group=0, keys=None) -> GroupPull:
    tokens = [tokens] * len(local) if isinstance(tokens, int) else tokens
    keys = keys_of(remote) if keys is None else keys
    return GroupPull(group, np.array(local, np.int64), np.array(remote, np.int64), keys, np.array(tokens, np.int32))


def order_of(*groups, name="r", source="s/1", timeout=20.0, synchronous=False) -> PeerFetchJob:
    return PeerFetchJob(name, source, list(groups), timeout, synchronous)

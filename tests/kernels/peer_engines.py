"""Engines with any layout and any number of ranks whose caches are bytes in one tensor, and what a copy between two of
them must leave behind, by the plain reference."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm_kvtier.kernels import checksum_reference, peer_copy_reference

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import SourceRank
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared, SharedSpan
from vllm_kvtier.worker.cache_view import CacheView

ALIGN = 64
ORDERS = ("block-outer-token", "block-token-outer", "outer-block-token")


@dataclass(frozen=True)
class Layer:
    """What all engines of one model share. ``parts`` regions a block, of cells of ``cell_tokens`` tokens."""

    inner: int
    tokens: int
    parts: int = 1
    cell_tokens: int = 1

    @property
    def cells(self) -> int:
        return self.tokens // self.parts // self.cell_tokens


@dataclass(frozen=True)
class Layout:
    """How one engine lays a layer out; gaps in units of ``unit`` bytes after a cell, a line and a page."""

    order: str = ORDERS[0]
    gaps: tuple[int, int, int] = (0, 0, 0)
    unit: int = 16
    at: int = 0


class Rank:
    """One rank's cache and table of checksums, in one tensor."""

    def __init__(self, number, layers, layout: Layout, heads: HeadRange, count: int, num_blocks: int, device, seed):
        self.number, self.heads, self.num_blocks = number, heads, num_blocks
        regions, at = [], layout.at
        for i, layer in enumerate(layers):
            more, at = _regions(f"l{i}", layer, layout, count, num_blocks, at)
            regions += more
        table_at = -(-at // ALIGN) * ALIGN
        nbytes = table_at + num_blocks * 8 + 2 * ALIGN
        data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.memory = torch.from_numpy(data).to(device)
        start = -self.memory.data_ptr() % ALIGN
        self.base = self.memory.data_ptr() + start
        regions = tuple(_moved(r, self.base) for r in regions)
        self.group = GroupView(0, layers[0].tokens, "full", None, regions)
        self.view = CacheView([self.group], num_blocks, device, [self.memory.untyped_storage()])
        self.table = self.memory[start + table_at : start + table_at + num_blocks * 8].view(torch.int64)
        self.table.fill_(-7)

    def pages(self, data: np.ndarray, region: Region) -> np.ndarray:
        """uint8 [blocks, outer, cells, inner] over a copy of the memory."""
        at = region.base - self.memory.data_ptr()
        shape = (self.num_blocks, region.outer, region.tokens, region.inner)
        strides = (region.block_stride, region.outer_stride, region.token_stride, 1)
        return np.lib.stride_tricks.as_strided(data[at:], shape, strides)

    def data(self) -> np.ndarray:
        return self.memory.cpu().numpy().copy()

    def sum_of(self, data: np.ndarray, block: int, key: int, valid: int) -> int:
        pages = [self.pages(data, r)[block] for r in self.group.regions]
        return checksum_reference.block_checksum(pages, [cells(r, valid) for r in self.group.regions], key)

    def vouch(self, blocks, keys, valid) -> None:
        """Writes the blocks' checksums into the table."""
        data = self.data()
        for block, key, tokens in zip(blocks, keys, valid, strict=True):
            total = self.sum_of(data, int(block), int(key), int(tokens))
            self.table[int(block)] = np.uint64(total).view(np.int64).item()

    def poke(self, region: int, block: int, o: int, t: int, i: int, flip: int = 1) -> None:
        r = self.group.regions[region]
        at = r.base + block * r.block_stride + o * r.outer_stride + t * r.token_stride + i - self.memory.data_ptr()
        self.memory[at] ^= flip

    def info(self, shared: Shared | None = None) -> RankInfo:
        spans = (SharedSpan(self.memory.data_ptr(), self.memory.numel(), b""),)
        shared = shared or Shared("node", 1, 1, "", spans)
        geometry = CacheGeometry((), "little")
        where = (self.table.data_ptr(), (self.heads,), shared)
        return RankInfo(self.number, "", b"", "VRAM", 0, self.num_blocks, (self.group,), geometry, *where)


def engine(layers, layout, total_heads: int, ranks: int, num_blocks: int, device, seed: int) -> list[Rank]:
    """All ranks; with fewer heads than ranks each is held by several."""
    made = []
    for rank in range(ranks):
        count = max(1, total_heads // ranks)
        first = rank * total_heads // ranks
        made.append(Rank(rank, layers, layout, HeadRange(first, total_heads), count, num_blocks, device, seed + rank))
    return made


def same_heads(ranks: list[Rank]) -> None:
    """Ranks that hold the same head hold the same bytes."""
    first = {}
    for rank in ranks:
        other = first.setdefault(rank.heads.first, rank)
        for mine, theirs in zip(rank.group.regions, other.group.regions, strict=True):
            rank.view.pages(mine).copy_(other.view.pages(theirs).clone())


def cells(region: Region, valid: int) -> int:
    return sum(region.first_token + t * region.cell_tokens < valid for t in range(region.tokens))


def expect(target: Rank, sources: dict[int, Rank], parts: list[SourceRank], pulls: list[GroupPull], data: np.ndarray):
    """What a copy does: (memory of ``target`` that began as ``data``, {our block: whether it is right})."""
    right: dict[int, bool] = {}
    table_at = target.table.data_ptr() - target.memory.data_ptr()
    table = data[table_at : table_at + 8 * target.num_blocks].view(np.int64)
    for part in parts:
        rank = sources[part.source.rank]
        theirs, told = rank.data(), rank.table.cpu().numpy().view(np.uint64)
        for group in part.groups:
            for pull in pulls:
                for local, remote, key, valid in zip(pull.local, pull.remote, pull.keys, pull.valid, strict=True):
                    pieces = [
                        peer_copy_reference.Piece(
                            rank.pages(theirs, r.source)[remote],
                            None if r.target is None else target.pages(data, r.target)[local],
                            r.first_outer, r.outers, r.target_outer,
                        )
                        for r in group.regions
                    ]  # fmt: skip
                    counts = [cells(r.source, int(valid)) for r in group.regions]
                    good, total = peer_copy_reference.copy(pieces, counts, int(key), int(told[remote]))
                    right[int(local)] = right.get(int(local), True) and good
                    entry = np.uint64(total).view(np.int64) if group.identical_layout and good else 0
                    table[local] = entry
    return data, right


def pull(local, remote, keys, valid) -> GroupPull:
    arrays = (np.array(local, np.int64), np.array(remote, np.int64))
    return GroupPull(0, *arrays, np.array(keys, np.uint64), np.array(valid, np.int32))


def _regions(name: str, layer: Layer, layout: Layout, outer: int, num_blocks: int, at: int):
    size = {"block": num_blocks, "outer": outer, "token": layer.cells}
    stride, step = {}, layer.inner
    for dim, gap in zip(reversed(layout.order.split("-")), layout.gaps, strict=True):
        stride[dim] = step + gap * layout.unit
        step = stride[dim] * size[dim]
    found = [
        Region(
            layer=name,
            base=at + part * step,
            block_stride=stride["block"],
            outer=outer,
            outer_stride=stride["outer"] if outer > 1 else 0,
            first_token=part * layer.cells * layer.cell_tokens,
            tokens=layer.cells,
            token_stride=stride["token"] if layer.cells > 1 else 0,
            inner=layer.inner,
            cell_tokens=layer.cell_tokens,
        )
        for part in range(layer.parts)
    ]
    return found, at + layer.parts * step


def _moved(region: Region, base: int) -> Region:
    fields = {f: getattr(region, f) for f in region.__struct_fields__}
    return Region(**{**fields, "base": region.base + base})

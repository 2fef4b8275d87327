"""What is measured: shapes of models, a cache and a pool with orders of copies, and a copier that does them."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent / "copy"))

from ours import Ours

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, PartLayout, slot_layout
from vllm_kvtier.worker.cache_view import CacheView


@dataclass(frozen=True)
class Shape:
    """A rank's KV cache: layers of pages of ``tokens`` x ``heads`` cells, K and V of a token and head together."""

    name: str
    layers: int
    heads: int
    size: int = 128
    tokens: int = 16
    dtype: str = "bfloat16"

    @property
    def page(self) -> int:
        return self.heads * self.tokens * 2 * self.size * 2

    def group(self, base: int, blocks: int) -> GroupView:
        cell = 2 * self.size * 2
        fields = (Field("k", self.size), Field("v", self.size))
        regions = tuple(
            Region(
                f"layer{i}", base + i * blocks * self.page, self.page, self.heads,
                self.tokens * cell if self.heads > 1 else 0, 0, self.tokens, cell, cell,
                dtype=self.dtype, fields=fields,
            )
            for i in range(self.layers)
        )  # fmt: skip
        return GroupView(0, self.tokens, "full", None, regions)


SHAPES = [Shape("Qwen3-8B", 36, 8), Shape("70B, TP 8", 80, 1)]


class Bench:
    """Random blocks and slots of one shape and codec; all that ``ours.Ours`` wants."""

    def __init__(
        self, shape: Shape, codec: codecs.Codec, stored: int, cache: torch.Tensor, pool: tuple[int, int, torch.Tensor]
    ):
        """``stored``: bytes in slots of one measurement and direction."""
        self.shape, self.codec, self.pool = shape, codec, pool
        self.page, self.layers = shape.page, shape.layers
        self.num_blocks = blocks = cache.numel() // (self.page * self.layers)
        group = shape.group(cache.data_ptr(), blocks)
        self.view = CacheView([group], blocks, cache.device, [cache.untyped_storage()])
        self.layout: PartLayout = part_layout(group, codec)
        slot_pages = slot_layout([self.layout]).pages
        per_piece = PIECE_BYTES // PAGE // slot_pages
        places = np.arange(pool[1] // PIECE_BYTES * per_piece)
        slots = places // per_piece * (PIECE_BYTES // PAGE) + places % per_piece * slot_pages
        self.all_slots = slots[slots > 0]
        rng = np.random.default_rng(1)
        order, chosen = rng.permutation(self.all_slots), rng.permutation(blocks)
        self.count = min(stored // self.layout.nbytes, blocks // 2, len(order) // 2)
        self.slots = {"store": order[: self.count], "load": order[self.count : 2 * self.count]}
        self.blocks = {"store": chosen[: self.count], "load": chosen[self.count : 2 * self.count]}
        self.keys = rng.integers(0, 1 << 63, 2 * self.count, dtype=np.uint64)
        self.nbytes = self.count * group.block_bytes  # logical
        self.bits = 8 * self.layout.nbytes / (group.block_bytes / 2)


class Coded(Ours):
    """Checked against the formats' reference; what a raw copy does is checked by benchmarks/copy."""

    def check(self) -> None:
        bench, copier = self.bench, self.copier
        n = min(bench.count, 64)
        source, target = bench.blocks["store"][:n], bench.blocks["load"][:n]
        if not bench.layout.encoded:
            super().check()
            self._fill(source)
            return
        n = 24
        source, target = source[:n], target[:n]
        self._fill(source)  # loads of what no codec made have left anything there
        slots, keys = bench.slots["store"][:n], bench.keys[:n].copy()
        copier.store(0, source, keys, slots).wait()
        load = copier.load(0, target, keys, slots)
        load.wait()
        if load.bad.any():
            raise AssertionError(f"{load.bad} bad blocks")
        view, memory = bench.view, bench.pool[2].view(-1)
        different = numbers = 0
        for part in (*bench.layout.encoded[:2], *bench.layout.encoded[-2:]):
            region = view.groups[0].regions[part.region]
            before, after = (self._lines(region, part, blocks) for blocks in (source, target))
            data, scales = part.format.encode(before)
            wanted = part.format.decode(data, scales, before.dtype)
            unlike = (wanted.view(torch.int16) != after.view(torch.int16)) & ~(wanted.isnan() & after.isnan())
            different += int(unlike.sum())
            numbers += wanted.numel()
            for i in (0, n - 1):
                at = int(slots[i]) * PAGE + part.data_offset
                rows = slice(i * part.lines, (i + 1) * part.lines)
                if (memory[at : at + part.data_bytes] != data[rows].reshape(-1)).float().mean() > 1e-3:
                    raise AssertionError(f"slot {slots[i]} does not hold what {part.format.name} makes of the block")
        if different:
            # A rotation sums in another order on a GPU; anything else is exact.
            print(f"  {bench.codec.name}: {different} of {numbers} numbers differ from the reference", flush=True)
            if different > 2e-3 * numbers:
                raise AssertionError(f"{different} of {numbers} numbers differ from the reference")
        address = int(slots[0]) * PAGE + bench.layout.encoded[-1].scale_offset
        memory[address] ^= 1
        keys[n - 1] ^= np.uint64(1)
        load = copier.load(0, target, keys, slots)
        load.wait()
        if np.flatnonzero(load.bad).tolist() != [0, n - 1]:
            raise AssertionError(f"bad {np.flatnonzero(load.bad)} instead of 0 and {n - 1}")
        memory[address] ^= 1

    def _fill(self, blocks: np.ndarray) -> None:
        for region in self.bench.view.groups[0].regions:
            pages = self.bench.view.pages(region).view(torch.bfloat16)
            pages[torch.from_numpy(blocks).to(pages.device)] = normal((len(blocks), *pages.shape[1:]), pages.device)
        torch.cuda.synchronize()

    def _lines(self, region: Region, part, blocks: np.ndarray) -> torch.Tensor:
        pages = self.bench.view.pages(region)[torch.from_numpy(blocks).to(self.bench.view.device)].cpu()
        cells = pages.view(DTYPES[region.dtype])
        count = region.fields[part.field].count
        return cells[..., part.offset : part.offset + count].reshape(-1, part.line)


def fill(cache: torch.Tensor) -> None:
    """Numbers like those of a KV cache: normal, some channels larger than others."""
    numbers = cache.view(torch.bfloat16).view(-1, 128)
    torch.manual_seed(0)
    step = 1 << 22
    for at in range(0, len(numbers), step):
        some = numbers[at : at + step]
        some.copy_(normal(some.shape, cache.device))


def normal(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    channels = torch.exp(torch.randn(shape[-1], device=device, generator=torch.Generator(device).manual_seed(3)))
    return (torch.randn(shape, device=device) * channels).to(torch.bfloat16)

"""Copies between an engine's cache and slots of the store's memory, raw and through codecs.

The copier is that of the engines, which computes and verifies checksums. The limit is a pinned copy on a GPU, and
``memcpy`` on one core without a GPU, since an engine copies on one core.
"""

import ctypes
import mmap
import time
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.bench.row import Row, rates, repeat
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, PartLayout, slot_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.base import make_copier
from vllm_kvtier.worker.device.cpu_threads import one_core
from vllm_kvtier.worker.tuning import Tuning

# Qwen3-8B's cache: pages of 64 KiB, blocks of 2.25 MiB.
LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS = 36, 8, 128, 16
CELL_BYTES = 2 * HEAD_SIZE * 2  # of a token and head
BLOCK_BYTES = LAYERS * HEADS * BLOCK_TOKENS * CELL_BYTES
CALLS_AHEAD = 3  # concurrent calls of a device, as in an engine
CALL_BYTES = 64 << 20  # of one call to a device
# More than a processor's caches, and few enough for the slowest codec; a GPU's link needs more.
_HOST_BLOCKS, _HOST_ENCODED_BLOCKS, _DEVICE_BLOCKS = 48, 12, 512


class Pool:
    """Memory like the store's, with ``count`` slots of ``pages``, none across a piece; all slots are touched."""

    def __init__(self, count: int, pages: int):
        positions = np.arange(count + 1)  # one more, because page 0 is no slot
        per_piece = PIECE_BYTES // PAGE // pages
        slots = positions // per_piece * (PIECE_BYTES // PAGE) + positions % per_piece * pages
        self.slots = slots[1:]
        self.nbytes = -(-(int(slots[-1]) + pages) // (PIECE_BYTES // PAGE)) * PIECE_BYTES
        self._mapping = mmap.mmap(-1, self.nbytes)
        self.buffer = memoryview(self._mapping)
        self.address = ctypes.addressof((ctypes.c_char * self.nbytes).from_buffer(self._mapping))
        np.frombuffer(self.buffer, np.uint8)[: (int(slots[-1]) + pages) * PAGE : PAGE] = 1


@dataclass
class Scene:
    """A cache of random numbers."""

    view: CacheView
    blocks: int  # half of the cache's blocks are stored; the others are loaded into
    memory: torch.Tensor

    @property
    def device(self) -> str:
        return self.view.device.type


def scene(cuda: bool, encoded: bool) -> Scene:
    """Raises KVTierError if memory is short."""
    blocks = _DEVICE_BLOCKS if cuda else _HOST_ENCODED_BLOCKS if encoded else _HOST_BLOCKS
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    try:
        tile = torch.randn(BLOCK_BYTES // 2, dtype=torch.bfloat16, device=device)
        memory = tile.repeat(2 * blocks).view(torch.uint8)
    except (RuntimeError, MemoryError) as error:
        raise KVTierError(f"no room for a cache of {2 * blocks * BLOCK_BYTES >> 20} MiB: {error}") from error
    page = BLOCK_BYTES // LAYERS
    regions = tuple(
        Region(
            f"layer{i}", memory.data_ptr() + i * 2 * blocks * page, page, HEADS, BLOCK_TOKENS * CELL_BYTES, 0,
            BLOCK_TOKENS, CELL_BYTES, CELL_BYTES,
            dtype="bfloat16", fields=(Field("k", HEAD_SIZE), Field("v", HEAD_SIZE)),
        )
        for i in range(LAYERS)
    )  # fmt: skip
    group = GroupView(0, BLOCK_TOKENS, "full", None, regions)
    return Scene(CacheView([group], 2 * blocks, device, [memory.untyped_storage()]), blocks, memory)


class CopyRunner:
    """The engines' copier over a scene, blocks in random order. ``tuning``: as in ``make_copier``."""

    def __init__(self, on: Scene, codec: str, tuning: Tuning | None = None):
        group = on.view.groups[0]
        self._layout: PartLayout = part_layout(group, codecs.get(codec))
        pages = slot_layout([self._layout]).pages
        random = np.random.default_rng(1)
        mapped = Pool(on.blocks, pages)
        self._slots = random.permutation(mapped.slots)
        order = random.permutation(2 * on.blocks)
        self._blocks = {"store": order[: on.blocks], "load": order[on.blocks :]}
        self._keys = random.integers(0, 1 << 63, on.blocks, dtype=np.uint64)
        pool = (mapped.address, mapped.nbytes, mapped)
        if on.device == "cuda":  # a CUDA copier keeps a tensor alive
            pool = (mapped.address, mapped.nbytes, torch.frombuffer(mapped.buffer, dtype=torch.uint8))
        self.copier = make_copier(on.view, pool, [self._layout], [0], tuning)
        for start in range(0, mapped.nbytes, PIECE_BYTES):
            self.copier.register(start, PIECE_BYTES)
        self.copier.warm_up()
        least = CALL_BYTES if on.device == "cuda" else self.copier.piece_bytes
        self._step = min(on.blocks, max(1, least // self._layout.nbytes))
        self.count, self._wait = on.blocks, 0.0 if on.device == "cpu" else 20e-6
        self._ahead = CALLS_AHEAD if on.device == "cuda" else 1
        self._at = 0
        self._stored = False

    def store(self, seconds: float) -> tuple[int, float]:
        return self._run("store", seconds)

    def load(self, seconds: float) -> tuple[int, float]:
        """Load stored blocks; store all of them first if needed. Raises KVTierError for a wrong checksum."""
        self.store_all()
        return self._run("load", seconds)

    def store_all(self) -> None:
        """If that was not done yet: what is loaded must have been stored."""
        if not self._stored:
            for at in range(0, self.count, self._step):
                self._finish(self.enqueue("store", at, self._step)[0])
            self._stored = True

    def _run(self, direction: str, seconds: float) -> tuple[int, float]:
        begun, moved, under_way = time.perf_counter(), 0, []
        while True:
            more = time.perf_counter() - begun < seconds or not moved
            if more and len(under_way) < self._ahead:
                copy, blocks = self.enqueue(direction, self._at, self._step)
                under_way.append(copy)
                moved += blocks * BLOCK_BYTES
                self._at = (self._at + blocks) % self.count
            elif under_way:
                self._finish(under_way.pop(0))
            else:
                return moved, time.perf_counter() - begun

    def enqueue(self, direction: str, at: int, count: int, after: "torch.cuda.Event | None" = None):
        """Begin to copy ``count`` blocks, or those that are left, from number ``at`` on; the copy and their number."""
        call = self.copier.store if direction == "store" else self.copier.load
        rows = slice(at, min(at + count, self.count))
        return call(0, self._blocks[direction][rows], self._keys[rows], self._slots[rows], after), rows.stop - at

    def _finish(self, copy) -> None:
        while not copy.done():
            time.sleep(self._wait)  # engines poll a device as often
        if copy.bad is not None and copy.bad.any():
            raise KVTierError("a block came back with a wrong checksum: this machine's memory or link is broken")

    def close(self) -> None:
        self.copier.close()


def limits(on: Scene) -> dict:
    """Plain copies of as much, whose rates are the machine's limits."""
    if on.device == "cuda":
        host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
        device = on.memory[: host.numel()]

        def pinned(to, source, seconds: float) -> tuple[int, float]:
            def once() -> int:
                to.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                return host.numel()

            return repeat(once, seconds)

        return {
            "limit store": lambda seconds: pinned(host, device, seconds),
            "limit load": lambda seconds: pinned(device, host, seconds),
        }
    here = on.memory.numpy()[: on.memory.numel() // 2]
    there = np.ones_like(here)

    def memcpy(seconds: float) -> tuple[int, float]:
        def once() -> int:
            ctypes.memmove(there.ctypes.data, here.ctypes.data, here.size)
            return here.size

        return repeat(once, seconds)

    return {"limit store": memcpy, "limit load": memcpy}


def measure(
    seconds: float, cuda: bool | None = None, names: tuple[str, ...] = (codecs.Codec.RAW,), bench: str = "copy"
) -> list[Row]:
    """Rates out of the cache (store) and into it (load) for each codec, in rounds that alternate with the limits."""
    cuda = torch.cuda.is_available() if cuda is None else cuda
    on = scene(cuda, names != (codecs.Codec.RAW,))
    word = "a pinned copy" if cuda else "memcpy on one core"
    runners = {name: CopyRunner(on, name) for name in names}
    ways = limits(on)
    for name, runner in runners.items():
        ways[f"{name} store"], ways[f"{name} load"] = runner.store, runner.load
    try:
        with one_core():
            found = rates(ways, seconds)
    finally:
        for runner in runners.values():
            runner.close()
    return [
        Row(
            bench,
            way if names == (codecs.Codec.RAW,) else f"{name} {way}",
            found[f"{name} {way}"],
            found[f"limit {way}"],
            word,
        )
        for name in names
        for way in ("store", "load")
    ]


def measure_codecs(seconds: float, cuda: bool | None = None) -> list[Row]:
    """The same for each codec but raw, in bytes of KV before encoding."""
    return measure(seconds, cuda, tuple(name for name in codecs.names() if name != codecs.Codec.RAW), "codec")

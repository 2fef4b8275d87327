"""A source of blocks in a process of its own, on a GPU, and the content of its blocks in each of their lives."""

import os

import numpy as np
import torch

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.peer_fetch import cuda_ipc

LAYERS, BLOCKS, HEADS, TOKENS, INNER = 8, 512, 8, 16, 128
PAGE = HEADS * TOKENS * INNER
HEAD_RANGES = (HeadRange(0, HEADS),)


def make_view(device: torch.device) -> CacheView:
    memory = torch.zeros(LAYERS * BLOCKS * PAGE, dtype=torch.uint8, device=device)
    page, head = PAGE, TOKENS * INNER
    regions = tuple(
        Region(f"l{i}", memory.data_ptr() + i * BLOCKS * page, page, HEADS, head, 0, TOKENS, INNER, INNER)
        for i in range(LAYERS)
    )
    return CacheView([GroupView(0, TOKENS, "full", None, regions)], BLOCKS, device, [memory.untyped_storage()])


def keys_of(blocks: np.ndarray, lives: np.ndarray) -> np.ndarray:
    return (blocks.astype(np.uint64) << np.uint64(32)) + lives.astype(np.uint64) + np.uint64(1)


def content(layer: int, blocks: torch.Tensor, lives: torch.Tensor) -> torch.Tensor:
    """int64 [n, words of a page]: other numbers for each layer, block and life of the block."""
    seed = (lives.to(torch.int64) * 1_000_003 + blocks * 7919 + layer * 104_729 + 1)[:, None]
    return torch.arange(1, PAGE // 8 + 1, dtype=torch.int64, device=blocks.device)[None, :] * 0x9E3779B97F4A7C1 * seed


def words(view: CacheView, layer: int) -> torch.Tensor:
    """int64 [blocks, words of a page] over the cache."""
    return view.pages(view.groups[0].regions[layer]).view(BLOCKS, PAGE).view(torch.int64)


def serve(pipe, gpu: int, lives: torch.Tensor, restless: bool) -> None:
    """Shares a full cache; ``restless``: gives blocks another content all the time, and counts ``lives`` (shared with
    the reader) before it does. Ends with the pipe's first message."""
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    view = make_view(device)
    table = torch.zeros(BLOCKS, dtype=torch.int64, device=device)
    checksums = BlockChecksums(view)

    def write(ids: np.ndarray) -> None:
        lives[ids] += 1
        index, now = torch.from_numpy(ids).to(device), lives[ids].to(device)
        for layer in range(LAYERS):
            words(view, layer)[index] = content(layer, index, now)
        full = np.full(len(ids), TOKENS)
        table[index] = checksums.compute(0, ids, keys_of(ids, lives[ids].numpy()), full)

    write(np.arange(BLOCKS))
    torch.cuda.synchronize()
    spans = [*view.spans, (table.data_ptr(), BLOCKS * 8)]
    shared = cuda_ipc.share(spans, device)
    where = (table.data_ptr(), HEAD_RANGES, shared)
    info = RankInfo(0, "", b"", "VRAM", gpu, BLOCKS, view.groups, view.geometry(), *where)
    pipe.send((os.getpid(), info))
    rng = np.random.default_rng(1)
    while not pipe.poll(0 if restless else None):
        write(rng.permutation(BLOCKS)[:8])
        torch.cuda.synchronize()

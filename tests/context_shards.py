"""Ranks of engines with decode context parallelism: caches with vLLM's shapes, filled by vLLM's own rule for slots."""

import types
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
from cache_shapes import MLAAttentionSpec, config_of, full, group
from peer_caches import Rank
from vllm.v1.worker.gpu import block_table

from vllm_kvtier.vllm_compat.layout.context_parallel import ContextShard
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.vllm_compat.worker_info import heads
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

LAYERS, WIDTH = 2, 8  # of a token and head: bytes of K and V, or of the latent


class Pointer:
    def __init__(self, array, at=0):
        self.array, self.at = np.asarray(array), at

    def __add__(self, more):
        return Pointer(self.array, self.at + more)


def _load(pointer, mask=True, other=0):
    inside = mask & (np.asarray(pointer.at) < pointer.array.size)
    found = pointer.array.reshape(-1)[np.where(inside, pointer.at, 0)]
    return np.where(inside, found, found.dtype.type(other))[()]


def _store(pointer, values, mask=True):
    mask = np.broadcast_to(mask, np.shape(pointer.at))
    pointer.array[pointer.at[mask]] = np.broadcast_to(values, mask.shape)[mask]


def slots(blocks, tokens: int, block_size: int, shard: ContextShard) -> np.ndarray:
    """int64 [tokens]: where this rank keeps each token of a request with these blocks; -1: nowhere. By the kernel of
    vLLM's model runner, run as Python."""
    kernel = block_table._compute_slot_mappings_kernel
    kernel = getattr(kernel, "fn", kernel)
    language = SimpleNamespace(
        program_id=lambda axis: 0, num_programs=lambda axis: 2, arange=np.arange, where=np.where, load=_load,
        store=_store, int32=None, constexpr=None,
    )  # fmt: skip
    own = {**kernel.__globals__, "tl": language, "_load_ptr": lambda pointer, dtype: Pointer(blocks)}
    found = np.full(tokens, -2)
    types.FunctionType(kernel.__code__, own)(
        tokens, Pointer([0]), Pointer([0, tokens]), Pointer(np.arange(tokens)), Pointer([0]), Pointer([len(blocks)]),
        Pointer([block_size]), Pointer([True]), Pointer([True]), Pointer(found), tokens, shard.rank, shard.size,
        shard.interleave, -1, 1024,
    )  # fmt: skip
    assert (found > -2).all()
    return found


@dataclass(frozen=True)
class Shape:
    """``kv_heads``: 0 for MLA. ``block``: tokens of a page, in ``parts`` kernel blocks. ``tokens_first``: in pages."""

    tp: int = 2
    dcp: int = 2
    interleave: int = 4
    block: int = 4
    parts: int = 1
    kv_heads: int = 0
    tokens_first: bool = False

    @property
    def virtual(self) -> int:
        return self.block * self.dcp

    @property
    def kernel_block(self) -> int:
        return self.block // self.parts

    @property
    def in_runs(self) -> bool:
        """Whether a page holds consecutive tokens."""
        return self.dcp == 1 or self.interleave == self.kernel_block

    def held(self, position: int) -> range:
        if not self.kv_heads:
            return range(1)
        count = max(1, self.kv_heads // self.tp)
        return range(f := position * self.kv_heads // self.tp, f + count)

    @cached_property
    def config(self):
        names = [f"l{n}" for n in range(LAYERS)]
        made = config_of("FLASH_ATTN" if self.kv_heads else "TRITON_MLA", names)
        made.parallel_config.tensor_parallel_size = self.tp
        text = SimpleNamespace(to_dict=dict)
        made.model_config = SimpleNamespace(
            hf_text_config=text, get_total_num_kv_heads=lambda: max(1, self.kv_heads)
        )
        made.speculative_config = None
        return made

    @property
    def spec(self):
        if self.kv_heads:
            return full(self.block, len(self.held(0)), WIDTH // 2, torch.uint8)
        return MLAAttentionSpec(block_size=self.block, num_kv_heads=1, head_size=WIDTH, dtype=torch.uint8)

    def shard(self, position: int) -> ContextShard:
        return ContextShard(self.dcp, position % self.dcp, self.interleave)


class ShardedRank:
    """``shard``: which its description says; by default the one that it is."""

    def __init__(self, shape: Shape, position: int, blocks: int, shard: ContextShard | None = None):
        self.shape, self.shard, self.heads = shape, shape.shard(position), list(shape.held(position))
        sizes = (blocks * shape.parts, len(self.heads), shape.kernel_block, WIDTH)
        if shape.tokens_first:
            self.caches = [torch.zeros(sizes[0], sizes[2], sizes[1], WIDTH, dtype=torch.uint8) for _ in range(LAYERS)]
            self.caches = [cache.permute(0, 2, 1, 3) for cache in self.caches]
        else:
            self.caches = [torch.zeros(sizes, dtype=torch.uint8) for _ in range(LAYERS)]
        named = {f"l{n}": cache for n, cache in enumerate(self.caches)}
        groups = [group(named, shape.spec)]
        config = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        view = cache_view(named, config, shape.config, "cpu", shard or self.shard)
        self.rank = Rank(view, heads(shape.config, view.groups, position), CacheMemory(view, False))
        self.view, self.memory, self.info = self.rank.view, self.rank.memory, self.rank.info

    def _slots(self, blocks, tokens: int) -> np.ndarray:
        parts = self.shape.parts
        kernel_blocks = (np.asarray(blocks)[:, None] * parts + np.arange(parts)).ravel()
        return slots(kernel_blocks, tokens, self.shape.kernel_block, self.shard)

    def write(self, blocks, content: np.ndarray, first: int = 0) -> None:
        """``content``: uint8 [layers, tokens, heads, width] of a request with these (virtual) blocks, written from
        token ``first`` on."""
        at = self._slots(blocks, content.shape[1])
        mine = np.flatnonzero((at >= 0) & (np.arange(len(at)) >= first))
        for cache, layer in zip(self.caches, torch.from_numpy(content), strict=True):
            page, place = np.divmod(at[mine], self.shape.kernel_block)
            cache.permute(0, 2, 1, 3)[page, place] = layer[mine][:, self.heads]

    def wrong(self, blocks, content: np.ndarray, first: int = 0) -> np.ndarray:
        """The tokens of this rank, from ``first`` on, whose KV is not that of ``content``."""
        at = self._slots(blocks, content.shape[1])
        mine = np.flatnonzero((at >= 0) & (np.arange(len(at)) >= first))
        page, place = np.divmod(at[mine], self.shape.kernel_block)
        right = np.ones(len(mine), bool)
        for cache, layer in zip(self.caches, torch.from_numpy(content), strict=True):
            found = cache.permute(0, 2, 1, 3)[page, place]
            right &= (found == layer[mine][:, self.heads]).flatten(1).all(1).numpy()
        return mine[~right]

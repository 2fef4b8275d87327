"""Fetches between caches as vLLM lays them out: any order of dimensions to any other, and other numbers of ranks."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from cache_shapes import ORDERS, allocate, config_of, full, group, new_config, new_layouts
from peer_caches import keys_of, order_of, pull_of

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.vllm_compat.worker_info import heads
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.peer_fetch import process_memory
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches, share_memory

LAYERS, HEADS, TOKENS, BLOCKS = ("a", "b"), 4, 16, 5


def engine(order, size, backend="FLASH_ATTN", isa=None):
    """[(memory, RankInfo, caches)] of each rank."""
    ranks = []
    for number in range(size):
        config = new_config(BLOCKS, order, group(LAYERS, full(TOKENS, HEADS // size, 32)))
        caches = allocate(config, order)
        view = cache_view(caches, config, config_of(backend, LAYERS, isa=isa), "cpu")
        memory = CacheMemory(view, host_buffer=False)
        vllm = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=size),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: HEADS, hf_text_config=SimpleNamespace(to_dict=dict)
            ),
            speculative_config=None,
        )
        info = m.RankInfo(
            number, "", b"", "DRAM", 0, BLOCKS, view.groups, view.geometry(), memory.table.data_ptr(),
            heads(vllm, view.groups, number), share_memory(memory),
        )  # fmt: skip
        ranks.append((memory, info, caches))
    return ranks


def bytes_of_block(ranks, layer, block):
    """[heads, ...] of all ranks together."""
    parts = [caches[layer][block].contiguous() for _, _, caches in ranks]
    return torch.cat([part.view(torch.uint8) for part in parts])


@new_layouts
@pytest.mark.parametrize("backend, isa", [("FLASH_ATTN", None), ("CPU_ATTN", "vec")])
@pytest.mark.parametrize("theirs, mine", [(1, 1), (1, 2), (4, 2)])
def test_fetch_between_any_two_dimension_orders(theirs, mine, backend, isa):
    # The CPU's kernels arrange the tokens of a head, which must lie together.
    orders = [o for o in ORDERS if isa is None or o.index("N") == len(o) - 2]
    for there in orders:
        source = engine(there, theirs, backend, isa)
        blocks = np.array([1, 3])
        for memory, _, _ in source:
            batch = ChecksumJob(0, blocks, keys_of(blocks), np.full(2, TOKENS, np.int32))
            assert memory.compute_checksums([batch], None).done()
        for here in orders:
            ours = engine(here, mine, backend, isa)
            for number, (memory, info, _) in enumerate(ours):
                fetches = PeerFetches(memory.view, memory.table, info.heads, number)
                fetches.add_engine("s/1", [i for _, i, _ in source])
                assert fetches.start([order_of(pull_of([2, 4, 1], [3, 1, 2], TOKENS))]) == []
                results = []
                while fetches.active:
                    results += fetches.poll()
                assert results[0].bad_blocks == {1}, results[0].reason
            for layer in LAYERS:
                for near, far in ((2, 3), (4, 1)):
                    assert torch.equal(bytes_of_block(ours, layer, near), bytes_of_block(source, layer, far))


@new_layouts
def test_shared_layout_has_pages_and_checksums():
    [(memory, info, _)] = engine("LBHNC", 1)
    spans = [(span.base, span.nbytes) for span in info.shared.spans]
    assert spans == [*memory.view.spans, (memory.table.data_ptr(), 8 * BLOCKS)] and info.shared.device == ""
    process_memory.check(info.shared)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=m.RankInfo)
    assert sent == info

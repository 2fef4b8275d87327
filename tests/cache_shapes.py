"""vLLM's cache tensors for tests: real spec classes, vLLM's allocation of new layouts, and the used parts of a
VllmConfig. Importing this skips a test module if vLLM is not installed."""

from types import SimpleNamespace

import pytest
import torch

spec_module = pytest.importorskip("vllm.v1.kv_cache_interface")
FullAttentionSpec = spec_module.FullAttentionSpec
MLAAttentionSpec = spec_module.MLAAttentionSpec
SlidingWindowSpec = spec_module.SlidingWindowSpec
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

new_layouts = pytest.mark.skipif(
    "layers" not in spec_module.KVCacheTensor.__annotations__, reason="this vLLM has the layouts to 0.28"
)


def full(block_size=16, heads=2, size=8, dtype=torch.bfloat16, **more):
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=heads, head_size=size, dtype=dtype, **more
    )


def config_of(backend: str | dict, layers, dcp=1, cache_dtype="auto", isa=None, **attributes):
    """The used parts of a VllmConfig: each layer's backend, the cache's dtype, parallelism. ``attributes``: of the
    layers."""
    names = backend if isinstance(backend, dict) else dict.fromkeys(layers, backend)
    modules = {
        layer: SimpleNamespace(
            isa=isa, get_attn_backend=lambda name=name: SimpleNamespace(get_name=lambda: name), **attributes
        )
        for layer, name in names.items()
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=modules),
    )


def group(layers, spec, **more):
    made = spec_module.KVCacheGroupSpec(list(layers), spec)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def old_config(num_blocks, *groups):
    tensors = [SimpleNamespace(shared_by=g.layer_names) for g in groups]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=list(groups))


def new_config(num_blocks, order, *groups, aliased=False):
    """Groups laid out as vLLM places them; ``aliased``: all over the same bytes, as hybrid groups are."""
    tensors, at, ends = [], 0, []
    for g in groups:
        page, count = g.kv_cache_spec.page_size_bytes, len(g.layer_names)
        block_first = order.startswith("B")
        layer_stride = page if block_first else page * num_blocks
        block_stride = page * count if block_first else page
        if order == "LHBNC":
            block_stride = page // g.kv_cache_spec.num_heads
        if order == "BHLNC":
            layer_stride = page // g.kv_cache_spec.num_heads
        offset = 0 if aliased else at
        tensors.append((g.layer_names, layer_stride, block_stride, offset))
        at = offset + page * count * num_blocks
        ends.append(at)
    made = [
        spec_module.KVCacheTensor(
            size=max(ends), layers=list(n), layer_stride=ls, block_stride=bs, offset=o
        )
        for n, ls, bs, o in tensors
    ]
    return spec_module.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=made, kv_cache_groups=list(groups)
    )


def allocate(config, order, kernel_block_sizes=None):
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[order], kernel_block_sizes)
    for cache in caches.values():
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8))
    return caches


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

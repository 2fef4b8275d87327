"""vLLM's KV cache tensors, 0.25.1 to 0.33, as a :class:`~vllm_kvtier.worker.cache_view.CacheView`.

Strides come from the tensors that vLLM registers, so that one path serves every physical order. The tensors do not show
the order of bytes *within* a page, which the attention backend defines. For the backends in ``_TOKEN_ADDRESSED`` token
``t`` of head ``h`` is a contiguous run at the strides. Any other page is described as opaque cells of several tokens,
which are copied and verified as a whole.

Old shapes (to 0.28): K and V in a dimension of their own, ``[B, 2, N, H, D]`` or ``[2, B, N, H, D]``; MLA
``[B, N, D]``; K and V concatenated ``[B, N, H, 2D]``, on CPU ``[B, H, N, 2D]``. New (0.29 on):
``[B, H, N, C]`` for every layer.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from vllm_kvtier.cache_kinds import CacheKind
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.context_parallel import WHOLE, ContextShard, shard_region
from vllm_kvtier.vllm_compat.layout.cpu_page_layout import cpu_page_layout, packing_of, token_layout
from vllm_kvtier.vllm_compat.layout.groups import cache_kind, common_kind, followed, layer_spec
from vllm_kvtier.vllm_compat.layout.kv_fields import ATTENTION, MLA, token_fields
from vllm_kvtier.vllm_compat.layout.state_layout import check_words, is_state, state_region
from vllm_kvtier.vllm_compat.layout.token_scale import scale_fault
from vllm_kvtier.vllm_compat.probe.features import granted, refused
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.worker.cache_view import NUMBER_BYTES, CacheView, CpuPageKey

# Backends (AttentionBackend.get_name) whose caches the strides describe down to the token. Not listed: sparse MLA,
# indexers and NVFP4, with scales at the end of a page; ROCm, which shuffles pages under the same names.
_TOKEN_ADDRESSED = (ATTENTION | MLA) - {"CPU_ATTN"}

# Fields of these specs and of their groups in vLLM 0.25.1 to 0.33. The meaning of another field is unknown unless it
# has its default.
_FIELDS = frozenset(
    (
        "block_size dcp_sharded block_stride_alignment is_draft num_kv_heads head_size dtype kv_quant_mode "
        "page_size_padded indexes_kv_by_block_stride head_size_v num_head_slots state_content_bytes tokens_per_state "
        "max_tp_shards sliding_window attention_chunk_size non_causal tq_slot_size cache_dtype_str alignment "
        "compress_ratio model_version non_causal_multi_token_decode cache_role is_index_group_leader "
        "storage_block_size topk_buffer_width extra_retained_tokens bounded_replay "
        "shapes dtypes mamba_type mamba_cache_mode num_speculative_blocks num_prefill_checkpoint_blocks "
        "prefill_checkpoint_alignment num_heads tp_replicated "
        "layer_names kv_cache_spec is_eagle_group enable_kv_transfer role"
    ).split()
)


class _Shape(NamedTuple):
    """A layer's cache by its dimensions, each (size, stride in bytes).

    ``kv_stride``: bytes from K to V, None if one cell holds both.
    """

    data_ptr: int
    blocks: tuple[int, int]
    kv_stride: int | None
    heads: tuple[int, int]
    tokens: tuple[int, int]
    content: int  # bytes


def cache_view(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    kv_cache_config: Any,
    vllm_config: Any,
    device: torch.device | str,
    shard: ContextShard = WHOLE,
) -> CacheView:
    """Describes every page of the engine's KV cache.

    ``kv_caches``: layer name -> tensor as handed to ``register_kv_caches``; ``kv_cache_config``: the
    connector's KVCacheConfig; ``vllm_config``: the VllmConfig, asked for each layer's attention backend;
    ``shard``: this worker's, of virtual blocks.
    Groups are numbered as in ``layout.groups``; the caches of those that it leaves out are not described. Layers that
    share another layer's cache are counted once.

    Raises UnsupportedLayout for caches that cannot be copied page by page between engines.
    """
    old = any(hasattr(t, "shared_by") for t in kv_cache_config.kv_cache_tensors)
    groups, storages, known = [], [], set()
    cpu_page_layouts: dict[CpuPageKey, torch.Tensor] = {}
    ids = followed(kv_cache_config)
    others = {layer for g, group in enumerate(kv_cache_config.kv_cache_groups) if g not in ids
              for layer in group.layer_names}  # fmt: skip
    for number, g in enumerate(ids):
        group = kv_cache_config.kv_cache_groups[g]
        regions: list[Region] = []
        seen: set[tuple] = set()
        kinds: set[CacheKind] = set()
        for name in group.layer_names:
            spec = layer_spec(group, name)
            kinds.add(_kind(spec, name))
            _refuse_new_fields(spec, name)
            _refuse_new_fields(group, name)
            tensor = kv_caches.get(name)
            if tensor is None:
                raise UnsupportedLayout(f"vLLM registered no KV cache for layer {name} of group {number}")
            if not isinstance(tensor, torch.Tensor):
                raise UnsupportedLayout(f"layer {name} has several cache tensors ({type(tensor).__name__})")
            identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            known.add(identity)
            storages.append(tensor.untyped_storage())
            if identity in seen:
                continue
            seen.add(identity)
            num_blocks = kv_cache_config.num_blocks
            if is_state(spec):
                regions.append(state_region(name, tensor, spec, num_blocks))
            else:
                found = _regions(name, tensor, spec, num_blocks, old, vllm_config, cpu_page_layouts)
                regions += [shard_region(region, shard) for region in found]
        if not regions:
            raise UnsupportedLayout(f"KV cache group {number} has no layer on this worker")
        kind = common_kind(kinds)
        block_tokens = group.kv_cache_spec.block_size * shard.size
        groups.append(GroupView(number, block_tokens, kind.name, kind.window, tuple(regions)))
    for name, tensor in kv_caches.items():
        if name in others:
            continue
        tensors = [tensor] if isinstance(tensor, torch.Tensor) else tensor
        if any((t.data_ptr(), tuple(t.shape), t.stride()) not in known for t in tensors):
            raise UnsupportedLayout(f"layer {name} has a KV cache that belongs to no KV cache group")
    return CacheView(groups, kv_cache_config.num_blocks, device, storages, cpu_page_layouts, token_layout)


def _kind(spec: Any, layer: str) -> CacheKind:
    try:
        kind = cache_kind(spec)
    except UnsupportedLayout as error:
        raise UnsupportedLayout(f"layer {layer} is not supported ({error}): requests run without pulls") from None
    return kind


def _refuse_new_fields(owner: Any, layer: str) -> None:
    for each in dataclasses.fields(owner):
        usual = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.name not in _FIELDS and getattr(owner, each.name) != usual:
            raise UnsupportedLayout(
                f"layer {layer}: {each.name} of its {type(owner).__name__} is {getattr(owner, each.name)!r}, which "
                "this vllm-kvtier does not know"
            )


class _Backend(NamedTuple):
    name: str
    module: Any  # the attention layer, None if unknown

    @property
    def isa(self) -> str | None:
        """The name of the CPU kernels' page layout, for layers that have it."""
        return getattr(self.module, "isa", None) or getattr(getattr(self.module, "impl", None), "isa", None)


def _backend(vllm_config: Any, layer: str) -> _Backend:
    compilation = getattr(vllm_config, "compilation_config", None)
    module = (getattr(compilation, "static_forward_context", None) or {}).get(layer)
    if module is None:
        return _Backend("unknown", None)
    return _Backend(module.get_attn_backend().get_name(), module)


def _regions(
    layer: str,
    tensor: torch.Tensor,
    spec: Any,
    num_blocks: int,
    old: bool,
    vllm_config: Any,
    cpu_page_layouts: dict[CpuPageKey, torch.Tensor],
) -> list[Region]:
    """Adds the layouts that the regions' fields need to ``cpu_page_layouts``."""
    shape = _named(layer, tensor, spec, old)
    ratio, rest = divmod(shape.blocks[0], num_blocks)  # kernel blocks in a block
    if rest or ratio < 1 or spec.block_size % (ratio * shape.tokens[0]):
        raise UnsupportedLayout(
            f"layer {layer}: a cache of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks of "
            f"{spec.block_size} tokens"
        )
    backend = _backend(vllm_config, layer)
    if "PER_TOKEN_HEAD" in _quant(spec):
        _check_scale(layer, backend.module)
    isa = _isa(backend, spec, _cache_dtype(spec, vllm_config))
    shape, packing = _cells(layer, shape, spec, backend, isa)
    cell_tokens = spec.block_size // (ratio * shape.tokens[0])
    fields = token_fields(tensor, spec, backend.name, backend.module)
    if packing:
        fields = _permuted_fields(fields, packing, isa, tensor.dtype, cell_tokens, cpu_page_layouts)
    regions = []
    for part in range(ratio):
        for side in (0, 1) if shape.kv_stride is not None else (0,):
            region = Region(
                layer=layer if shape.kv_stride is None else f"{layer}.{'kv'[side]}",
                base=shape.data_ptr + part * shape.blocks[1] + side * (shape.kv_stride or 0),
                block_stride=ratio * shape.blocks[1],
                outer=shape.heads[0],
                outer_stride=shape.heads[1] if shape.heads[0] > 1 else 0,
                first_token=part * shape.tokens[0] * cell_tokens,
                tokens=shape.tokens[0],
                token_stride=shape.tokens[1] if shape.tokens[0] > 1 else 0,
                inner=shape.content,
                cell_tokens=cell_tokens,
                packing=packing,
                dtype=_dtype(tensor, spec, vllm_config),
            )
            check_words(region)
            region = msgspec.structs.replace(region, separable=bool(packing) and token_layout(region) is not None)
            mine = fields if shape.kv_stride is None else fields[side : side + 1]
            if sum(f.count for f in mine) * cell_tokens * NUMBER_BYTES == region.inner:
                region = msgspec.structs.replace(region, fields=mine)
            regions.append(region)
    return regions


def _check_scale(layer: str, module: Any) -> None:
    if not granted(Feature.TOKEN_SCALE):
        why = refused(Feature.TOKEN_SCALE)
        raise UnsupportedLayout(f"layer {layer}: scales per token and head are not supported ({why})")
    if fault := scale_fault(module):
        raise UnsupportedLayout(f"layer {layer}: {fault}")


def _permuted_fields(
    fields: tuple[Field, ...],
    packing: str,
    isa: str | None,
    dtype: torch.dtype,
    cell_tokens: int,
    cpu_page_layouts: dict[CpuPageKey, torch.Tensor],
) -> tuple[Field, ...]:
    """The fields, if the order of numbers in such a cell can be found; else ()."""
    if isa is None or len(fields) != 2 or fields[0].count != fields[1].count:
        return ()
    found = cpu_page_layout(isa, dtype, cell_tokens, fields[0].count)
    if found is None:
        return ()
    # Layers of two dtypes could differ under one key: then only the first has fields.
    known = cpu_page_layouts.setdefault((packing, cell_tokens, fields), found)
    return fields if torch.equal(known, found) else ()


def _named(layer: str, tensor: torch.Tensor, spec: Any, old: bool) -> _Shape:
    """The dimensions of a layer's tensor. Raises UnsupportedLayout for an unknown shape."""
    size = tensor.element_size()
    dims = [(n, s * size) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    if dims[-1][1] != size:
        raise UnsupportedLayout(f"layer {layer}: the last dimension of its cache is not contiguous")
    content = dims[-1][0] * size
    one = (1, 0)
    kv = None
    heads = spec.num_kv_heads
    if tensor.dim() == 5 and old:
        # K/V first or blocks first; a cache of two blocks, one of them the null block, is of no use.
        kv, blocks = (dims[0], dims[1]) if dims[0][0] == 2 != dims[1][0] else (dims[1], dims[0])
        if kv[0] != 2:
            raise UnsupportedLayout(f"layer {layer}: no K/V dimension in the shape {tuple(tensor.shape)}")
        tokens, head = dims[2], dims[3]
    elif tensor.dim() == 4 and not old:
        blocks, head, tokens = dims[0], dims[1], dims[2]
    elif tensor.dim() == 4:
        heads_first = dims[1][0] == heads and (dims[2][0] != heads or tensor.device.type == "cpu")
        blocks = dims[0]
        head, tokens = (dims[1], dims[2]) if heads_first else (dims[2], dims[1])
    elif tensor.dim() == 3 and old:
        blocks, tokens, head = dims[0], dims[1], one
        if heads != 1 and "MLA" not in type(spec).__name__:
            raise UnsupportedLayout(f"layer {layer}: the shape {tuple(tensor.shape)} names no KV heads")
    else:
        raise UnsupportedLayout(
            f"layer {layer}: a KV cache of {tensor.dim()} dimensions {tuple(tensor.shape)} is unknown"
        )
    return _Shape(tensor.data_ptr(), blocks, kv[1] if kv else None, head, tokens, content)


def _cells(layer: str, shape: _Shape, spec: Any, backend: _Backend, isa: str | None) -> tuple[_Shape, str]:
    """The shape, with data that a backend packs in its own way folded into opaque cells, and the packing's name."""
    if isa is not None:
        # Per head [K page | V page], each in an order for the vector unit: tokens are not separable.
        folded = _fold_tokens(shape)
        if folded is None:
            raise UnsupportedLayout(f"layer {layer}: a head's page of the CPU cache is not contiguous")
        return folded, packing_of(isa)
    if backend.name in _TOKEN_ADDRESSED and "NVFP4" not in _quant(spec) and not _rocm():
        return shape, ""
    name = f"opaque-{backend.name}{_rocm_order(backend) if _rocm() else ''}"
    page = _fold_page(shape)
    if page is not None:
        return page[0], f"{name}-{page[1]}"
    folded = _fold_tokens(shape)
    if folded is None:
        raise UnsupportedLayout(
            f"layer {layer}: pages of the attention backend {backend.name} are scattered in memory "
            "and their inner order is unknown; set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"
        )
    return folded, f"{name}-head"


def _rocm() -> bool:
    return getattr(torch.version, "hip", None) is not None


def _rocm_order(backend: _Backend) -> str:
    """By a variable, and by what the compiler fused, ROCm's backends order the numbers within a page in other ways."""
    interleaved = getattr(getattr(backend.module, "impl", None), "_use_interleaved_v_cache", False)
    shuffled = os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "").lower() in ("1", "true")
    return "-shuffled" * shuffled + "-interleaved" * bool(interleaved)


def _fold_tokens(shape: _Shape) -> _Shape | None:
    """One cell per head, if a head's tokens are contiguous; else None."""
    n, stride = shape.tokens
    if n > 1 and stride != shape.content:
        return None
    return shape._replace(tokens=(1, 0), content=n * shape.content)


def _fold_page(shape: _Shape) -> tuple[_Shape, str] | None:
    """One cell per page and the order of its dimensions, if a page is contiguous; else None."""
    (heads, head_stride), (tokens, token_stride) = shape.heads, shape.tokens
    heads_first = (tokens == 1 or token_stride == shape.content) and (
        heads == 1 or head_stride == tokens * shape.content
    )
    tokens_first = head_stride == shape.content and token_stride == heads * shape.content
    if not heads_first and not tokens_first:
        return None
    one = (1, 0)
    folded = shape._replace(heads=one, tokens=one, content=heads * tokens * shape.content)
    return folded, "HN" if heads_first else "NH"


def _isa(backend: _Backend, spec: Any, cache_dtype: str) -> str | None:
    """The name of the page layout that vLLM's CPU kernels choose; None for other backends."""
    if backend.name != "CPU_ATTN":
        return None
    if backend.isa:
        return backend.isa
    if not granted(Feature.CPU_CACHE):
        raise UnsupportedLayout(f"the layout of KV pages on CPU is unknown ({refused(Feature.CPU_CACHE)})")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)


def _dtype(tensor: torch.Tensor, spec: Any, vllm_config: Any) -> str:
    """The tensor's dtype, and for a quantized cache the name of its format."""
    name, quant = str(tensor.dtype).removeprefix("torch."), _quant(spec)
    if quant != "NONE":
        label = _cache_dtype(spec, vllm_config)
        # "fp8" is an alias of e4m3; the tensor's own dtype may be uint8 or float8 for the same bytes.
        name = f"{quant.lower()}:{'fp8_e4m3' if label == 'fp8' else label}"
    if tensor.itemsize == 1 and _rocm() and "gfx94" in torch.cuda.get_device_properties(tensor.device).gcnArchName:
        return f"{name} fnuz"  # MI300's bytes of fp8 are other numbers, under the same names
    return name


def _quant(spec: Any) -> str:
    return spec.kv_quant_mode.name


def _cache_dtype(spec: Any, vllm_config: Any) -> str:
    cache_config = getattr(vllm_config, "cache_config", None)
    return str(getattr(spec, "cache_dtype_str", None) or getattr(cache_config, "cache_dtype", "auto"))

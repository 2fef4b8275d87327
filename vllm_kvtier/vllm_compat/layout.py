"""vLLM's KV cache tensors, 0.25.1 to 0.33, as a :class:`~vllm_kvtier.worker.views.CacheView`.

Strides are read off the tensors that vLLM registers, so that one path serves every physical order. What the
tensors cannot say is how bytes lie *within* a page, which is the attention backend's own affair: for
the backends in ``_TOKEN_ADDRESSED`` token ``t`` of head ``h`` is a contiguous run that the strides name; any
other page is described as opaque cells that hold several tokens and move and count as a whole.

Old shapes (to 0.28): K and V in a dimension of their own, ``[B, 2, N, H, D]`` or ``[2, B, N, H, D]``; MLA
``[B, N, D]``; K and V concatenated ``[B, N, H, 2D]``, on CPU ``[B, H, N, 2D]``. New (0.29 on):
``[B, H, N, C]`` for every layer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.arrangement import cpu_arrangement
from vllm_kvtier.vllm_compat.fields import ATTENTION, MLA, token_fields
from vllm_kvtier.vllm_compat.probe import Feature, granted, refused, value
from vllm_kvtier.vllm_compat.version import installed_version
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.worker.views import NUMBER, Arrangement, CacheView

# Backends (AttentionBackend.get_name) whose caches the strides describe down to the token. Not here:
# sparse MLA, indexers and NVFP4 keep scales at the end of a page; ROCm shuffles pages under the same names.
_TOKEN_ADDRESSED = (ATTENTION | MLA) - {"CPU_ATTN"}

# By exact class name: a subclass that we do not know may mean something else by the same bytes.
_KINDS = {
    "FullAttentionSpec": "full",
    "TQFullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding_mla",
    "ChunkedLocalAttentionSpec": "chunked",
}

_WORD = 4  # checksums count words of 4 or 8 bytes


class _Shape(NamedTuple):
    """A layer's cache by the names of its dimensions, each (size, stride in bytes).

    ``kv_stride`` is the way from K to V in bytes, None where one cell holds both.
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
) -> CacheView:
    """Describes every page of the engine's KV cache.

    ``kv_caches``: layer name -> tensor as handed to ``register_kv_caches``; ``kv_cache_config``: the
    connector's KVCacheConfig; ``vllm_config``: the VllmConfig, asked for each layer's attention backend.
    Groups keep their index in ``kv_cache_config.kv_cache_groups``. Layers that share another layer's
    cache are counted once.

    Raises UnsupportedLayout, with a sentence, for what cannot be moved page by page between engines.
    """
    _refuse_parallelism(vllm_config)
    old = any(hasattr(t, "shared_by") for t in kv_cache_config.kv_cache_tensors)
    groups, storages, known = [], [], set()
    arrangements: dict[Arrangement, torch.Tensor] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        regions: list[Region] = []
        seen: set[tuple] = set()
        kinds: set[tuple[str, int | None]] = set()
        for name in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, name)
            kinds.add(_kind(spec, group, name))
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
            regions += _regions(name, tensor, spec, kv_cache_config.num_blocks, old, vllm_config, arrangements)
        if not regions:
            raise UnsupportedLayout(f"KV cache group {number} has no layer on this worker")
        if len(kinds) > 1 and any(window is not None for _, window in kinds):
            raise UnsupportedLayout(f"the layers of KV cache group {number} have different windows: {kinds}")
        kind, window = min(kinds)  # "full" where a group holds full attention and MLA
        block_tokens = group.kv_cache_spec.block_size
        groups.append(GroupView(number, block_tokens, kind, window, tuple(regions)))
    for name, tensor in kv_caches.items():
        tensors = [tensor] if isinstance(tensor, torch.Tensor) else tensor
        if any((t.data_ptr(), tuple(t.shape), t.stride()) not in known for t in tensors):
            raise UnsupportedLayout(f"layer {name} has a KV cache that belongs to no KV cache group")
    return CacheView(groups, kv_cache_config.num_blocks, device, storages, arrangements)


def _refuse_parallelism(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for field, words in (
        ("decode_context_parallel_size", "decode"),
        ("prefill_context_parallel_size", "prefill"),
    ):
        if getattr(parallel, field) > 1:
            raise UnsupportedLayout(
                f"{words} context parallelism interleaves a block's tokens over ranks, which is not supported"
            )


def _layer_spec(spec: Any, layer: str) -> Any:
    """The layer's own spec: groups of one type but different sizes keep one for each layer."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def attention_kind(spec: Any) -> tuple[str, int | None]:
    """(kind of attention, window) of a layer's or a group's cache. A FullAttentionSpec of a layer with a window names
    the window, but its blocks are kept as those of full attention.

    Raises UnsupportedLayout for what is not KV of single tokens.
    """
    name = type(spec).__name__
    kind = _KINDS.get(name)
    if kind is None:
        what = "recurrent state" if name == "MambaSpec" else name.removesuffix("Spec")
        raise UnsupportedLayout(f"{what} is not KV of single tokens")
    if kind == "chunked":
        return kind, spec.attention_chunk_size
    return kind, spec.sliding_window if kind.startswith("sliding") else None


def _kind(spec: Any, group: Any, layer: str) -> tuple[str, int | None]:
    try:
        kind, window = attention_kind(spec)
    except UnsupportedLayout as error:
        raise UnsupportedLayout(f"layer {layer} is not supported ({error}): requests run without pulls") from None
    name = type(spec).__name__
    if value(group, "KVCacheGroupSpec.host_resident") or not value(group, "KVCacheGroupSpec.enable_kv_transfer"):
        raise UnsupportedLayout(f"layer {layer} is in a KV cache group that vLLM keeps out of transfers")
    if name == "SlidingWindowMLASpec" and value(spec, "SlidingWindowMLASpec.bounded_replay"):
        raise UnsupportedLayout(f"layer {layer} is rebuilt by replay and not addressed by block hashes")
    return kind, window


class _Backend(NamedTuple):
    name: str
    module: Any  # the attention layer, None if unknown

    @property
    def isa(self) -> str | None:
        """How the CPU kernels arrange a page, for layers that tell."""
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
    arrangements: dict[Arrangement, torch.Tensor],
) -> list[Region]:
    """``arrangements`` gets what the regions' fields need."""
    shape = _named(layer, tensor, spec, old)
    ratio, rest = divmod(shape.blocks[0], num_blocks)  # kernel blocks in a block
    if rest or ratio < 1 or spec.block_size % (ratio * shape.tokens[0]):
        raise UnsupportedLayout(
            f"layer {layer}: a cache of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks of "
            f"{spec.block_size} tokens"
        )
    backend = _backend(vllm_config, layer)
    isa = _isa(backend, spec, _cache_dtype(spec, vllm_config))
    shape, packing = _cells(layer, shape, spec, backend, isa)
    cell_tokens = spec.block_size // (ratio * shape.tokens[0])
    fields = token_fields(tensor, spec, backend.name, backend.module)
    if packing:
        fields = _arranged(fields, packing, isa, tensor.dtype, cell_tokens, arrangements)
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
            _check_words(region)
            mine = fields if shape.kv_stride is None else fields[side : side + 1]
            if sum(f.count for f in mine) * cell_tokens * NUMBER == region.inner:
                region = msgspec.structs.replace(region, fields=mine)
            regions.append(region)
    return regions


def _arranged(
    fields: tuple[Field, ...],
    packing: str,
    isa: str | None,
    dtype: torch.dtype,
    cell_tokens: int,
    arrangements: dict[Arrangement, torch.Tensor],
) -> tuple[Field, ...]:
    """The fields, if it can be learnt where the numbers of such a cell lie; else ()."""
    if isa is None or len(fields) != 2 or fields[0].count != fields[1].count:
        return ()
    found = cpu_arrangement(isa, dtype, cell_tokens, fields[0].count)
    if found is None:
        return ()
    # Layers of two dtypes might differ under one name: then the first keeps it.
    known = arrangements.setdefault((packing, cell_tokens, fields), found)
    return fields if torch.equal(known, found) else ()


def _named(layer: str, tensor: torch.Tensor, spec: Any, old: bool) -> _Shape:
    """Names the dimensions of a layer's tensor; raises UnsupportedLayout for a shape never seen."""
    size = tensor.element_size()
    dims = [(n, s * size) for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    if dims[-1][1] != size:
        raise UnsupportedLayout(f"layer {layer}: the last dimension of its cache is not contiguous")
    content = dims[-1][0] * size
    one = (1, 0)
    kv = None
    heads = spec.num_kv_heads
    if tensor.dim() == 5 and old:
        # K/V first or blocks first; a cache of two blocks, one of them the null block, serves nobody.
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
            f"layer {layer}: a KV cache of {tensor.dim()} dimensions {tuple(tensor.shape)} is not understood"
        )
    return _Shape(tensor.data_ptr(), blocks, kv[1] if kv else None, head, tokens, content)


def _cells(layer: str, shape: _Shape, spec: Any, backend: _Backend, isa: str | None) -> tuple[_Shape, str]:
    """The shape with what a backend packs in its own way folded into opaque cells, and the packing's name."""
    if isa is not None:
        # Per head [K page | V page], each arranged for the vector unit: tokens are not separable.
        folded = _fold_tokens(shape)
        if folded is None:
            raise UnsupportedLayout(f"layer {layer}: a head's page of the CPU cache is not contiguous")
        # The arrangement belongs to the kernels, which change between versions without a word.
        return folded, f"cpu-{isa}-{installed_version()}"
    rocm = getattr(torch.version, "hip", None) is not None
    if backend.name in _TOKEN_ADDRESSED and "NVFP4" not in _quant(spec) and not rocm:
        return shape, ""
    page = _fold_page(shape)
    if page is not None:
        return page[0], f"opaque-{backend.name}-{page[1]}"
    folded = _fold_tokens(shape)
    if folded is None:
        raise UnsupportedLayout(
            f"layer {layer}: pages of the attention backend {backend.name} are scattered in memory "
            "and their inner order is not known; set VLLM_KV_CACHE_LAYOUT to LBNHC or LBHNC"
        )
    return folded, f"opaque-{backend.name}-head"


def _fold_tokens(shape: _Shape) -> _Shape | None:
    """One cell a head, where a head's tokens are contiguous; else None."""
    n, stride = shape.tokens
    if n > 1 and stride != shape.content:
        return None
    return shape._replace(tokens=(1, 0), content=n * shape.content)


def _fold_page(shape: _Shape) -> tuple[_Shape, str] | None:
    """One cell a page and the order of its dimensions, where a page is contiguous; else None."""
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
    """The name of the arrangement that vLLM's CPU kernels choose; None for other backends."""
    if backend.name != "CPU_ATTN":
        return None
    if backend.isa:
        return backend.isa
    if not granted(Feature.CPU_CACHE):
        raise UnsupportedLayout(f"cannot tell how this vLLM arranges KV pages on CPU ({refused(Feature.CPU_CACHE)})")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, cache_dtype)


def _dtype(tensor: torch.Tensor, spec: Any, vllm_config: Any) -> str:
    """What the bytes encode: the tensor's dtype, and for a quantized cache the name of its format."""
    name = str(tensor.dtype).removeprefix("torch.")
    quant = _quant(spec)
    if quant == "NONE":
        return name
    label = _cache_dtype(spec, vllm_config)
    # "fp8" is an alias of e4m3; the tensor's own dtype may be uint8 or float8 for the same bytes.
    return f"{quant.lower()}:{'fp8_e4m3' if label == 'fp8' else label}"


def _quant(spec: Any) -> str:
    return spec.kv_quant_mode.name


def _cache_dtype(spec: Any, vllm_config: Any) -> str:
    cache_config = getattr(vllm_config, "cache_config", None)
    return str(getattr(spec, "cache_dtype_str", None) or getattr(cache_config, "cache_dtype", "auto"))


def _check_words(region: Region) -> None:
    for what, number in (
        ("bytes of a token and head", region.inner),
        ("address", region.base),
        ("block stride", region.block_stride),
        ("head stride", region.outer_stride),
        ("token stride", region.token_stride),
    ):
        if number % _WORD:
            raise UnsupportedLayout(
                f"layer {region.layer}: the {what} ({number}) is no multiple of {_WORD}, which checksums need"
            )

"""Recurrent states as pages: a block is one cell with all of a layer's states, in the order of the specification.

Tensor parallelism gives each rank some heads (of Mamba 2: groups of heads; of Mamba 1 and short convolutions: channels)
and puts what they have in the states side by side: in a convolution's state first all queries, then all keys, then all
values, in each of its rows. ``_division`` describes this for the layouts that it knows.
"""

import math
from typing import Any

import torch

from vllm_kvtier.cache_kinds import Contents
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.groups import cache_kind
from vllm_kvtier.wire.geometry import Region, same_words

_WORD = 4  # checksums count words of 4 or 8 bytes
_CHANNELS = 64  # of a share, where there are no heads


def is_state(spec: Any) -> bool:
    return cache_kind(spec).specs[type(spec).__name__] is Contents.STATE


def state_region(layer: str, tensor: torch.Tensor, spec: Any, num_blocks: int) -> Region:
    """vLLM registers the bytes of all states of a layer as int8 [blocks, 1, 1, bytes]; what is behind them in a page is
    padding. Raises UnsupportedLayout for another shape."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    states = list(zip(spec.shapes, spec.dtypes, strict=True))
    nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in states)
    blocks, *rest = tensor.shape
    if tensor.itemsize != 1 or blocks != num_blocks or rest != [1, 1, nbytes] or tensor.stride(-1) != 1:
        raise UnsupportedLayout(
            f"layer {layer}: a cache of {tensor.dtype} {tuple(tensor.shape)} does not hold {num_blocks} states of "
            f"{nbytes} bytes"
        )
    shapes = " ".join(f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}" for shape, dtype in states)
    shares, runs = _division(spec, get_conv_state_layout())
    if any(n % shares or not same_words(n // shares, nbytes) for _, n in runs):
        shares, runs = 0, ()
    region = Region(
        layer=layer,
        base=tensor.data_ptr(),
        block_stride=tensor.stride(0),
        outer=1,
        outer_stride=0,
        first_token=0,
        tokens=1,
        token_stride=0,
        inner=nbytes,
        cell_tokens=spec.block_size,
        packing=f"{spec.mamba_type.name.lower()} {get_conv_state_layout()} {shapes}",
        dtype="state",
        shares=shares,
        runs=runs,
    )
    check_words(region)
    return region


def _division(spec: Any, layout: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    """``shares`` and ``runs`` of a region; 0 and () if they are not known.

    The shares of all ranks are as many with any number of ranks, unless Mamba 2 repeats groups because there are fewer
    than ranks: then other numbers of ranks are refused.
    """
    kind, (conv, *rest) = spec.mamba_type.name, spec.shapes
    if len(conv) != 2:
        return 0, ()
    channels, rows = conv if layout == "DS" else reversed(conv)
    shares, parts = 0, {"x": channels}
    if (kind, len(rest)) == ("SHORT_CONV", 0) or ((kind, len(rest)) == ("MAMBA1", 1) and rest[0][0] == channels):
        shares = 0 if channels % _CHANNELS else channels // _CHANNELS
    elif kind in ("GDN_ATTN", "MAMBA2") and len(rest) == 1:
        heads, value, key = rest[0]  # of Mamba 2, "key" is a group's state, which B and C have the width of
        wide = heads * value
        other, odd = divmod(channels - wide, 2)
        if other > 0 and not odd and other % key == 0:
            shares = math.gcd(heads, other // key)
        parts = {"q": other, "k": other, "v": wide} if kind == "GDN_ATTN" else {"x": wide, "b": other, "c": other}
    if not shares:
        return 0, ()
    names = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    about, size = f"{kind.lower()} {layout} {names[0]}", spec.dtypes[0].itemsize
    if layout == "DS":
        runs = [(f"{about} {name}", n * rows * size) for name, n in parts.items()]
    else:
        runs = [(f"{about} {name} {row}", n * size) for row in range(rows) for name, n in parts.items()]
    for shape, dtype, name in zip(rest, spec.dtypes[1:], names[1:], strict=True):
        runs.append((f"{kind.lower()} {name} state", math.prod(shape) * dtype.itemsize))
    return shares, tuple(runs)


def check_words(region: Region) -> None:
    """Raises UnsupportedLayout for pages that checksums cannot count."""
    for what, number in (
        ("bytes of a cell", region.inner),
        ("address", region.base),
        ("block stride", region.block_stride),
        ("head stride", region.outer_stride),
        ("token stride", region.token_stride),
    ):
        if number % _WORD:
            raise UnsupportedLayout(
                f"layer {region.layer}: the {what} ({number}) is not a multiple of {_WORD}, which checksums need"
            )

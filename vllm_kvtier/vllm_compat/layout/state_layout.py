"""Recurrent states as pages: a block is one cell with all of a layer's states, in the order of the specification."""

from typing import Any

import torch

from vllm_kvtier.cache_kinds import Contents
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.groups import cache_kind
from vllm_kvtier.wire.geometry import Region

_WORD = 4  # checksums count words of 4 or 8 bytes


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
    )
    check_words(region)
    return region


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

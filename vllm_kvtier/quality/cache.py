"""A transformers cache that keeps K and V after a round trip through a codec."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedConfig

from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.errors import KVTierError


class LoadedModel(NamedTuple):
    """A model and tokenizer of transformers. ``dtype``: of the model's cache in vLLM."""

    model: Any
    tokenizer: Any
    dtype: torch.dtype


def round_trip(x: torch.Tensor, form: Format | None, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [..., numbers of a token and head] after a stay in a cache of ``dtype``, and in a slot of ``form``.

    None: in the cache only. Returns the dtype of ``x``.
    """
    cached = x.to(dtype)
    if form is None:
        return cached.to(x.dtype)
    lines = cached.reshape(-1, form.line(x.shape[-1]))
    return form.decode(*form.encode(lines), dtype).view(x.shape).to(x.dtype)


class RoundTripCache(DynamicCache):
    """K and V of every token, including the newest, pass through a codec on entry.

    This is the worst case: the GPU's cache is empty and all blocks come from the store. K is what vLLM caches, after
    the rotary embedding. States of linear attention stay unchanged, as with codecs. ``formats``: of the fields "k" and
    "v"; none: raw. ``widths``: (K, V) numbers per token and head, by layer, as seen.
    """

    def __init__(self, config: PreTrainedConfig, formats: Mapping[str, Format], dtype: torch.dtype):
        super().__init__(config=config)
        self._k, self._v, self._dtype = formats.get("k"), formats.get("v"), dtype
        self.widths: dict[int, tuple[int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """[batch, heads, tokens, numbers] each, as the base class."""
        self.widths[layer_idx] = key_states.shape[-1], value_states.shape[-1]
        key_states = round_trip(key_states, self._k, self._dtype)
        value_states = round_trip(value_states, self._v, self._dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def check(codec: Codec, widths: Mapping[int, tuple[int, int]]) -> None:
    """Raise KVTierError if ``codec`` does not support caches of these widths."""
    for layer, pair in widths.items():
        for name, width in zip(("k", "v"), pair, strict=True):
            if codec.formats and not codec.formats[name].line(width):
                raise KVTierError(f"{codec.name} cannot keep layer {layer}'s {name}: {width} numbers a token and head")


def bits(codec: Codec, widths: Mapping[int, tuple[int, int]]) -> float:
    """Bits a number of the whole cache, scales included (every layer with as many heads)."""
    stored = numbers = 0
    for pair in widths.values():
        for name, width in zip(("k", "v"), pair, strict=True):
            form = codec.formats.get(name)
            line = form.line(width) if form else 1
            stored += width // line * (form.data_bytes(line) + form.scale_bytes(line)) if form else 2 * width
            numbers += width
    return 8 * stored / numbers

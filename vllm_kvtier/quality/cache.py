"""A transformers cache that keeps what a codec would bring back."""

from collections.abc import Mapping

import torch
from transformers import DynamicCache, PreTrainedConfig

from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.errors import KVTierError


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
    """Every token's K and V pass through a codec as they enter, the newest too: as if nothing were left in the GPU's
    cache and all came from the store. That is the most a codec can cost.

    K is what vLLM caches: after the rotary embedding. States of linear attention are left alone, as codecs leave them.
    ``formats``: of the fields "k" and "v"; none: raw. ``widths``: (K, V) numbers a token and head, by layer, as seen.
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
    """KVTierError in words if ``codec`` cannot keep caches of these widths."""
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

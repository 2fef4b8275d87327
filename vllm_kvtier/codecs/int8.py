"""8-bit integers, symmetric, with a bfloat16 scale a line."""

import torch

from vllm_kvtier.codecs import base
from vllm_kvtier.codecs.base import INFINITE, TINY, Codec, CutFormat, Kernels
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.kernels.checksum import triton

# A float32 this large has no fraction bits: adding it rounds half to even and leaves the integer in the low bits.
_ROUND = 12582912.0  # 1.5 * 2^23

if triton is not None:
    import triton.language as tl

    _INFINITE = tl.constexpr(INFINITE)
    _TINY = tl.constexpr(TINY)
    _STEP = tl.constexpr(1 / 127)

    @triton.jit
    def _encode(x, FP16: tl.constexpr, G: tl.constexpr):
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # [L]
        bad = top >= _INFINITE
        wide = tl.maximum(tl.where(bad, 1.0, top.to(tl.float32, bitcast=True)) * _STEP, _TINY)
        # Rounded to bfloat16, half to even.
        bits = wide.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        scale = (bits << 16).to(tl.float32, bitcast=True)
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        shifted = x * inverse[:, None] + 12583040.0  # _ROUND + 128
        data = (shifted.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)
        return data, tl.where(bad, 0x7FC0, bits).to(tl.uint16)

    @triton.jit
    def _decode(data, word, FP16: tl.constexpr, G: tl.constexpr):
        scale = (word.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        # 2^23 + byte without a conversion, which takes four times as long.
        number = (data.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
        x = number * scale[:, None]
        if FP16:  # comparisons leave NaN alone
            x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        return x


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """A product, as in the kernel: a division by 127 gives another bfloat16 in one line of thousands."""
    return (largest * (1 / 127)).clamp_min(TINY).bfloat16()


class Int8(CutFormat):
    """A byte a number: its multiple of the scale, -127..127, plus 128. Scale: bfloat16, NaN for a line with one."""

    kind, bits, scale_size = "int8", 8, 2
    bound = (
        "half a scale, then the rounding to the cache's dtype; the scale is the line's largest magnitude / 127 rounded "
        "to bfloat16, 2^-126 or more. Zeros are exact, their signs are lost."
    )

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = base.magnitudes(x)
        bad = top >= INFINITE
        largest = top.view(torch.float32).masked_fill(bad, 1.0)
        scale = _scale(largest)
        shifted = x.float() * (1.0 / scale.float())[:, None] + (_ROUND + 128)
        data = (shifted.view(torch.int32) & 0xFF).to(torch.uint8)
        return data, base.as_bytes(scale.masked_fill(bad, torch.nan))

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = scales.contiguous().view(torch.bfloat16).float()  # [n, 1]
        return base.from_float32((data.float() - 128) * scale, dtype)

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        return base.rounded(_scale(x.float().abs().amax(dim=1, keepdim=True)).float() * 0.5001, x)

    @property
    def kernels(self) -> Kernels:
        base.need_triton(triton)
        return Kernels(8, _encode, _decode, tiles=((16384, 16, 1), (32768, 8, 1)))


INT8 = Int8()
CODECS = (
    Codec(
        "int8",
        "8-bit integers, a scale a token and head; MLA: a scale for 128 numbers, rotary part kept",
        {"k": INT8, "v": INT8, "latent": Int8(128), "rope": KEEP},
    ),
)

"""4-bit integers between a line's least number and its largest; lines are groups of 64 numbers."""

import torch

from vllm_kvtier.codecs import base
from vllm_kvtier.codecs.base import INFINITE, TINY, Codec, CutFormat, Kernels
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.kernels.checksum import triton

# A float32 this large has no fraction bits: adding it rounds half to even and leaves the integer in the low bits.
_ROUND = 8388608.0  # 2^23

if triton is not None:
    import triton.language as tl

    _INFINITE = tl.constexpr(INFINITE)
    _TINY = tl.constexpr(TINY)
    _STEP = tl.constexpr(1 / 15)

    @triton.jit
    def _ordered(x):
        """Integers in the order of float32 numbers, NaNs beyond the infinities; the same function leads back."""
        bits = x.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit
    def _encode(lo, hi, FP16: tl.constexpr, G: tl.constexpr):
        a, b = _ordered(lo), _ordered(hi)
        lower, upper = tl.minimum(a, b), tl.maximum(a, b)
        if lo.shape[1] * 2 > G:  # the zeros beyond a short line are not its numbers
            inside = (tl.arange(0, lo.shape[1]) < G // 2)[None, :]
            lower = tl.where(inside, lower, 0x7FFFFFFF)
            upper = tl.where(inside, upper, -0x7FFFFFFF)
        least = tl.min(lower, axis=1)  # [L]
        most = tl.max(upper, axis=1)
        bad = (most >= _INFINITE) | (least < -_INFINITE)  # least = -1 - its magnitude's bits, where negative
        least = tl.where(bad, 0, least)
        most = tl.where(bad, 0, most)
        low = (least ^ ((least >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        high = (most ^ ((most >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        wide = tl.maximum((high - low) * _STEP, _TINY).to(tl.int32, bitcast=True)
        bits = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16  # rounded to bfloat16, half to even
        if FP16:
            # 15 steps rounded up may exceed float16.
            over = low + (bits << 16).to(tl.float32, bitcast=True) * 15.0 > 65504.0
            bits = tl.where(over, wide >> 16, bits)
            base = low.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            base = low.to(tl.uint32, bitcast=True) >> 16
        scale = (bits << 16).to(tl.float32, bitcast=True)
        inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        lo = ((lo - low[:, None]) * inverse[:, None] + 8388608.0).to(tl.int32, bitcast=True)
        hi = ((hi - low[:, None]) * inverse[:, None] + 8388608.0).to(tl.int32, bitcast=True)
        data = ((lo & 15) | ((hi & 15) << 4)).to(tl.uint8)
        return data, base | (tl.where(bad, 0x7FC0, bits).to(tl.uint32) << 16)

    @triton.jit
    def _decode(data, word, FP16: tl.constexpr, G: tl.constexpr):
        scale = (word & 0xFFFF0000).to(tl.float32, bitcast=True)[:, None]
        if FP16:
            low = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
        else:
            low = (word << 16).to(tl.float32, bitcast=True)[:, None]
        bits = data.to(tl.int32)
        # 2^23 + nibble without a conversion, which takes four times as long.
        lo = ((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        hi = ((bits >> 4) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        return lo * scale + low, hi * scale + low


def _wide(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """A line's step before rounding. A product, as in the kernel: a division by 15 gives another bfloat16 now and
    then."""
    return ((high - low) * (1 / 15)).clamp_min(TINY)


class Int4(CutFormat):
    """Half a byte a number: byte i is number i | number i + G/2 << 4, each the steps above the line's least number.

    Scales: that number in the cache's dtype, then the step in bfloat16 (NaN for a line with one).
    """

    kind, bits, scale_size = "uint4", 4, 4
    bound = (
        "half a step, then the rounding to the cache's dtype; the step is the line's range / 15 rounded to bfloat16, "
        "2^-126 or more. The least number is exact, and so is a line of equal numbers."
    )

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = x.float()
        bits = numbers.view(torch.int32)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        least, most = ordered.aminmax(dim=1)
        bad = (most >= INFINITE) | (least < -INFINITE)
        low, high = (
            (k ^ ((k >> 31) & 0x7FFFFFFF)).view(torch.float32) for k in (t.masked_fill(bad, 0) for t in (least, most))
        )
        wide = _wide(low, high)
        scale = wide.bfloat16()
        if x.dtype == torch.float16:
            cut = ((wide.view(torch.int32) >> 16) << 16).view(torch.float32).bfloat16()
            scale = torch.where(low + scale.float() * 15.0 > base.LARGEST_FP16, cut, scale)
        steps = (numbers - low[:, None]) * (1.0 / scale.float())[:, None] + _ROUND
        steps = (steps.view(torch.int32) & 15).to(torch.uint8)
        half = x.shape[1] // 2
        data = steps[:, :half] | (steps[:, half:] << 4)
        scale = scale.masked_fill(bad, torch.nan)
        return data, torch.cat([base.as_bytes(low.to(x.dtype)), base.as_bytes(scale)], dim=1)

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        low = scales[:, :2].contiguous().view(dtype).float()  # [n, 1]
        scale = scales[:, 2:].contiguous().view(torch.bfloat16).float()
        steps = torch.cat([data & 15, data >> 4], dim=1)
        return (steps.float() * scale + low).to(dtype)

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.float().aminmax(dim=1, keepdim=True)
        return base.rounded(_wide(low, high).bfloat16().float() * 0.5001, x)

    @property
    def kernels(self) -> Kernels:
        base.need_triton(triton)
        return Kernels(4, _encode, _decode, tiles=((32768, 16, 1), (32768, 16, 1)))


INT4 = Int4(64)
CODECS = (
    Codec(
        "int4",
        "4-bit integers, least number and step for groups of 64; MLA: rotary part kept",
        {"k": INT4, "v": INT4, "latent": INT4, "rope": KEEP},
    ),
)

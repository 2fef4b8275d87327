"""float8 e4m3 with a scale per line that is a power of two, so that multiplying by it is exact in both directions.

A scale that maps the largest number to exactly 448 would gain nothing: the precision of a float8 does not depend on the
position of a number in its range. Encoding decoded numbers gives the same bytes again.
"""

import torch

from vllm_kvtier.codecs.base import INFINITE, Codec, CutFormat, Kernels, magnitudes, need_triton
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.kernels.checksum import triton

_NAN = 255
# Added to float32 bits it carries into the exponent if and only if the significand is above 1.75, that of 448.
_CARRY = 0x1FFFFF
# Exponent of 448.
_TOP = 8
# Numbers that would round to 2^16 and overflow float16 are clipped to 61440, within the bound of 1/16.
_FP16_TOP = 61440.0

if triton is not None:
    import triton.language as tl

    from vllm_kvtier.kernels.casts import from_e4m3, to_e4m3

    _INFINITE = tl.constexpr(INFINITE)

    @triton.jit
    def _encode(x, FP16: tl.constexpr, G: tl.constexpr):
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # [L]
        exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        if FP16:
            x = tl.minimum(tl.maximum(x, -61440.0), 61440.0)
        return to_e4m3(x * inverse[:, None]), tl.where(top >= _INFINITE, 255, exponent).to(tl.uint8)

    @triton.jit
    def _decode(data, word, FP16: tl.constexpr, G: tl.constexpr):
        exponent = word.to(tl.int32)
        bits = tl.where(exponent == 255, 0x7FC00000, exponent << 23)
        return from_e4m3(data) * bits.to(tl.float32, bitcast=True)[:, None]


class Fp8(CutFormat):
    """A byte a number; a scale byte a line: its biased exponent as in float32, 255 for NaN."""

    kind, bits, scale_size = "e4m3", 8, 1
    bound = (
        "1/16 of the number, or 2^-10 of the scale if that is more; the scale is the least power of two, 2^-126 or "
        "more, by which the line's largest magnitude is at most 448. Zeros and their signs are exact."
    )

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = magnitudes(x)
        exponent = (((top + _CARRY) >> 23) - _TOP).clamp_min(1)
        inverse = ((254 - exponent) << 23).view(torch.float32)
        numbers = x.float()
        if x.dtype == torch.float16:
            numbers = numbers.clamp(-_FP16_TOP, _FP16_TOP)
        data = (numbers * inverse[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        return data, exponent.masked_fill(top >= INFINITE, _NAN).to(torch.uint8)[:, None]

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        exponent = scales[:, 0].to(torch.int32)
        scale = (exponent << 23).view(torch.float32).masked_fill(exponent == _NAN, torch.nan)
        # The bits of a float16 of 2^-8 times the value: torch converts float8 one by one, which takes twice as long.
        bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
        numbers = bits.view(torch.float16).float().mul_(256.0).masked_fill_((data & 0x7F) == 0x7F, torch.nan)
        return numbers.mul_(scale[:, None]).to(dtype)

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(dim=1, keepdim=True) / 448)).clamp_min(-126))
        smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
        return torch.maximum(x.double().abs() / 16, scale / 1024).float() + smallest / 2

    @property
    def kernels(self) -> Kernels:
        need_triton(triton)
        return Kernels(8, _encode, _decode, tiles=((32768, 8, 1), (32768, 8, 1)))


FP8 = Fp8()
CODECS = (
    Codec(
        "fp8",
        "float8 (e4m3), a scale a token and head; MLA: a scale for 128 numbers, rotary part kept",
        {"k": FP8, "v": FP8, "latent": Fp8(128), "rope": KEEP},
    ),
)

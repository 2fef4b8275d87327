"""4 bits after a rotation: a Hadamard matrix on lines of 64 numbers, then 16 levels for normally distributed numbers.

The rotation spreads large numbers over the whole line, so that every line resembles normal noise of some size, whatever
the channels of K and V. The levels (least squares for a normal line, scaled by its largest number) lose less than
evenly spaced ones. The scale does not minimize the error: it keeps the inner product of the line with itself. A K that
shrinks by one percent changes the temperature of the softmax, which costs more than noise.

All arithmetic before the scale is on whole numbers: numbers are rounded to 8 bits and a sign by the line's exponent,
rotated (sums that are exact in any order, on tensor cores too), and quantized against the largest.

    line u = (lo, hi), halves of g = G / 2 numbers; m the largest power of two that divides g, at most 32
    B = Sylvester's Hadamard matrices of m on the diagonal; s, d: fixed signs (without them a line of equal numbers
    would rotate into a single number)
    forward   p = lo (sB), q = hi (dsB);   rotated = (p + q, p - q)           (line times its matrix = sqrt(2m) times
    back      lo = (p + q) (Bs), hi = (p - q) (Bsd)                            an orthogonal one)
"""

from functools import cache

import torch

from vllm_kvtier.codecs import base
from vllm_kvtier.codecs.base import INFINITE, Codec, Format, Kernels
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.kernels.checksum import triton

# The levels' magnitudes for a line whose largest rotated magnitude is 128.
LEVELS = (6, 19, 32, 44, 58, 76, 97, 122)
_LEVELS = torch.tensor(LEVELS, dtype=torch.float32)
# The levels of the two codes in a byte.
_LOW_NIBBLE = torch.cat([_LEVELS, -_LEVELS]).repeat(16)
_HIGH_NIBBLE = torch.cat([_LEVELS, -_LEVELS]).repeat_interleave(16)
# A float32 this large has no fraction bits: adding it rounds half to even.
_ROUND = 12582912.0  # 1.5 * 2^23
# The index of a magnitude y, if the largest is 256: the whole part of the lesser of y / 25.5 and y / 42 + 1.8125. The
# exact thresholds of the levels would lose 2 % less with twice the comparisons.
_SLOPES, _OFFSETS = (1 / 25.5, 1 / 42), (0.0, 1.8125)
# A float32 of this size has 7 fraction bits. Shifted right by seven, its bits end in 0x8880. With an index added they
# are the selector of PTX's prmt for that byte of eight and three zeros.
_INDEX = 100480.0  # 2^16 * (1 + 0x444000 / 2^23)
# Bit i of these: the sign of number i mod 32. The second as a signed number.
_S, _D = 0x68E31DA4, 0xB5297A4D - (1 << 32)
# A line of magnitudes below 2^-100, whose float32 bits these are, becomes zeros.
_ZERO = 27 << 23


def _fine(line: int) -> int:
    """Biased exponent of a line's largest number after it is scaled to a whole number of 9 bits, or 8 in long lines:
    all sums of an encoder are then below 2^24, where float32 represents every whole number."""
    return 261 if line <= 64 else 260


if triton is not None:
    import triton.language as tl

    from vllm_kvtier.kernels import casts

    _SOFTWARE = tl.constexpr(casts.INTERPRETED)
    _INFINITE = tl.constexpr(INFINITE)
    _LOW = tl.constexpr(0x2C201306)  # LEVELS as bytes
    _HIGH = tl.constexpr(0x7A614C3A)
    _FIRST = tl.constexpr(_SLOPES[0])
    _SECOND = tl.constexpr(_SLOPES[1])
    _NIBBLES = tl.constexpr(
        """{
        .reg .b32 a, b, c;
        and.b32 a, $2, 0x07070707;  // indices of four low nibbles
        shr.u32 b, a, 4;
        or.b32 a, a, b;
        prmt.b32 a, a, 0, 0x4420;  // side by side, a selector
        prmt.b32 a, 0x2C201306, 0x7A614C3A, a;
        shr.u32 b, $2, 3;
        and.b32 b, b, 0x01010101;  // their signs
        mul.lo.u32 c, b, 255;
        xor.b32 a, a, c;
        add.u32 $0, a, b;
        shr.u32 c, $2, 4;  // and of the high ones
        and.b32 a, c, 0x07070707;
        shr.u32 b, a, 4;
        or.b32 a, a, b;
        prmt.b32 a, a, 0, 0x4420;
        prmt.b32 a, 0x2C201306, 0x7A614C3A, a;
        shr.u32 b, c, 3;
        and.b32 b, b, 0x01010101;
        mul.lo.u32 c, b, 255;
        xor.b32 a, a, c;
        add.u32 $1, a, b;
        }"""
    )

    @triton.jit
    def _matrix(W: tl.constexpr, HALF: tl.constexpr, FORWARD: tl.constexpr, SECOND: tl.constexpr):
        """int32 [W, W]: sB, Bs; dsB, Bsd if SECOND. The blocks beyond HALF meet no number of the line."""
        M: tl.constexpr = HALF & -HALF if HALF & -HALF < 32 else 32
        i = tl.arange(0, W)[:, None]
        j = tl.arange(0, W)[None, :]
        odd = i & j & (M - 1)
        odd ^= odd >> 4
        odd ^= odd >> 2
        odd ^= odd >> 1
        k = (i if FORWARD else j) & 31
        odd ^= 0x68E31DA4 >> k
        if SECOND:
            odd ^= -1255572915 >> k
        return tl.where(i // M == j // M, 1 - 2 * (odd & 1), 0)

    @triton.jit
    def _bfloat16(x):
        """Positive float32 rounded to bfloat16, half to even."""
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)

    @triton.jit
    def _quantize(size, first, second):
        """(indices in the last bits, levels) of rotated numbers of magnitude ``size``."""
        z = tl.minimum(size * first + 100480.0, size * second + 100481.8125)
        selector = z.to(tl.int32, bitcast=True) >> 7
        if _SOFTWARE:
            level = (tl.where((selector & 4) != 0, _HIGH, _LOW) >> ((selector & 3) * 8)) & 255
        else:
            level = tl.inline_asm_elementwise(
                "prmt.b32 $0, 0x2C201306, 0x7A614C3A, $1;", "=r,r", [selector], dtype=tl.int32, is_pure=True, pack=1
            )
        return selector, level.to(tl.float32)

    @triton.jit
    def _encode(lo, hi, FP16: tl.constexpr, G: tl.constexpr):
        W: tl.constexpr = lo.shape[1]
        FINE: tl.constexpr = 261 if G <= 64 else 260
        a = lo.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        b = hi.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.max(tl.maximum(a, b), axis=1)  # [L]
        bad = top >= _INFINITE
        zero = top < 226492416
        exponent = tl.where(bad | zero, 127, top >> 23)
        up = ((FINE - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        # Whole numbers, half to even.
        lo = (lo * up + 12582912.0) - 12582912.0
        hi = (hi * up + 12582912.0) - 12582912.0
        # NaN marks a bad line, 0 a line of zeros: passing another number per line on to the scale would cost two
        # barriers.
        squares = tl.where(bad, float("nan"), tl.sum(lo * lo + hi * hi, axis=1))
        lo = lo.to(tl.float16)
        hi = hi.to(tl.float16)
        first = _matrix(W, G // 2, True, False).to(tl.float16)
        second = _matrix(W, G // 2, True, True).to(tl.float16)
        a = tl.dot(lo, first)
        b = tl.dot(hi, second)
        p, q = a + b, a - b
        low, high = tl.abs(p), tl.abs(q)
        most = tl.max(tl.maximum(low, high), axis=1)
        most = tl.where(most > 1.0, most, 1.0)
        r = tl.math.div_rn(tl.full(most.shape, 256.0, tl.float32), most)
        # Rounded to 8 bits, so that their products with whole numbers are exact.
        one, two = _bfloat16(r * _FIRST)[:, None], _bfloat16(r * _SECOND)[:, None]
        a, level = _quantize(low, one, two)
        b, other = _quantize(high, one, two)
        signs = (p.to(tl.uint32, bitcast=True) & 0x80000000) | ((q.to(tl.uint32, bitcast=True) >> 1) & 0x40000000)
        data = ((a & 7) | ((b & 7) << 4)).to(tl.uint32) | ((signs >> 28) & 8) | ((signs >> 23) & 128)
        product = tl.sum(low * level + high * other, axis=1)
        product = tl.where(product > 1.0, product, 1.0)
        scale = tl.math.div_rn(squares, product)
        scale *= ((254 - FINE + exponent) << 23).to(tl.float32, bitcast=True)
        word = (scale.to(tl.int32, bitcast=True) + 0x4000) >> 15
        word = tl.where(scale == scale, word, 0xFFFF)
        return data.to(tl.uint8), word.to(tl.uint16)

    @triton.jit
    def _signed(code):
        level = (tl.where((code & 4) != 0, _HIGH, _LOW) >> ((code & 3) * 8)) & 255
        return tl.where((code & 8) != 0, -level, level).to(tl.int8)

    @triton.jit
    def _decode(data, word, FP16: tl.constexpr, G: tl.constexpr):
        W: tl.constexpr = data.shape[1]
        if _SOFTWARE:
            lo = _signed(data.to(tl.int32) & 15)
            hi = _signed(data.to(tl.int32) >> 4)
        else:
            lo, hi = tl.inline_asm_elementwise(
                _NIBBLES, "=r,=r,r", [data], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
            )
        first = _matrix(W, G // 2, False, False).to(tl.int8)
        second = _matrix(W, G // 2, False, True)
        p = tl.dot(hi, first, tl.dot(lo, first, out_dtype=tl.int32), out_dtype=tl.int32)
        q = tl.dot(lo, second.to(tl.int8), out_dtype=tl.int32)
        q = tl.dot(hi, (-second).to(tl.int8), q, out_dtype=tl.int32)
        scale = (word.to(tl.int32) << 15).to(tl.float32, bitcast=True)[:, None]
        p = p.to(tl.float32) * scale
        q = q.to(tl.float32) * scale
        if FP16:  # comparisons leave NaN alone
            p = tl.where(p > 65504.0, 65504.0, tl.where(p < -65504.0, -65504.0, p))
            q = tl.where(q > 65504.0, 65504.0, tl.where(q < -65504.0, -65504.0, q))
        return p, q


@cache
def _rotation(half: int) -> torch.Tensor:
    """float32 [line, line]: a line times it is rotated; times its transpose, rotated back and 2m times as long."""
    m = min(half & -half, 32)
    i = torch.arange(half)
    odd = i[:, None] & i[None, :] & (m - 1)
    for shift in (4, 2, 1):
        odd = odd ^ (odd >> shift)
    blocks = torch.where(i[:, None] // m == i[None, :] // m, 1.0 - 2.0 * (odd & 1), 0.0)
    s, d = ((1.0 - 2.0 * (bits >> (i & 31) & 1))[:, None] for bits in (_S, _D))
    first = s * blocks
    second = d * first
    return torch.cat([torch.cat([first, first], dim=1), torch.cat([second, -second], dim=1)], dim=0)


class Rotated4(Format):
    """Half a byte a number: byte i is the code of rotated number i | that of number i + G/2 << 4; a code is the level's
    index, 8 added for negative numbers. Scale: bits 30..15 of a float32, 0 for a line of zeros, 0xFFFF for NaN.
    """

    name = "rot4.64"
    bits, scale_size = 4, 2
    bound = (
        "as a vector, 0.4 of the line's length (square root of the sum of squares) for lines of 64 numbers or less, "
        "0.55 for longer ones, typically 0.09; so no number moves further than that. Lines of magnitudes below 2^-100 "
        "become zeros, lines of zeros are exact, zeros in other lines are not. Inner products of a line with itself "
        "are kept to 2^-9."
    )

    def line(self, count: int) -> int:
        if count % 64 == 0:
            return 64
        return count if count % 16 == 0 and 16 <= count <= 128 else 0

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        line = x.shape[1]
        half, fine = line // 2, _fine(line)
        top = base.magnitudes(x)
        bad, zero = top >= INFINITE, top < _ZERO
        exponent = torch.where(bad | zero, 127, top >> 23)
        up = ((fine - exponent) << 23).view(torch.float32)
        u = (x.float() * up[:, None] + _ROUND - _ROUND).masked_fill(bad[:, None], 0.0)
        h = u @ _rotation(half).to(x.device)
        size = h.abs()
        r = 256.0 / size.amax(dim=1, keepdim=True).clamp_min(1.0)
        z = [size * (r * slope).bfloat16().float() + (_INDEX + o) for slope, o in zip(_SLOPES, _OFFSETS, strict=True)]
        index = (torch.minimum(*z).view(torch.int32) >> 7) & 7
        level = _LEVELS.to(x.device).index_select(0, index.view(-1)).view(index.shape)
        product = (size * level).sum(dim=1).clamp_min(1.0)
        scale = (u * u).sum(dim=1) / product * ((254 - fine + exponent) << 23).view(torch.float32)
        word = (scale.view(torch.int32) + 0x4000) >> 15
        word = word.masked_fill(zero, 0).masked_fill(bad, 0xFFFF)
        code = (index | ((h.view(torch.int32) >> 28) & 8)).to(torch.uint8)
        return code[:, :half] | (code[:, half:] << 4), base.as_bytes(word.to(torch.uint16))

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        word = scales.contiguous().view(torch.uint16).to(torch.int32)  # [n, 1]
        codes = data.reshape(-1).int()
        halves = [t.to(data.device).index_select(0, codes).view(data.shape) for t in (_LOW_NIBBLE, _HIGH_NIBBLE)]
        x = torch.cat(halves, dim=1) @ _rotation(data.shape[1]).to(data.device).T * (word << 15).view(torch.float32)
        return base.from_float32(x, dtype)

    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        share = 0.4 if x.shape[1] <= 64 else 0.55
        length = x.double().norm(dim=1, keepdim=True).clamp_max(torch.finfo(torch.float32).max / 2).float()
        return base.rounded(length * share + 2.0**-100, x)

    @property
    def kernels(self) -> Kernels:
        base.need_triton(triton)
        return Kernels(4, _encode, _decode, fused=True, tiles=((16384, 16, 2), (32768, 16, 1)))


ROT4 = Rotated4()
CODECS = (
    Codec(
        "rot4",
        "4 bits after a Hadamard rotation, a scale for 64 numbers; MLA: rotary part kept",
        {"k": ROT4, "v": ROT4, "latent": ROT4, "rope": KEEP},
    ),
)

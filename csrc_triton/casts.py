"""Conversions between float32 and the dtypes of caches and codecs, which round alike on a GPU and in the interpreter.

A GPU uses its hardware if it can: float8 e4m3 needs compute capability 8.9. Other GPUs, and Triton's interpreter (3.x),
which truncates bfloat16 and does not carry a rounding into the exponent of a float8, use integer arithmetic, round half
to even.
"""

from . import checksum

triton = checksum.triton
if triton is not None:
    import triton.language as tl

    @triton.jit
    def from_cache(bits, FP16: tl.constexpr):
        """float32 of uint16 bits of float16 or bfloat16."""
        if FP16:
            return bits.to(tl.float16, bitcast=True).to(tl.float32)
        else:
            return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)

    INTERPRETED = type(from_cache).__name__ == "InterpretedFunction"
    _SOFTWARE = tl.constexpr(INTERPRETED)

    @triton.constexpr_function
    def _without_e4m3():
        return INTERPRETED or not tl.target_info.cuda_capability_geq(8, 9)

    @triton.jit
    def to_cache(x, FP16: tl.constexpr):
        """uint16 bits of float16 or bfloat16, rounded from float32."""
        if FP16:
            return x.to(tl.float16).to(tl.uint16, bitcast=True)
        elif _SOFTWARE:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)
        else:
            return x.to(tl.bfloat16).to(tl.uint16, bitcast=True)

    @triton.jit
    def to_e4m3(x):
        """uint8 bits of float8 e4m3, rounded from float32 of magnitude 448 or less; undefined for others."""
        if _without_e4m3():
            bits = x.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
            small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
            return (tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
        else:
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)

    @triton.jit
    def from_e4m3(bits):
        """float32 of uint8 bits of float8 e4m3."""
        if _without_e4m3():
            magnitude = (bits & 0x7F).to(tl.int32)
            normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
            small = magnitude.to(tl.float32) * 0.001953125
            x = tl.where(magnitude < 8, small, tl.where(magnitude == 127, float("nan"), normal))
            return tl.where(bits >= 128, -x, x)
        else:
            return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)

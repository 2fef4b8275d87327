"""What a codec is: a format for each field of a cell (``wire.geometry.Field``), and a name that users give.

A *line* is G consecutive numbers of one field of one token and head; a format keeps a line as ``data_bytes`` of data
and ``scale_bytes`` of scales, and knows nothing else of blocks. Common to all lossy formats:

    A line that holds a NaN, an infinity or a number of magnitude 2^126 (8.5e37) or more decodes to NaN throughout:
    its scale says so, its data mean nothing. No other line is touched by it. An outlier coarsens its own line only.

The host's ``encode`` and ``decode`` here are the reference of the kernels and make the same bytes: they use only
operations that IEEE 754 rounds correctly, and the kernels are compiled without contraction to fused multiply-adds
where it would show. Nothing depends on it, though: a checksum covers the bytes that were written, whoever wrote them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from vllm_kvtier.wire.geometry import GroupView

# Dtypes of a region (``Region.dtype``) that codecs know.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# float32 bits from which on a magnitude counts as infinite: 2^126. The sums of what is below do not overflow.
INFINITE = 0x7E800000
# The smallest scale: its reciprocal is still a float32. 2^-126.
TINY = 2.0**-126


class Kernels(NamedTuple):
    """Two ``@triton.jit`` device functions over L lines, W >= G a power of two, beyond G zeros; all that they know
    of the cache's dtype is ``FP16: tl.constexpr`` (else bfloat16), and of G ``G: tl.constexpr``.

    ``bits`` 8:  encode(x, FP16, G) -> data, word       x float32 [L, W], data uint8 [L, W]
                 decode(data, word, FP16, G) -> x
    ``bits`` 4:  encode(lo, hi, FP16, G) -> data, word  float32 [L, G/2]: the line's halves, data uint8 [L, G/2]
                 decode(data, word, FP16, G) -> lo, hi

    ``word``: [L], the line's scales as one unsigned little-endian integer of 8 * scale_bytes bits. What decode
    returns is rounded to the cache's dtype by the caller. ``fused``: every product that a sum follows is exact, so that
    contraction to fused multiply-adds, which is faster, does not show. ``tiles``: (numbers, warps) of a program's tile
    to encode and to decode, what was fastest on an H200 (``benchmarks/codec --ways``), and how many times as many
    programs as a copy has it takes to keep up with a link.
    """

    bits: int
    encode: Any
    decode: Any
    fused: bool = False
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] = ((16384, 8, 1), (16384, 8, 1))


class Format(ABC):
    """How lines are kept. Instances of one name are interchangeable: all that matters is in the name."""

    # Names the bytes for ever: part of the digest that two engines compare. Another meaning is another name.
    name: str
    lossy: bool = True
    # In words: how far a finite line's numbers may move.
    bound: str

    @abstractmethod
    def line(self, count: int) -> int:
        """Numbers of a line in a field of ``count`` numbers; it divides ``count``. 0: this field cannot be kept so."""

    @abstractmethod
    def data_bytes(self, line: int) -> int:
        """Bytes of a line's data."""

    @abstractmethod
    def scale_bytes(self, line: int) -> int:
        """Bytes of a line's scales: 0, 1, 2, 4 or 8."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lines ``x`` [n, G] bfloat16 or float16 as uint8 [n, data_bytes(G)] and uint8 [n, scale_bytes(G)]."""

    @abstractmethod
    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The reverse of :meth:`encode`: [n, G] of ``dtype``. Any bytes at all decode to something."""

    @abstractmethod
    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        """``bound`` in numbers: float32 that broadcasts to [n, G], how far each number of finite lines may move."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels | None:
        """The same on a GPU; None: bytes are copied. RuntimeError without Triton."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Codec:
    """``formats`` by field name ("k", "v", "latent", "rope"); none: every group is kept byte for byte."""

    RAW: ClassVar[str] = "raw"

    name: str
    title: str  # one line in words
    formats: Mapping[str, Format] = field(default_factory=dict)

    @property
    def lossy(self) -> bool:
        return any(f.lossy for f in self.formats.values())

    def reason(self, group: GroupView) -> str | None:
        """In words why ``group`` cannot be kept in this codec, None if it can."""
        if not self.formats:
            return None
        for region in group.regions:
            if region.dtype not in DTYPES:
                return f"layer {region.layer} keeps {region.dtype or 'bytes of no known dtype'}, which stays as it is"
            if not region.fields:
                return f"layer {region.layer}: where its numbers lie within a page is not known"
            for each in region.fields:
                found = self.formats.get(each.name)
                if found is None:
                    return f"layer {region.layer}: {self.name} has no format for the field {each.name!r}"
                if not found.line(each.count):
                    return f"layer {region.layer}: {self.name} cannot keep {each.count} numbers a token and head"
        return None

    def applies(self, group: GroupView) -> bool:
        return self.reason(group) is None


def need_triton(triton: Any) -> None:
    """Raises RuntimeError if the module is None."""
    if triton is None:
        raise RuntimeError("codecs on a GPU need Triton, which vLLM for CUDA brings: pip install triton")


def power_of_two(count: int, most: int, least: int = 16) -> int:
    """The largest power of two that divides ``count``, at most ``most``; 0 if it is less than ``least``."""
    line = min(count & -count, most)
    return line if line >= least else 0


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """int32 [n]: the float32 bits of the largest magnitude of each line [n, G]; NaNs are larger than infinity."""
    return (x.float().view(torch.int32) & 0x7FFFFFFF).amax(dim=1)


def rounded(tolerance: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``tolerance``, and the rounding of what is decoded to x's dtype."""
    info = torch.finfo(x.dtype)
    return tolerance + (x.float().abs() + tolerance) * (info.eps / 2) + info.smallest_normal * info.eps / 2


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes of a number] of a tensor [n]."""
    return x.contiguous().view(torch.uint8).view(x.shape[0], -1)

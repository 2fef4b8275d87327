"""The contracts of codecs: a *codec* has a name and a *format* for each field of a cell (``wire.geometry.Field``).

A *line* is G consecutive numbers of one field of one token and head. A format encodes a line as ``data_bytes`` of data
and ``scale_bytes`` of scales, and knows nothing else of blocks. All lossy formats:

    A line that holds a NaN, an infinity or a number of magnitude 2^126 (8.5e37) or more decodes to NaN throughout: its
    scale marks it, its data have no meaning. No other line is affected. An outlier coarsens its own line only.

``encode`` and ``decode`` on the host are the reference of the kernels and produce the same bytes: they use only
operations that IEEE 754 rounds correctly, and the kernels are compiled without contraction to fused multiply-adds where
it would change a result. Correctness does not depend on it: a checksum covers the written bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from vllm_kvtier.wire.geometry import GroupView

# Dtypes of a region (``Region.dtype``) that codecs encode.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# float32 bits from which a magnitude counts as infinite: 2^126. Sums of smaller magnitudes do not overflow.
INFINITE = 0x7E800000
# The smallest scale: its reciprocal is still a float32. 2^-126.
TINY = 2.0**-126
LARGEST_FP16 = 65504.0


class Kernels(NamedTuple):
    """Two ``@triton.jit`` device functions over L lines. W >= G is a power of two, with zeros beyond G. ``FP16:
    tl.constexpr`` is the cache's dtype (else bfloat16), ``G: tl.constexpr`` the line.

    ``bits`` 8:  encode(x, FP16, G) -> data, word       x float32 [L, W], data uint8 [L, W]
                 decode(data, word, FP16, G) -> x
    ``bits`` 4:  encode(lo, hi, FP16, G) -> data, word  float32 [L, W/2]: the line's halves, data uint8 [L, W/2]
                 decode(data, word, FP16, G) -> lo, hi

    A tile is at least 64 numbers wide, so that short lines have zeros beyond G: they must not enter a minimum.

    ``word``: [L], the line's scales as one unsigned little-endian integer of 8 * scale_bytes bits. The caller rounds
    the result of decode to the cache's dtype. ``csrc_triton/encoded_pages.py`` moves a byte per number (8) or per pair
    (4); a format of another width keeps the rest of its bits in ``word``, or needs a branch there.

    ``fused``: every product that is added is exact, so that fused multiply-adds, which are faster, change nothing.
    ``tiles``, to encode and to decode: (numbers, warps) of a program's tile, the fastest on an H200 (``benchmarks/codec
    --ways``), and how many times the programs of a raw copy keep up with a link.
    """

    bits: int
    encode: Any
    decode: Any
    fused: bool = False
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] = ((16384, 8, 1), (16384, 8, 1))


class Format(ABC):
    """How lines are encoded. Formats of one name are interchangeable."""

    # Names the bytes for ever: part of the digest that two engines compare. Other bytes need another name.
    name: str
    lossy: bool = True
    # For docs: how far a finite line's numbers may move.
    bound: str
    bits: int  # of data per number
    scale_size: int  # bytes of a line's scales: 0, 1, 2, 4 or 8

    @abstractmethod
    def line(self, count: int) -> int:
        """Numbers of a line in a field of ``count`` numbers, a divisor of ``count``. 0: the format cannot encode it."""

    def data_bytes(self, line: int) -> int:
        """Bytes of a line's data."""
        return line * self.bits // 8

    def scale_bytes(self, line: int) -> int:
        """Bytes of a line's scales."""
        return self.scale_size

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode lines ``x`` [n, G], bfloat16 or float16, as uint8 [n, data_bytes(G)] and uint8 [n, scale_bytes(G)]."""

    @abstractmethod
    def decode(self, data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode to [n, G] of ``dtype``. Any bytes decode to some number, without an error."""

    @abstractmethod
    def tolerance(self, x: torch.Tensor) -> torch.Tensor:
        """``bound`` as float32 that broadcasts to [n, G]: how far each number of finite lines may move."""

    @property
    @abstractmethod
    def kernels(self) -> Kernels | None:
        """The same on a GPU. None: the format copies 16 bits a number. Raises RuntimeError without Triton."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class CutFormat(Format):
    """Cuts fields into lines of at most ``max_line`` numbers, a power of two from 16 on; None: a field is a line."""

    kind: str  # the name without the length of a line

    def __init__(self, max_line: int | None = None):
        self._max_line = max_line
        self.name = f"{self.kind}.{max_line or 'all'}"

    def line(self, count: int) -> int:
        if self._max_line is None:
            return count
        line = min(count & -count, self._max_line)
        return line if line >= 16 else 0


@dataclass(frozen=True)
class Codec:
    """``formats`` by field name ("k", "v", "latent", "rope"); without formats every group is copied byte for byte."""

    RAW: ClassVar[str] = "raw"

    name: str
    title: str  # one line, for the help
    formats: Mapping[str, Format] = field(default_factory=dict)

    @property
    def lossy(self) -> bool:
        return any(f.lossy for f in self.formats.values())

    def reason(self, group: GroupView) -> str | None:
        """Why this codec does not apply to ``group``; None if it does."""
        if not self.formats:
            return None
        for region in group.regions:
            if region.dtype not in DTYPES:
                return f"layer {region.layer} holds {region.dtype or 'an unknown dtype'}, not bfloat16 or float16"
            if not region.fields:
                return f"layer {region.layer}: the order of its numbers within a page is unknown"
            for each in region.fields:
                found = self.formats.get(each.name)
                if found is None:
                    return f"layer {region.layer}: {self.name} has no format for the field {each.name!r}"
                if not found.line(each.count):
                    return f"layer {region.layer}: {self.name} cannot encode {each.count} numbers a token and head"
        return None

    def applies(self, group: GroupView) -> bool:
        return self.reason(group) is None


def need_triton(triton: Any) -> None:
    """Raises RuntimeError if the module is None."""
    if triton is None:
        raise RuntimeError("codecs on a GPU need Triton, which vLLM for CUDA brings: pip install triton")


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """int32 [n]: the float32 bits of the largest magnitude of each line [n, G]; NaNs are larger than infinity."""
    return (x.float().view(torch.int32) & 0x7FFFFFFF).amax(dim=1)


def rounded(tolerance: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``tolerance``, and the rounding of what is decoded to x's dtype."""
    info = torch.finfo(x.dtype)
    return tolerance + (x.float().abs() + tolerance) * (info.eps / 2) + info.smallest_normal * info.eps / 2


def from_float32(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in ``dtype``; numbers beyond float16 become its largest, NaN stays."""
    if dtype == torch.float16:
        x = x.clamp(-LARGEST_FP16, LARGEST_FP16)
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes of a number] of a tensor [n]."""
    return x.contiguous().view(torch.uint8).view(x.shape[0], -1)

"""The checksum of KV blocks, read in place from strided pages.

Definition (all arithmetic modulo 2^64; :mod:`checksum_reference` is the same in plain numpy):

    A block's words are counted in logical order: region, outer index, cell, byte within the cell. A region's
    word is 8 bytes, little-endian, or 4 bytes, zero-extended, where its cells are no multiple of 8 bytes.
    Word ``w`` with index ``i`` within the block (over all regions, whether its cell counts or not) adds

        x = w * r(i)
        y = (x ^ (x >> 32)) * r(i)             r(i) = h | 1,  h = g ^ (g >> 29),  g = (f ^ (f >> 32)) * M2,
                                               f = (i + 1) * M1

    Cells whose first token is at or beyond the block's number of valid tokens add nothing. Then

        sum = fmix64((sum of all y + N * M1) ^ key)

    with N the number of words that were added and fmix64 the finalizer of MurmurHash3. Neither strides nor
    the physical order of a page enter: two engines with different layouts make the same sum.

What it detects. ``r`` is odd, so w -> x -> y is a bijection of 64-bit words (multiplication by an odd number and
x ^ (x >> 32) both are). A change of one word, in particular any single bit flip, therefore changes exactly one term of
the sum, hence the sum, hence the result, since fmix64 is a bijection: it is always detected. So is a wrong key over
right bytes. Several changed words are missed if their differences cancel: with probability about 2^-64 for unrelated
data. In the worst structured case known, flips of the highest bit of two words, it is 2^-33 over the choice of the
words (r(i) = +-r(j) mod 2^33 is needed). Exchanged words, blocks and layers change the multipliers; cut and shifted
pages change the count or all terms. It protects against faults of memory, transport and bookkeeping, not against an
adversary that chooses bytes.

A sum of 32-bit murmur words would need six multiplications for eight bytes instead of two, which are the cost on a CPU
core and on a few SMs alike.
"""

from typing import TYPE_CHECKING

import numpy as np

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU need not have it
    triton = None

if TYPE_CHECKING:
    import torch

M1 = 0x9E3779B97F4A7C15
M2 = 0xD6E8FEB86659FD93
F1 = 0xFF51AFD7ED558CCD
F2 = 0xC4CEB9FE1A85EC53

# One program uses one SM. More programs would take SMs from the model's kernels, which run at the same time; 32 of an
# H200's 132 read faster than NVLink delivers.
MAX_PROGRAMS = 32
# A tile is ROWS blocks by COLUMNS words: the multipliers and offsets of a column, which cost as much as the sum itself,
# are computed once for ROWS blocks. 4 x 1024 words are 32 KiB of loads in flight per program.
ROWS = 4
COLUMNS = 1024
NUM_WARPS = 8

# Columns of the region table [regions, 11] (int64, on the device); sizes in bytes unless noted.
REGION_FIELDS = (
    "base",
    "block_stride",
    "outer_stride",
    "token_stride",
    "words",  # of a block in this region; word_bytes() each
    "cell_words",  # the same of a cell
    "tokens",
    "first_word",  # index of this region's first word within the block
    "first_token",
    "cell_tokens",
    "word",  # bytes of a word
)
ACCESS_FLAGS = ("WORD", "DENSE", "SPLIT", "PAIRS")  # in the order of the kernels' signatures

if triton is not None:
    _M1 = tl.constexpr(M1)
    _M2 = tl.constexpr(M2)
    _F1 = tl.constexpr(F1)
    _F2 = tl.constexpr(F2)

    @triton.jit
    def multipliers(index):
        """uint64 r(i) of the words at ``index`` (int64) in the block."""
        f = (index + 1).to(tl.uint64) * _M1
        g = (f ^ (f >> 32)) * _M2
        return (g ^ (g >> 29)) | 1

    @triton.jit
    def terms(words, r):
        """int64 terms of uint64 words; 0 where the word is."""
        x = words * r
        return ((x ^ (x >> 32)) * r).to(tl.int64, bitcast=True)

    @triton.jit
    def finish(total, words, key):
        """uint64 checksums, of the sums of all terms, the numbers of words and the keys; all uint64."""
        h = (total + words * _M1) ^ key
        h = (h ^ (h >> 33)) * _F1
        h = (h ^ (h >> 33)) * _F2
        return h ^ (h >> 33)

    # Not specialized: compiling for each kind of number would stall a step for a second.
    @triton.jit(do_not_specialize=["n", "tiles", "programs"])
    def _page_checksums(
        acc_ptr,  # int64 [n]: the sums so far
        blocks_ptr,  # int64 [n, 4]: block id, key, valid tokens, words that count
        regions_ptr,  # int64 [regions, 11]
        tiles_ptr,  # int32 [tiles, 2]: region, first word
        n,
        tiles,
        programs,
        FIELDS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        WORD: tl.constexpr,  # bytes
        DENSE: tl.constexpr,  # cells follow each other in logical order
        SPLIT: tl.constexpr,  # addresses are multiples of 4 only
        PAIRS: tl.constexpr,  # two words at a time are contiguous and aligned to 16 bytes
    ):
        groups = tl.cdiv(n, ROWS)
        for item in range(tl.program_id(0), tiles * groups, programs):
            tile = item // groups
            row = (item % groups) * ROWS + tl.arange(0, ROWS)  # [ROWS]
            exists = row < n
            region = tl.load(tiles_ptr + tile * 2)
            first = tl.load(tiles_ptr + tile * 2 + 1)
            table = regions_ptr + region * FIELDS
            base = tl.load(table)
            block_stride = tl.load(table + 1)
            outer_stride = tl.load(table + 2)
            token_stride = tl.load(table + 3)
            words = tl.load(table + 4).to(tl.int32)
            cell_words = tl.load(table + 5).to(tl.int32)
            tokens = tl.load(table + 6).to(tl.int32)
            first_word = tl.load(table + 7)
            first_token = tl.load(table + 8).to(tl.int32)
            cell_tokens = tl.load(table + 9).to(tl.int32)

            block = tl.load(blocks_ptr + row * 4, mask=exists, other=0)  # [ROWS] int64
            valid = tl.load(blocks_ptr + row * 4 + 2, mask=exists, other=0).to(tl.int32)
            cells = (valid - first_token + cell_tokens - 1) // cell_tokens  # [ROWS]

            column = first + tl.arange(0, COLUMNS)  # [COLUMNS] word within the region
            cell = column // cell_words
            token = cell % tokens
            if DENSE:
                offset = column.to(tl.int64) * WORD
            else:
                outer = (cell // tokens).to(tl.int64)
                inner = (column % cell_words).to(tl.int64)
                offset = outer * outer_stride + token.to(tl.int64) * token_stride + inner * WORD

            r = multipliers(first_word + column.to(tl.int64))[None, :]  # [1, COLUMNS]
            page = base + block * block_stride  # [ROWS]
            address = page[:, None] + offset[None, :]  # [ROWS, COLUMNS] bytes
            counts = exists[:, None] & (column < words)[None, :] & (token[None, :] < cells[:, None])
            if WORD == 4:
                p = address.to(tl.pointer_type(tl.uint32))
                w = tl.load(p, mask=counts, other=0).to(tl.uint64)
            elif SPLIT:
                p = address.to(tl.pointer_type(tl.uint32))
                low = tl.load(p, mask=counts, other=0).to(tl.uint64)
                high = tl.load(p + 1, mask=counts, other=0).to(tl.uint64)
                w = low | (high << 32)
            else:
                p = address.to(tl.pointer_type(tl.uint64))
                if PAIRS:
                    # The compiler cannot infer it from the tables: two words are adjacent and count together.
                    p = tl.max_contiguous(tl.multiple_of(p, [1, 16]), [1, 2])
                    counts = tl.max_constancy(counts, [1, 2])
                w = tl.load(p, mask=counts, other=0)
            part = tl.sum(terms(w, r), axis=1)  # [ROWS]
            # Addition modulo 2^64 commutes: the result does not depend on the order of the programs.
            tl.atomic_add(acc_ptr + row, part, mask=exists, sem="relaxed")

    @triton.jit(do_not_specialize=["n"])
    def _finish(acc_ptr, blocks_ptr, n, SIZE: tl.constexpr):
        row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        exists = row < n
        key = tl.load(blocks_ptr + row * 4 + 1, mask=exists, other=0).to(tl.uint64, bitcast=True)
        words = tl.load(blocks_ptr + row * 4 + 3, mask=exists, other=0).to(tl.uint64, bitcast=True)
        acc = tl.load(acc_ptr + row, mask=exists, other=0).to(tl.uint64, bitcast=True)
        tl.store(acc_ptr + row, finish(acc, words, key).to(tl.int64, bitcast=True), mask=exists)


def word_bytes(inner: int) -> int:
    """Bytes of a word in a region whose cells are ``inner`` bytes; ValueError unless a multiple of 4."""
    if inner % 4:
        raise ValueError(f"cells of {inner} bytes have no whole words of 4 bytes")
    return 8 if inner % 8 == 0 else 4


def plan(regions: np.ndarray) -> list[tuple[dict[str, int | bool], np.ndarray]]:
    """Split a region table into launches: (constexpr flags, int32 tiles [m, 2]) of each.

    ``regions``: int64 [regions, 11] as in REGION_FIELDS.
    """
    launches: dict[tuple, list[tuple[int, int]]] = {}
    for number, row in enumerate(regions.tolist()):
        flags, _ = access(row)
        launches.setdefault(flags, []).extend((number, first) for first in range(0, row[4], COLUMNS))
    return [
        (dict(zip(ACCESS_FLAGS, flags, strict=True)), np.array(tiles, dtype=np.int32))
        for flags, tiles in launches.items()
    ]


def access(row: list[int]) -> tuple[tuple[int, bool, bool, bool], int]:
    """How a kernel reads a region, a row of the table: (ACCESS_FLAGS; a number with the alignment of all addresses)."""
    base, block_stride, outer_stride, token_stride, words, cell_words, tokens, _, _, _, word = row[: len(REGION_FIELDS)]
    inner = cell_words * word
    outer = words // cell_words // tokens
    dense = (tokens == 1 or token_stride == inner) and (outer == 1 or outer_stride == tokens * inner)
    # A stride along a dimension of size one is never taken.
    together = base | block_stride | (outer_stride if outer > 1 else 0) | (token_stride if tokens > 1 else 0)
    split = word == 8 and together % 8 != 0
    pairs = word == 8 and together % 16 == 0 and inner % 16 == 0
    return (word, dense, split, pairs), together


def launch(
    acc: "torch.Tensor",
    blocks: "torch.Tensor",
    regions: "torch.Tensor",
    launches: list[tuple[dict[str, int | bool], "torch.Tensor"]],
    max_programs: int = MAX_PROGRAMS,
) -> None:
    """Add up the blocks' pages into ``acc`` and finish the checksums there, on the current stream.

    ``acc``: int64 [n], zeros. ``blocks``: int64 [n, 4] (block id, key, valid tokens, words that count).
    ``regions``: int64 [regions, 11]. ``launches``: from :func:`plan`, tiles on the device. Contiguous, all
    on one device. Returns without waiting for the device. Raises RuntimeError without Triton.
    """
    if triton is None:
        raise RuntimeError("checksums on a GPU need Triton, which vLLM for CUDA brings: pip install triton")
    n = acc.shape[0]
    for flags, tiles in launches:
        programs = min(max_programs, tiles.shape[0] * triton.cdiv(n, ROWS))
        _page_checksums[(programs,)](
            acc,
            blocks,
            regions,
            tiles,
            n,
            tiles.shape[0],
            programs,
            FIELDS=len(REGION_FIELDS),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
            **flags,
        )
    _finish[(triton.cdiv(n, 256),)](acc, blocks, n, SIZE=256)

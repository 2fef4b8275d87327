"""Divides a copy from another GPU's cache into tiles, segments and shares of programs, for :mod:`peer_copy`. numpy
only."""

from dataclasses import dataclass

import numpy as np

# Columns of a part's region table [regions, 18] (int64): addresses as this process sees them, strides in bytes. Outer
# indices first_outer .. first_outer + outers - 1 of the source are stored, the first of them as target_outer.
REGION_FIELDS = (
    "source_base", "source_block", "source_outer", "source_token",
    "target_base", "target_block", "target_outer_stride", "target_token",
    "words", "cell_words", "tokens", "first_word", "first_token", "cell_tokens", "word",
    "first_outer", "outers", "target_outer",
)  # fmt: skip
# Columns of the table of rows [n, 8] (int64). ``expected``: address of the source's checksum of the block;
# ``result``: of a byte; ``entry``: of our block's entry in the table of checksums: it becomes this checksum if that is
# right and IDENTICAL_LAYOUT is added to the address, else 0; with address 0 it does not change. A row of zeros is
# padding.
ROW_FIELDS = ("source", "target", "key", "valid", "words", "expected", "result", "entry")
ROW, IDENTICAL_LAYOUT = len(ROW_FIELDS), 1
# Columns of the table of segments [s, 16] (int64), the last 2 not used: first row, groups of ROWS rows, address of the
# tiles, their number; and the constants of all these tiles, of both sides and of the checksum.
SEGMENT = 16
# Columns of the table of program starts [programs, 4]: segment, group in it, tile, number of tiles.
START = 4
MANY = 1 << 30  # cells: more than any region has
# Rows of one part's group are padded to a multiple of this, which every ROWS divides.
PAD = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the division, in one place for benchmarks.

    ``tiles``: (COLUMNS, ROWS), the first that a page fills well. Both are powers of two, and ROWS divides PAD. ROWS
    blocks share the multipliers of a column, which cost as much as the terms; but with large pages there are few
    blocks. ``warps`` per program: with 16, a tile of 32 KiB is 64 bytes per thread, and the next tile is in flight as
    well. ``programs``: SMs that a copy may use. ``max_rows``: of one launch, a multiple of PAD; the scratch on the
    device is made for so many (2 MiB).
    """

    tiles: tuple[tuple[int, int], ...] = ((4096, 1), (2048, 2), (1024, 4), (512, 8))
    warps: int = 16
    programs: int = 20
    max_rows: int = 16384

    def __post_init__(self) -> None:
        if self.max_rows % PAD:
            raise ValueError(f"launches of {self.max_rows} rows: they come in multiples of {PAD}")

    def tile(self, words: int) -> tuple[int, int]:
        """For pages of ``words``: the first tile that loads at most an eighth more than the best one, padding
        included."""
        loaded = [-(-words // columns) * columns for columns, _ in self.tiles]
        return next(tile for tile, n in zip(self.tiles, loaded, strict=True) if 8 * n <= 9 * min(loaded))


SHAPE = Shape()
# A kernel's compile-time constants, by name.
Flags = tuple[tuple[str, int | bool], ...]


@dataclass(frozen=True)
class Kind:
    """Regions of a part that go in one segment: ``flags`` of the move, ``constants`` (columns 4 to 13 of a segment) and
    ``tiles``, int64 [m, 4]: address of the region in the source, in ours, index of the tile's first word in the block,
    and in the region."""

    flags: Flags
    constants: tuple[int, ...]
    tiles: np.ndarray


def plan(regions: np.ndarray, shape: Shape = SHAPE) -> list[Kind]:
    """The kinds of a part's group. ``regions``: int64 [regions, 18] as in REGION_FIELDS.

    Raises ValueError for addresses or strides that are no multiples of 4.
    """
    alike = regions.copy()  # most layers differ in these only; the kernels depend on the last bits of addresses
    alike[:, [0, 4]] %= 16
    alike[:, 11] = 0
    numbers: dict[bytes, list[int]] = {}
    for number, line in enumerate(alike.view(f"V{alike.itemsize * alike.shape[1]}").ravel().tolist()):
        numbers.setdefault(line, []).append(number)
    kinds: dict[tuple, tuple[list[int], list[np.ndarray]]] = {}
    for same in numbers.values():
        number, line = same[0], regions[same[0]].tolist()
        r = dict(zip(REGION_FIELDS, line, strict=True))
        inner = r["cell_words"] * r["word"]
        outer = r["words"] // r["cell_words"] // r["tokens"]
        source = (r["source_block"], r["source_outer"] if outer > 1 else 0, r["source_token"])
        # As if all of the source's outer indices were stored. If only one is, its stride is arbitrary: a dense one.
        outer_stride = r["target_outer_stride"] if r["outers"] > 1 else r["tokens"] * inner
        target = (r["target_block"], outer_stride, r["target_token"])
        target_base = r["target_base"] + r["target_outer"] * r["target_outer_stride"] - r["first_outer"] * outer_stride
        if r["tokens"] == 1:  # a stride along a dimension of size one is never taken
            source, target = (*source[:2], 0), (*target[:2], 0)
        if not r["outers"]:
            target_base, target = 0, (0, 0, 0)
        together = r["source_base"] | target_base
        for stride in (*source, *target):
            together |= stride
        if together % 4:
            raise ValueError(
                f"region {number} is at {r['source_base']:#x} with strides {source} in the source and at "
                f"{r['target_base']:#x} with strides {target} here: the copy kernel needs multiples of 4 bytes"
            )
        source_dense = _dense(outer, r["tokens"], inner, *source[1:])
        target_dense = not r["outers"] or _dense(outer, r["tokens"], inner, *target[1:])
        split = r["word"] == 8 and together % 8 != 0
        pairs = r["word"] == 8 and together % 16 == 0 and inner % 16 == 0
        columns, rows = shape.tile(r["words"])
        flags = {
            "ROWS": rows, "COLUMNS": columns, "LANES": min(columns, 32 * shape.warps * (2 if pairs else 1)),
            # Of one outer index any number is right that is not less, and each number would be a kernel to compile.
            "CELL": r["cell_words"], "TOKENS": r["tokens"] if outer > 1 else MANY, "CELL_TOKENS": r["cell_tokens"],
            "WORD": r["word"],
            "TARGET_DENSE": target_dense, "SOURCE_DENSE": source_dense, "SPLIT": split, "PAIRS": pairs,
        }  # fmt: skip
        line_words = r["cell_words"] * r["tokens"]
        stored = (r["first_outer"] * line_words, (r["first_outer"] + r["outers"]) * line_words)
        constants = (*source, *target, r["words"], *stored, r["first_token"])
        at = np.arange(0, r["words"], columns)
        tiles = np.zeros((len(same), len(at), 4), dtype=np.int64)
        tiles[:, :, 0] = regions[same, 0, None]
        if r["outers"]:
            tiles[:, :, 1] = regions[same, 4, None] + (target_base - r["target_base"])
        tiles[:, :, 2] = regions[same, 11, None] + at
        tiles[:, :, 3] = at
        found = kinds.setdefault((tuple(flags.items()), constants), ([], []))
        found[0].extend(same)
        found[1].append(tiles)
    return [Kind(*key, np.concatenate(tiles)[np.argsort(n)].reshape(-1, 4)) for key, (n, tiles) in kinds.items()]


def _dense(outer: int, tokens: int, inner: int, outer_stride: int, token_stride: int) -> bool:
    return (tokens == 1 or token_stride == inner) and (outer == 1 or outer_stride == tokens * inner)


def starts(groups: np.ndarray, tiles: np.ndarray, programs: int) -> np.ndarray:
    """int64 [programs, 4]: the start of each program and its number of tiles, in equal shares.

    ``groups``, ``tiles``: int64 [segments], at least one of each. Fewer programs if there are fewer tiles.
    """
    ends = np.cumsum(groups * tiles)
    total = int(ends[-1])
    programs = min(programs, total)
    cuts = np.arange(programs + 1, dtype=np.int64) * total // programs
    first = cuts[:-1]
    segment = np.searchsorted(ends, first, side="right")
    within = first - (ends - groups * tiles)[segment]
    group, tile = np.divmod(within, tiles[segment])
    return np.stack([segment, group, tile, np.diff(cuts)], axis=1)

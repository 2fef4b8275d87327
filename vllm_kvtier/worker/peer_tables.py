"""What the kernel that copies from other GPUs is told: where pages are, which blocks, who does what (no CUDA here).

Rows, segments and starts of all jobs of a call go into one stretch of 64-bit words, the *work*; ``kernels.peer_plan``
says what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvtier.kernels import checksum, peer_plan
from vllm_kvtier.worker.cover import PartGroup, PartRegion
from vllm_kvtier.worker.work import GroupPull

_MOST_SEGMENTS = 1024  # of a round
_MOST_KINDS = 64  # of a group: layers of one model have one or two


class GroupTable:
    """One group of one rank of a source, as this process sees it."""

    def __init__(
        self,
        part: PartGroup,
        num_blocks: int,
        sums_base: int,
        translate: Callable[[int, int], int],
        device: torch.device,
        shape: peer_plan.Shape,
    ):
        """``num_blocks``, ``sums_base``: of that rank; the latter, as all addresses in ``part``, as the source sees it.
        ``translate(address, nbytes)``: where that is here; it raises what this raises.

        Raises ValueError for pages that cannot be copied by words of 4 bytes, or of too many kinds.
        """
        self.group, self.whole, self.num_blocks = part.group, part.whole, num_blocks
        self.sums_base = translate(sums_base, num_blocks * 8)
        rows, first = [], 0
        self._cells: list[tuple[int, int, int, int]] = []  # first token, tokens of a cell, cells, words of all outer
        for each in part.regions:
            rows.append(_region_row(each, num_blocks, translate, first))
            r, words = each.source, rows[-1][8]
            self._cells.append((r.first_token, r.cell_tokens, r.tokens, words // r.tokens))
            first += words
        self.block_bytes = sum(each.source.block_bytes for each in part.regions)
        self.kinds = peer_plan.plan(np.array(rows, dtype=np.int64), shape)
        if len(self.kinds) > _MOST_KINDS:
            raise ValueError(f"group {part.group} has pages of {len(self.kinds)} kinds, more than {_MOST_KINDS}")
        self._tiles = [torch.from_numpy(kind.tiles).to(device) for kind in self.kinds]
        # Of each kind: columns 2 to 13 of its segments.
        self._segments = [
            np.array([tiles.data_ptr(), len(tiles), *kind.constants], dtype=np.int64)
            for kind, tiles in zip(self.kinds, self._tiles, strict=True)
        ]

    def words(self, valid: np.ndarray) -> np.ndarray:
        """int64 [n]: how many words count in blocks with so many valid tokens."""
        found = np.zeros(len(valid), dtype=np.int64)
        for first_token, cell_tokens, cells, words in self._cells:
            found += np.clip(-(-(valid - first_token) // cell_tokens), 0, cells) * words
        return found

    def segments(self, first_row: int, rows: int) -> list[tuple[peer_plan.Flags, np.ndarray]]:
        """(flags, int64 [16]) of each kind, for rows of this group that begin at ``first_row``."""
        made = []
        for kind, rest in zip(self.kinds, self._segments, strict=True):
            line = np.zeros(peer_plan.SEGMENT, dtype=np.int64)
            line[0], line[1] = first_row, -(-rows // dict(kind.flags)["ROWS"])
            line[2 : 2 + len(rest)] = rest
            made.append((kind.flags, line))
        return made


def _region_row(each: PartRegion, num_blocks: int, translate: Callable[[int, int], int], first: int) -> tuple:
    s, t = each.source, each.target
    word = checksum.word_bytes(s.inner)
    base = translate(s.base, (num_blocks - 1) * s.block_stride + s.page_extent)
    target = (0, 0, 0, 0) if t is None else (t.base, t.block_stride, t.outer_stride, t.token_stride)
    words = s.block_bytes // word
    cells = (words, s.inner // word, s.tokens, first, s.first_token, s.cell_tokens, word)
    stored = (0, 0, 0) if t is None else (each.first_outer, each.outers, each.target_outer)
    return (base, s.block_stride, s.outer_stride, s.token_stride, *target, *cells, *stored)


@dataclass
class Batch:
    """Blocks of one group from one rank of a source."""

    table: GroupTable
    pull: GroupPull

    def __len__(self) -> int:
        return len(self.pull.local)


class Round(NamedTuple):
    """One launch: its work is ``words`` words from ``at`` on, of which ``rows`` rows are first."""

    at: int
    words: int
    rows: int
    moves: list[tuple[peer_plan.Flags, int, int, int]]  # flags, segments, starts, programs


def padded(rows: int) -> int:
    return -(-rows // peer_plan.PAD) * peer_plan.PAD


def most_words(batches: Sequence[Batch], shape: peer_plan.Shape, most_rows: int) -> int:
    """How many words :func:`pack` needs at most."""
    words = 0
    for batch in batches:
        pieces = len(batch) // most_rows + 2
        words += padded(len(batch)) * peer_plan.ROW + peer_plan.PAD * peer_plan.ROW * pieces
        words += len(batch.table.kinds) * pieces * (peer_plan.SEGMENT + peer_plan.START * shape.programs)
    return words


def room(most_rows: int, shape: peer_plan.Shape) -> int:
    """Words that every round fits in."""
    return most_rows * peer_plan.ROW + _MOST_SEGMENTS * (peer_plan.SEGMENT + peer_plan.START * shape.programs)


def pack(
    batches: Sequence[Batch], words: np.ndarray, verdicts: int, entries: int, shape: peer_plan.Shape, most_rows: int
) -> tuple[list[Round], list[tuple[int, int]]]:
    """Writes the work of all batches into ``words``, int64 of :func:`most_words`.

    ``verdicts``: address of a byte for each row, of all rounds. ``entries``: address of our table of checksums, int64
    [blocks]. Returns the rounds, each of ``most_rows`` rows (a multiple of PAD) at most, and for each batch (its first
    verdict, how many): rows that pad are between.
    """
    rounds: list[Round] = []
    places: list[tuple[int, int]] = []
    open_: list[tuple[peer_plan.Flags, np.ndarray]] = []  # segments of the round that is being made
    at = rows = verdict = 0

    def end() -> None:
        nonlocal at, rows, open_
        if not rows:
            return
        used, moves = rows * peer_plan.ROW, []
        for flags in dict.fromkeys(flags for flags, _ in open_):
            lines = np.stack([line for f, line in open_ if f == flags])
            begins = peer_plan.starts(lines[:, 1], lines[:, 3], shape.programs)
            moves.append((flags, used, used + lines.size, len(begins)))
            for block in (lines, begins):
                words[at + used : at + used + block.size] = block.reshape(-1)
                used += block.size
        rounds.append(Round(at, used, rows, moves))
        at, rows, open_ = at + used, 0, []

    for batch in batches:
        places.append((verdict, len(batch)))
        done = 0
        while done < len(batch):
            if rows == most_rows or len(open_) + len(batch.table.kinds) > _MOST_SEGMENTS:
                end()
            count = min(len(batch) - done, most_rows - rows)
            _fill(batch, slice(done, done + count), words[at + rows * peer_plan.ROW :], verdicts + verdict, entries)
            open_ += batch.table.segments(rows, count)
            rows, verdict, done = rows + padded(count), verdict + count, done + count
    end()
    return rounds, places


def _fill(batch: Batch, part: slice, words: np.ndarray, verdicts: int, entries: int) -> None:
    table, pull = batch.table, batch.pull
    local, remote = (np.asarray(ids[part], dtype=np.int64) for ids in (pull.local, pull.remote))
    valid = np.asarray(pull.valid[part], dtype=np.int64)
    n = len(local)
    lines = words[: padded(n) * peer_plan.ROW].reshape(-1, peer_plan.ROW)
    lines[n:] = 0
    lines[:n, 0] = remote
    lines[:n, 1] = local
    lines[:n, 2] = np.asarray(pull.keys[part], dtype=np.uint64).view(np.int64)
    lines[:n, 3] = valid
    lines[:n, 4] = table.words(valid)
    lines[:n, 5] = table.sums_base + remote * 8
    lines[:n, 6] = verdicts + np.arange(n)
    lines[:n, 7] = entries + local * 8 + (peer_plan.WHOLE if table.whole else 0)

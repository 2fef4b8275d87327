"""Arguments of the kernel that copies from other GPUs: addresses of pages, blocks, and each program's share. No CUDA.

Rows, segments and starts of all jobs of a call are packed into one array of 64-bit words, the *work*;
``kernels.peer_copy_plan`` defines them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.kernels import checksum, peer_copy_plan
from vllm_kvtier.shapes.tp_mapping import SourceGroup, SourceRegion

_WORDS, _FIRST_WORD, *_CELLS = (
    peer_copy_plan.REGION_FIELDS.index(name) for name in ("words", "first_word", "first_token", "cell_tokens", "tokens")
)
_MAX_SEGMENTS = 1024  # of a round
_MAX_KINDS = 64  # of a group: layers of one model have one or two


class GroupTable:
    """One group of one rank of a source, at this process's addresses."""

    def __init__(
        self,
        part: SourceGroup,
        num_blocks: int,
        checksum_table_addr: int,
        translate: Callable[[int, int], int],
        device: torch.device,
        shape: peer_copy_plan.Shape,
    ):
        """``num_blocks``, ``checksum_table_addr``: of that rank. The address, like those in ``part``, is the source's;
        ``translate(address, nbytes)`` returns this process's, and its errors pass.

        Raises ValueError for pages that cannot be copied by words of 4 bytes, or that have too many kinds.
        """
        self.group, self.identical_layout, self.num_blocks = part.group, part.identical_layout, num_blocks
        self.shift = part.shift
        self.checksum_table_addr = translate(checksum_table_addr, num_blocks * 8)
        rows = np.concatenate([_region_rows(each, num_blocks, translate) for each in part.regions])
        words = rows[:, _WORDS]
        rows[:, _FIRST_WORD] = np.cumsum(words) - words
        # (first token, tokens of a cell, cells) -> words of one of these cells, in all rows that have them
        self._cells: Counter[tuple[int, int, int]] = Counter()
        for n, first_token, cell_tokens, cells in rows[:, [_WORDS, *_CELLS]].tolist():
            self._cells[first_token, cell_tokens, cells] += n // cells
        self.block_bytes = sum(each.source.block_bytes for each in part.regions)
        self.kinds = peer_copy_plan.plan(rows, shape)
        if len(self.kinds) > _MAX_KINDS:
            raise ValueError(f"group {part.group} has pages of {len(self.kinds)} kinds, more than {_MAX_KINDS}")
        self._tiles = [torch.from_numpy(kind.tiles).to(device) for kind in self.kinds]
        # Of each kind: columns 2 to 13 of its segments.
        self._segments = [
            np.array([tiles.data_ptr(), len(tiles), *kind.constants], dtype=np.int64)
            for kind, tiles in zip(self.kinds, self._tiles, strict=True)
        ]

    def words(self, valid: np.ndarray) -> np.ndarray:
        """int64 [n]: words that count in blocks with ``valid`` tokens."""
        found = np.zeros(len(valid), dtype=np.int64)
        for (first_token, cell_tokens, cells), words in self._cells.items():
            found += np.clip(-(-(valid - first_token) // cell_tokens), 0, cells) * words
        return found

    def segments(self, first_row: int, rows: int) -> list[tuple[peer_copy_plan.Flags, np.ndarray]]:
        """(flags, int64 [16]) of each kind, for rows of this group that begin at ``first_row``."""
        made = []
        for kind, rest in zip(self.kinds, self._segments, strict=True):
            line = np.zeros(peer_copy_plan.SEGMENT, dtype=np.int64)
            line[0], line[1] = first_row, -(-rows // dict(kind.flags)["ROWS"])
            line[2 : 2 + len(rest)] = rest
            made.append((kind.flags, line))
        return made


def _region_rows(each: SourceRegion, num_blocks: int, translate: Callable[[int, int], int]) -> np.ndarray:
    """int64 [n, 18] as in REGION_FIELDS but ``first_word``, in the order of the checksum. Of each row all cells are
    stored, or none: the kernel knows words that it stores by their index in a row."""
    if not each.by_cells:
        raise ValueError(f"cells of {each.source.packing} hold several tokens in an order of their own")
    s, t, (first, count, target) = each.source, each.target, each.cell_run
    base = translate(s.base, (num_blocks - 1) * s.block_stride + s.page_extent)
    word, goes = checksum.word_bytes(s.inner), (0, 0, 0, 0)
    if t is not None:
        goes = (t.base + target * t.token_stride, t.block_stride, t.outer_stride, t.token_stride)
    stored = (0, 0, 0) if t is None else (each.first_outer, each.outers, each.target_outer)
    if each.run is None or count == s.tokens:
        cells = (s.block_bytes // word, s.inner // word, s.tokens, 0, s.first_token, s.cell_tokens, word)
        return np.array([(base, s.block_stride, s.outer_stride, s.token_stride, *goes, *cells, *stored)], np.int64)
    runs = [(0, first), (first, count), (first + count, s.tokens - first - count)]  # in each outer index
    rows = np.zeros((s.outer, len(runs), len(peer_copy_plan.REGION_FIELDS)), np.int64)
    for row, (at, tokens) in zip(rows[0], runs, strict=True):
        cells = (tokens * s.inner // word, s.inner // word, tokens, 0, s.first_token + at * s.cell_tokens)
        row[:4] = base + at * s.token_stride, s.block_stride, 0, s.token_stride if tokens > 1 else 0
        row[8:15] = *cells, s.cell_tokens, word
    rows[1:] = rows[0]
    rows[:, :, 0] += np.arange(s.outer)[:, None] * s.outer_stride
    ours = rows[each.first_outer : each.first_outer + each.outers, 1]
    ours[:, 4:8], ours[:, 16], ours[:, 17] = goes, 1, each.target_outer + np.arange(each.outers)
    return rows[:, [tokens > 0 for _, tokens in runs]].reshape(-1, rows.shape[2])


@dataclass
class Batch:
    """Blocks of one group from one rank of a source."""

    table: GroupTable
    pull: GroupPull

    def __len__(self) -> int:
        return len(self.pull.local)


class Round(NamedTuple):
    """One launch: its work is ``words`` words from ``at``, beginning with ``rows`` rows."""

    at: int
    words: int
    rows: int
    moves: list[tuple[peer_copy_plan.Flags, int, int, int]]  # flags, segments, starts, programs


def padded(rows: int) -> int:
    return -(-rows // peer_copy_plan.PAD) * peer_copy_plan.PAD


def max_words(batches: Sequence[Batch], shape: peer_copy_plan.Shape) -> int:
    """The most words that :func:`pack` needs."""
    words = 0
    for batch in batches:
        pieces = len(batch) // shape.max_rows + 2
        words += padded(len(batch)) * peer_copy_plan.ROW + peer_copy_plan.PAD * peer_copy_plan.ROW * pieces
        words += len(batch.table.kinds) * pieces * (peer_copy_plan.SEGMENT + peer_copy_plan.START * shape.programs)
    return words


def room(shape: peer_copy_plan.Shape) -> int:
    """Words that every round fits in."""
    segment = peer_copy_plan.SEGMENT + peer_copy_plan.START * shape.programs
    return shape.max_rows * peer_copy_plan.ROW + _MAX_SEGMENTS * segment


def pack(
    batches: Sequence[Batch], words: np.ndarray, results: int, entries: int, shape: peer_copy_plan.Shape
) -> tuple[list[Round], list[tuple[int, int]]]:
    """Write the work of all batches into ``words``, int64 of :func:`max_words`.

    ``results``: address of a result byte for each row of all rounds. ``entries``: address of our table of checksums,
    int64 [blocks]. Returns the rounds, and for each batch (its first result, number of results): padding rows
    are between.
    """
    rounds: list[Round] = []
    result_slots: list[tuple[int, int]] = []
    open_: list[tuple[peer_copy_plan.Flags, np.ndarray]] = []  # segments of the round that is being made
    at = rows = result = 0

    def end() -> None:
        nonlocal at, rows, open_
        if not rows:
            return
        used, moves = rows * peer_copy_plan.ROW, []
        for flags in dict.fromkeys(flags for flags, _ in open_):
            lines = np.stack([line for f, line in open_ if f == flags])
            begins = peer_copy_plan.starts(lines[:, 1], lines[:, 3], shape.programs)
            moves.append((flags, used, used + lines.size, len(begins)))
            for block in (lines, begins):
                words[at + used : at + used + block.size] = block.reshape(-1)
                used += block.size
        rounds.append(Round(at, used, rows, moves))
        at, rows, open_ = at + used, 0, []

    for batch in batches:
        result_slots.append((result, len(batch)))
        done = 0
        while done < len(batch):
            if rows == shape.max_rows or len(open_) + len(batch.table.kinds) > _MAX_SEGMENTS:
                end()
            count = min(len(batch) - done, shape.max_rows - rows)
            _fill(batch, slice(done, done + count), words[at + rows * peer_copy_plan.ROW :], results + result, entries)
            open_ += batch.table.segments(rows, count)
            rows, result, done = rows + padded(count), result + count, done + count
    end()
    return rounds, result_slots


def _fill(batch: Batch, part: slice, words: np.ndarray, results: int, entries: int) -> None:
    table, pull = batch.table, batch.pull
    local, remote = (np.asarray(ids[part], dtype=np.int64) for ids in (pull.local, pull.remote))
    valid = np.asarray(pull.valid[part], dtype=np.int64)
    n = len(local)
    lines = words[: padded(n) * peer_copy_plan.ROW].reshape(-1, peer_copy_plan.ROW)
    lines[n:] = 0
    lines[:n, 0] = remote
    lines[:n, 1] = local
    lines[:n, 2] = np.asarray(pull.keys[part], dtype=np.uint64).view(np.int64)
    lines[:n, 3] = valid
    lines[:n, 4] = table.words(valid)
    lines[:n, 5] = table.checksum_table_addr + remote * 8
    lines[:n, 6] = results + np.arange(n)
    lines[:n, 7] = entries + local * 8 + (peer_copy_plan.IDENTICAL_LAYOUT if table.identical_layout else 0)

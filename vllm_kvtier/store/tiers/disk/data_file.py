"""Transfers of blocks between the pool and the disk's data file."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk.file_ops import Files, Workers, error_text, read_all, write_all
from vllm_kvtier.store.tiers.process.nixl_agent import StorageAgent

READ, WRITE = "READ", "WRITE"
PIECE_BYTES = 8 << 20  # of one transfer: a few milliseconds, after which other operations go on
# Pieces of one operation in flight: keeps the device busy although the agent is polled only once a millisecond.
WINDOW_PIECES = 4
YIELDING_WINDOW_PIECES = 1  # of a write, while reads are in flight
_SAMPLED_PAGES, _SAMPLED_WORDS = 4, 8

Span = tuple[int, int, int]  # slot, position, pages
Done = Callable[[list[bool], str], None]


class Data(Protocol):
    def move(self, op: str, spans: Sequence[Span], done: Done) -> None:
        """READ positions into slots, or WRITE slots to positions. ``done(which succeeded, error)`` is called once, on
        the reactor, after this returns; the slots are no longer in use then. Written bytes are not durable yet."""

    @property
    def note(self) -> str:
        """A note for the operator, or ""."""


def marks(pool: np.ndarray, spans: Sequence[Span]) -> list[int]:
    """A 32-bit digest of a sample of each slot: its last page, and a line of every fourth page. ``pool``:
    uint64[pages, PAGE / 8].

    It detects another block's valid bytes at this block's position, after the disk lost an acknowledged write or the
    data file was replaced; damage is detected by the blocks' checksums. The last page nearly always contains a part's
    checksum. The digest is the upper half of the words' sum, weighted with odd numbers (multiply-shift).
    """
    slots, _, pages = np.array(spans, np.int64).reshape(-1, 3).T
    result = np.zeros(len(slots), np.uint64)
    for size in set(pages.tolist()):
        same = np.flatnonzero(pages == size)
        lines = pool[slots[same, None] + np.arange(0, size, _SAMPLED_PAGES), :_SAMPLED_WORDS].reshape(len(same), -1)
        last = pool[slots[same] + size - 1]
        weights = _weights(lines.shape[1] + last.shape[1])
        result[same] = lines @ weights[: lines.shape[1]] + last @ weights[lines.shape[1] :]
    digests: list[int] = (result >> np.uint64(32)).tolist()
    return digests


@functools.lru_cache(64)
def _weights(count: int) -> np.ndarray:
    """Odd numbers. They are part of the journal's format."""
    numbers: np.ndarray = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) | np.uint64(1)
    return numbers


class PlainData:
    """Transfers by system calls on threads, one per block: without NIXL, and in tests."""

    def __init__(self, files: Files, fd: int, view: memoryview, workers: Workers, note: str = ""):
        self._files, self._fd, self._view, self._workers, self.note = files, fd, view, workers, note

    def move(self, op: str, spans: Sequence[Span], done: Done) -> None:
        good, left, text = [False] * len(spans), len(spans), ""

        def ended(number: int, whole: bool | None, error: OSError | None) -> None:
            nonlocal left, text
            good[number] = bool(whole) and error is None
            if not good[number] and not text:
                text = error_text(error) if error is not None else "the data file ends too early"
            left -= 1
            if not left:
                done(good, text)

        for number, span in enumerate(spans):
            self._workers.submit(functools.partial(self._move, op, *span), functools.partial(ended, number))

    def _move(self, op: str, slot: int, position: int, pages: int) -> bool:
        part = self._view[slot * PAGE : (slot + pages) * PAGE]
        if op == READ:
            return read_all(self._files, self._fd, part, position * PAGE) == len(part)
        write_all(self._files, self._fd, part, position * PAGE)
        return True


class _Operation:
    """One move: its waiting pieces, the number in flight, and which blocks succeeded."""

    def __init__(self, op: str, spans: Sequence[Span], done: Done):
        self.op, self.spans, self.done = op, spans, done
        self.good = [True] * len(spans)
        self.error = ""
        self.waiting: deque[list[int]] = deque(_pieces(spans))
        self.under_way = 0


class NixlData:
    """Transfers by a NIXL agent, many at a time. Reads go before writes: a write has a smaller window while there are
    reads."""

    def __init__(
        self, agent: StorageAgent, fd: int, address: int, guard: Callable[[Callable[..., None]], Callable[..., None]]
    ):
        """``guard``: TierProcessMain's."""
        self._agent, self._fd, self._address, self._guard = agent, fd, address, guard
        self.note = agent.note
        self._operations: dict[_Operation, None] = {}
        self._reads = 0

    def move(self, op: str, spans: Sequence[Span], done: Done) -> None:
        operation = _Operation(op, spans, done)
        self._operations[operation] = None
        self._reads += op == READ
        self._go_on(operation)

    def _go_on(self, operation: _Operation) -> None:
        window = YIELDING_WINDOW_PIECES if operation.op == WRITE and self._reads else WINDOW_PIECES
        while operation.waiting and operation.under_way < window:
            self._begin(operation, operation.waiting.popleft())

    def _begin(self, operation: _Operation, numbers: list[int]) -> None:
        rows = merged([operation.spans[n] for n in numbers])
        local, remote = rows[:, (0, 2, 2)] * np.uint64(PAGE), rows[:, (1, 2, 2)] * np.uint64(PAGE)
        local[:, 0] += np.uint64(self._address)
        local[:, 2], remote[:, 2] = 0, self._fd
        operation.under_way += 1
        ended = self._guard(lambda good, error: self._ended(operation, numbers, good, error))
        self._agent.transfer(operation.op, local, remote, ended)

    def _ended(self, operation: _Operation, numbers: list[int], good: bool, error: str) -> None:
        operation.under_way -= 1
        if not good and len(numbers) > 1:
            # One bad sector fails the whole transfer: find its block.
            operation.waiting.extendleft([n] for n in reversed(numbers))
        elif not good:
            operation.good[numbers[0]] = False
            operation.error = operation.error or error
        self._go_on(operation)
        if operation.under_way or operation.waiting:
            return
        del self._operations[operation]
        if operation.op == READ:
            self._reads -= 1
            if not self._reads:
                for other in list(self._operations):
                    self._go_on(other)
        operation.done(operation.good, operation.error)


def _pieces(spans: Sequence[Span]) -> list[list[int]]:
    """Indices of spans, in groups of about PIECE_BYTES."""
    pieces: list[list[int]] = [[]]
    room = PIECE_BYTES // PAGE
    for number, (_, _, pages) in enumerate(spans):
        if pieces[-1] and pages > room:
            pieces.append([])
            room = PIECE_BYTES // PAGE
        pieces[-1].append(number)
        room -= pages
    return pieces


def merged(spans: Sequence[Span]) -> np.ndarray:
    """uint64[n, 3] of slot, position, pages: spans that are adjacent on both sides become one."""
    rows = np.array(spans, np.uint64)
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    rows[first, 2] = np.add.reduceat(rows[:, 2], first)
    return rows[first]

"""How the blocks' bytes get from the pool to the disk's one data file, and back."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from vllm_kvtier.store.lower.agent import StorageAgent
from vllm_kvtier.store.lower.disk.files import Files, Workers, in_words, read_all, write_all
from vllm_kvtier.store.messages import PAGE

READ, WRITE = "READ", "WRITE"
PIECE_BYTES = 8 << 20  # of one transfer: a few milliseconds, after which others get their turn
# Pieces of one operation under way: what it takes to keep the device busy while we look after them once a millisecond.
WINDOW = 4
YIELDING_WINDOW = 1  # of a write, while reads are under way
_SAMPLED_PAGES, _SAMPLED_WORDS = 4, 8

Span = tuple[int, int, int]  # slot, place, pages
Done = Callable[[list[bool], str], None]


class Data(Protocol):
    def move(self, op: str, spans: Sequence[Span], done: Done) -> None:
        """READ places into slots, or WRITE slots to places; ``done(which are whole, error)`` exactly once, on the
        reactor, not before this returns. Written is not yet durable. Nothing touches the slots afterwards."""

    @property
    def note(self) -> str:
        """What a person should know of it, or ""."""


def marks(pool: np.ndarray, spans: Sequence[Span]) -> list[int]:
    """A 32-bit digest of a sample of each slot: its last page, and a line of every fourth. ``pool``: uint64[pages,
    PAGE / 8].

    Not against damage, which the blocks' own checksums find, but against another block's bytes, whole in themselves,
    where this one's should be: a disk that lost a write it had acknowledged, a data file that was exchanged. Nearly
    always the last page holds a part's checksum. The digest is the upper half of the words' sum, weighted with odd
    numbers (multiply-shift); numpy takes all slots of one size at once.
    """
    slots, _, pages = np.array(spans, np.int64).reshape(-1, 3).T
    result = np.zeros(len(slots), np.uint64)
    for size in set(pages.tolist()):
        same = np.flatnonzero(pages == size)
        lines = pool[slots[same, None] + np.arange(0, size, _SAMPLED_PAGES), :_SAMPLED_WORDS].reshape(len(same), -1)
        last = pool[slots[same] + size - 1]
        weights = _weights(lines.shape[1] + last.shape[1])
        result[same] = lines @ weights[: lines.shape[1]] + last @ weights[lines.shape[1] :]
    return (result >> np.uint64(32)).tolist()


@functools.lru_cache(64)
def _weights(count: int) -> np.ndarray:
    """Odd, and the same forever: they are part of the journal's format."""
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (numbers ^ (numbers >> np.uint64(27))) | np.uint64(1)


class PlainData:
    """By system calls on threads: where there is no NIXL, and in tests. One call a block."""

    def __init__(self, files: Files, fd: int, view: memoryview, workers: Workers, note: str = ""):
        self._files, self._fd, self._view, self._workers, self.note = files, fd, view, workers, note

    def move(self, op: str, spans: Sequence[Span], done: Done) -> None:
        good, left, words = [False] * len(spans), [len(spans)], [""]

        def ended(number: int, whole: object, error: OSError | None) -> None:
            good[number] = bool(whole) and error is None
            if not good[number] and not words[0]:
                words[0] = in_words(error) if error is not None else "the data file ends too early"
            left[0] -= 1
            if not left[0]:
                done(good, words[0])

        for number, span in enumerate(spans):
            self._workers.submit(
                lambda span=span: self._move(op, *span), lambda r, e, number=number: ended(number, r, e)
            )

    def _move(self, op: str, slot: int, place: int, pages: int) -> bool:
        part = self._view[slot * PAGE : (slot + pages) * PAGE]
        if op == READ:
            return read_all(self._files, self._fd, part, place * PAGE) == len(part)
        write_all(self._files, self._fd, part, place * PAGE)
        return True


class _Operation:
    """One move: pieces that wait, pieces under way, and what became of the blocks."""

    def __init__(self, op: str, spans: Sequence[Span], done: Done):
        self.op, self.spans, self.done = op, spans, done
        self.good = [True] * len(spans)
        self.error = ""
        self.waiting: deque[list[int]] = deque(_pieces(spans))
        self.under_way = 0


class NixlData:
    """By a NIXL agent, many transfers at a time. Reads go before writes: a write keeps little under way while there
    are any, but it always goes on."""

    def __init__(self, agent: StorageAgent, fd: int, address: int, guard: Callable[[Callable], Callable]):
        """``guard``: Host's."""
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
        window = YIELDING_WINDOW if operation.op == WRITE and self._reads else WINDOW
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
            # One bad sector fails the whole transfer: find out which block's it is.
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
    """Numbers of spans, in runs of about PIECE_BYTES."""
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
    """uint64[n, 3] of slot, place, pages: neighbours that follow each other on both sides become one."""
    rows = np.array(spans, np.uint64)
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    rows[first, 2] = np.add.reduceat(rows[:, 2], first)
    return rows[first]

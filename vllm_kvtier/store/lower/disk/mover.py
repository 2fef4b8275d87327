"""The disk tier's mover: blocks between the pool and one file, with a journal that says which lie where.

Options of Open: ``path`` (directory), ``size`` (bytes, of the data file), ``preallocate`` (bool), ``backend`` ("auto",
"POSIX", "GDS", "GDS_MT": of NIXL; "threads": system calls), ``direct`` ("auto", "never": O_DIRECT).

A Write goes through steps, of which each begins only when the one before it is durable:

1. the journal says which blocks are given up: those of ``gone``, and whatever else lies where this one will;
2. the blocks are written;
3. the journal says that they are there. Only then are they reported.

So at every instant a block that the journal names lies whole in its place. Steps of several Writes overlap, and what
waits for the disk at the same time shares a sync. Syncs are on threads: reads go on meanwhile.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.agent import StorageAgent
from vllm_kvtier.store.lower.disk import journal as j
from vllm_kvtier.store.lower.disk.data import READ, WRITE, Data, NixlData, PlainData, marks
from vllm_kvtier.store.lower.disk.files import Files, Workers, in_words
from vllm_kvtier.store.lower.disk.log import LEAST_LOG, Log, Syncs
from vllm_kvtier.store.lower.disk.storage import Room, Storage, open_storage
from vllm_kvtier.store.lower.disk.table import pack, parents_first, unpack
from vllm_kvtier.store.lower.runner import MAX_SENTENCE, Host
from vllm_kvtier.store.messages import PAGE

logger = get_logger(__name__)

KEPT = 8192  # moves of one Kept
QUEUE = "1024"  # blocks that the kernel has under way; NIXL submits 64 each time it is looked at
THREADS = 16  # of PlainData: what keeps a device busy with blocks of a few 100 KiB
BACKENDS = {  # of NIXL, in order of preference
    "auto": ["POSIX"],
    "POSIX": ["POSIX"],
    "GDS": ["GDS", "POSIX"],
    "GDS_MT": ["GDS_MT", "POSIX"],
    "threads": [],
}


class _Batch:
    """One Write under way. ``good``: no longer of moves that were given up meanwhile, or failed."""

    def __init__(self, message: m.Write):
        self.id, self.moves = message.id, message.moves
        self.begun, self.error = time.monotonic(), ""
        self.good = [True] * len(message.moves)
        self.marks = [0] * len(message.moves)
        self.recorded = False  # what is given up from now on is to be removed from the table
        self.number_of = {move.place: n for n, move in enumerate(message.moves)}
        places = np.array([(move.place, move.pages) for move in message.moves], np.int64).reshape(-1, 2)
        self.spans = places[np.argsort(places[:, 0])]  # begin, end
        self.spans[:, 1] += self.spans[:, 0]
        if (self.spans[1:, 0] < self.spans[:-1, 1]).any():
            raise ValueError("two blocks of a Write overlap")

    def overlaps(self, other: "_Batch") -> bool:
        """Is there a page that both write?"""
        at = np.searchsorted(other.spans[:, 1], self.spans[:, 0], side="right")
        inside = at < len(other.spans)
        return bool((other.spans[at[inside], 0] < self.spans[inside, 1]).any())


class DiskMover:
    """``files`` and ``make_workers(name, threads)`` are for tests: a disk of their own, and no threads."""

    def __init__(
        self,
        host: Host,
        options: dict[str, str | int | float | bool],
        *,
        files: Files | None = None,
        make_workers: Callable[[str, int], Workers] | None = None,
        least_log: int = LEAST_LOG,
    ):
        self._host, self._options, self._least_log = host, options, least_log
        self._files = files or Files()
        self._make_workers = make_workers or (
            lambda name, threads: Workers(name, threads, lambda call: host.reactor.call_soon(host.guard(call)))
        )
        self._pool = np.frombuffer(host.pool.view, np.uint64).reshape(-1, PAGE // 8)
        self._storage: Storage
        self._data: Data
        self._log: Log | None = None
        self._syncs: Syncs
        self._why_not = ""  # nothing can be written any more
        self._shapes: dict[bytes, m.SpaceShape] = {}
        self._journaled: set[bytes] = set()  # spaces whose shapes are in the journal
        self._queue: list[_Batch] = []  # another's blocks lie in their way
        self._writing: dict[_Batch, None] = {}

    # -- opening ------------------------------------------------------------------------------------------------

    def open(self) -> m.Opened:
        options, files = self._options, self._files
        storage = open_storage(
            files,
            str(options["path"]),
            int(options["size"]),
            preallocate=bool(options.get("preallocate", False)),
            direct=options.get("direct", "auto") != "never",
        )
        self._storage, self._table, self._shapes = storage, storage.table, storage.shapes
        self._journaled = set(self._shapes)
        self._room = Room(files, storage.file_fd, storage.capacity if storage.sparse else 0, self._table.rows())
        self._file_worker = self._make_workers("kvtier-sync", 1)
        self._syncs = Syncs(files, storage.file_fd, self._file_worker)
        if storage.journal is not None:
            self._log = Log(storage.journal, self._make_workers("kvtier-journal", 1), self._snapshot, self._least_log)
        else:
            self._why_not = storage.notes[-1]
        self._data = self._open_data(str(options.get("backend", "auto")))
        rows = parents_first(self._table.rows())
        for at in range(0, len(rows), KEPT):
            shapes = list(self._shapes.values()) if not at else []
            self._host.send(m.Kept(list(unpack(rows[at : at + KEPT])), shapes))
        note = "; ".join(filter(None, [*storage.notes, self._data.note]))
        return m.Opened(not self._why_not, note[:MAX_SENTENCE], storage.capacity)

    def _open_data(self, backend: str) -> Data:
        storage, pool, note = self._storage, self._host.pool, ""
        if backend not in BACKENDS:
            raise KVTierError(f"disk_backend {backend!r}: one of {', '.join(BACKENDS)}")
        # Without O_DIRECT, AIO blocks whoever begins it, and NIXL's queue on the C library's threads fails for good
        # after its first short read.
        if BACKENDS[backend] and (storage.direct or backend != "auto"):
            try:
                agent = StorageAgent(
                    self._host.reactor,
                    f"kvtier-disk-{os.getpid()}",
                    BACKENDS[backend],
                    # Not io_uring: when a process is killed, the kernel waits for its other I/O before it is reaped,
                    # but not for this, and the server relies on it that nothing is written to slots any more.
                    {"POSIX": {"use_aio": "true", "kernel_queue_size": QUEUE}},
                    on_unsettled=self._host.fail,
                )
                agent.register_pool(pool.address, pool.nbytes)
                agent.register_file(storage.data_fd, storage.capacity * PAGE)
                return NixlData(agent, storage.data_fd, pool.address, self._host.guard)
            except KVTierError as error:
                note = f"{error}; it reads and writes without NIXL"
        return PlainData(self._files, storage.data_fd, pool.view, self._make_workers("kvtier-disk", THREADS), note)

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, message: m.ToMover) -> None:
        if isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Write):
            self._write(message)
        elif isinstance(message, m.Drop):
            self._drop(message.gone)
        else:
            raise TypeError(f"{type(message).__name__} is not for a disk")

    def close(self) -> None:
        """What is under way goes on until the process has ended, and the lock lasts as long."""

    def _read(self, message: m.Read) -> None:
        begun, good = time.monotonic(), [False] * len(message.moves)
        self._check(message.moves)
        wanted = [n for n, move in enumerate(message.moves) if self._table.mark(move) is not None]
        spans = [_span(message.moves[n]) for n in wanted]
        missing = "" if len(wanted) == len(good) else "not all of them are there"

        def done(came: list[bool], error: str) -> None:
            for n, whole, of in zip(wanted, came, marks(self._pool, spans), strict=True):
                # Asked again: it may have been given up, and its place written to, while it was read.
                good[n] = whole and self._table.mark(message.moves[n]) == of
            words = error or missing or ("" if all(good) else "what lies on the disk is not what was written")
            self._answer(message.id, good, words, begun)

        if wanted:
            self._data.move(READ, spans, done)
        else:
            self._answer(message.id, good, missing, begun)

    def _drop(self, places: Iterable[int]) -> None:
        gone = self._give_up(places)
        if self._log is not None and gone:
            self._log.append([j.gone(gone)], self._note_failure)

    def _write(self, message: m.Write) -> None:
        self._check(message.moves)
        for shape in message.spaces:
            if self._shapes.get(shape.space) != shape:
                self._shapes[shape.space] = shape
                self._journaled.discard(shape.space)
        self._drop(message.gone)
        self._queue.append(_Batch(message))
        self._start_queued()

    # -- a Write's steps ----------------------------------------------------------------------------------------

    def _start_queued(self) -> None:
        while self._queue and not any(self._queue[0].overlaps(other) for other in self._writing):
            batch = self._queue.pop(0)
            self._writing[batch] = None
            self._start(batch)

    def _start(self, batch: _Batch) -> None:
        if self._log is None or self._why_not:
            self._end(batch, self._why_not)
            return
        # What the server forgot to give up (or forgot altogether: it restored only some of what was kept).
        lost = self._table.remove({p for move in batch.moves for p in self._table.within(move.place, move.pages)})
        self._log.append([j.gone(lost)] if lost else [], lambda error: self._recorded(batch, error))

    def _recorded(self, batch: _Batch, error: str) -> None:
        spans = [(move.place, move.pages) for move in batch.moves]
        if error or not any(batch.good):
            self._end(batch, error)
        elif self._room.is_there(spans):
            self._move(batch)
        else:
            self._file_worker.submit(lambda: self._room.make(spans), lambda r, e: self._made_room(batch, r, e))

    def _made_room(self, batch: _Batch, made: object, error: OSError | None) -> None:
        words = "" if error is None else in_words(error)
        if error is None:
            fits, words = made
            batch.good = [good and fit for good, fit in zip(batch.good, fits, strict=True)]
        if error is not None or not any(batch.good):
            self._end(batch, words, hopeless=error is not None)
        else:
            batch.error = words
            self._move(batch)

    def _move(self, batch: _Batch) -> None:
        numbers = [n for n, good in enumerate(batch.good) if good]
        spans = [_span(batch.moves[n]) for n in numbers]

        def written(good: list[bool], error: str) -> None:
            for n, whole in zip(numbers, good, strict=True):
                batch.good[n] &= whole
            if any(good):
                batch.error = batch.error or error
                self._syncs.ask(lambda error: self._synced(batch, error))
            else:
                self._end(batch, error)

        self._data.move(WRITE, spans, written)
        for n, of in zip(numbers, marks(self._pool, spans), strict=True):  # while they are on their way
            batch.marks[n] = of

    def _synced(self, batch: _Batch, error: str) -> None:
        if error:  # nobody knows what the file holds now of what was written lately
            self._end(batch, error, hopeless=True)
            return
        kept = [n for n, good in enumerate(batch.good) if good]
        new = {batch.moves[n].space for n in kept} - self._journaled
        entries = [j.space(self._shapes[s]) for s in new if s in self._shapes]
        self._journaled |= new
        entries += j.put(self._table.add(pack(batch.moves[n], batch.marks[n]) for n in kept))
        batch.recorded = True
        self._log.append(entries, lambda error: self._committed(batch, kept, error))

    def _committed(self, batch: _Batch, kept: list[int], error: str) -> None:
        if error:
            self._drop(batch.moves[n].place for n in kept)
            self._journaled -= {batch.moves[n].space for n in kept}
        self._end(batch, error or batch.error, ok=not error)

    def _end(self, batch: _Batch, error: str, *, ok: bool = False, hopeless: bool = False) -> None:
        del self._writing[batch]
        self._note_failure(error if hopeless else "")
        self._answer(batch.id, batch.good if ok else [False] * len(batch.moves), error, batch.begun)
        self._start_queued()

    # -- parts --------------------------------------------------------------------------------------------------

    def _give_up(self, places: Iterable[int]) -> list[int]:
        """Places that the journal has to hear of. A block on its way there will not be kept."""
        places = list(places)
        for batch in (*self._queue, *self._writing):
            for place in places:
                number = batch.number_of.get(place)
                if number is not None and not batch.recorded:
                    batch.good[number] = False
        return self._table.remove(places)

    def _note_failure(self, error: str) -> None:
        reason = (self._log.broken if self._log is not None else "") or error
        if reason and not self._why_not:
            self._why_not = reason
            logger.warning("kvtier: %s takes no more blocks: %s", self._storage.folder, reason)

    def _answer(self, number: int, good: list[bool], error: str, begun: float) -> None:
        error = "" if all(good) else error or "it was given up meanwhile"
        seconds = time.monotonic() - begun
        self._host.send(m.Moved(number, good, error[:MAX_SENTENCE], seconds, not self._why_not))

    def _snapshot(self) -> list[j.Entry]:
        rows = self._table.rows()
        used = set(np.ascontiguousarray(rows["space"]).view("<u8")[::2].tolist())
        shapes = [s for s in self._shapes.values() if int.from_bytes(s.space[:8], "little") in used]
        self._journaled = {s.space for s in shapes}
        return j.snapshot(rows, shapes)

    def _check(self, moves: Sequence[m.Move]) -> None:
        """Raises ValueError for what no correct server says."""
        pages, capacity = self._host.pool.nbytes // PAGE, self._storage.capacity
        for move in moves:
            if not (0 < move.slot <= pages - move.pages and 0 < move.place <= capacity - move.pages and move.pages > 0):
                raise ValueError(f"{move.pages} pages of slot {move.slot} and place {move.place}")


def _span(move: m.Move) -> tuple[int, int, int]:
    return move.slot, move.place, move.pages

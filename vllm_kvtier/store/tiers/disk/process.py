"""The tier process of the disk tier: moves blocks between the pool and one data file, with a journal of positions.

Options of Open: ``path`` (directory), ``size`` (bytes, of the data file and the journal), ``preallocate`` (bool),
``backend`` ("auto", "POSIX", "GDS", "GDS_MT": of NIXL; "threads": system calls), ``direct`` ("auto", "never":
O_DIRECT).

A Write has three steps; each begins when the one before it is durable:

1. the journal records the removed blocks: those of ``gone``, and all others at the positions to be written;
2. the blocks are written;
3. the journal records the new blocks. Only then are they reported.

A Write without blocks is answered after the first step, with the error if that failed.
So a block in the journal is complete at its position at any time. Steps of several Writes overlap and share syncs.
Syncs run on threads; reads go on meanwhile.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import journal as j
from vllm_kvtier.store.tiers.disk.data_file import READ, WRITE, Data, NixlData, PlainData, marks
from vllm_kvtier.store.tiers.disk.directory import Room, Storage, data_pages, open_storage
from vllm_kvtier.store.tiers.disk.file_ops import Files, Workers, error_text
from vllm_kvtier.store.tiers.disk.group_commit import MIN_LOG, Log, Syncs
from vllm_kvtier.store.tiers.disk.slot_table import pack, parents_first, unpack
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import MAX_SENTENCE, TierProcessMain
from vllm_kvtier.store.tiers.process.nixl_agent import StorageAgent

logger = get_logger(__name__)

LOOK_SECONDS = 10.0  # between two looks at the file system's room
# It is opened again if it may have less than this share of what it has, or, after some time, so much more than it may.
ROOM_LOSS, ROOM_GROWTH, GROWTH_SECONDS = 0.97, 1.1, 3600.0
MAX_KEPT = 8192  # moves per Kept
KERNEL_QUEUE_SIZE = "1024"  # blocks in flight in the kernel; NIXL submits 64 per poll
MAX_THREADS = 16  # of PlainData; keeps a device busy with blocks of a few 100 KiB
BACKENDS = {  # of NIXL, in order of preference
    "auto": ["POSIX"],
    "POSIX": ["POSIX"],
    "GDS": ["GDS", "POSIX"],
    "GDS_MT": ["GDS_MT", "POSIX"],
    "threads": [],
}


class _Batch:
    """One Write in flight. ``good``: False for moves that failed or were removed meanwhile."""

    def __init__(self, message: m.Write):
        self.id, self.moves = message.id, message.moves
        self.begun, self.error = time.monotonic(), ""
        self.good = [True] * len(message.moves)
        self.marks = [0] * len(message.moves)
        self.recorded = False  # its rows are in the table
        self.number_of = {move.position: n for n, move in enumerate(message.moves)}
        positions = np.array([(move.position, move.pages) for move in message.moves], np.int64).reshape(-1, 2)
        self.spans = positions[np.argsort(positions[:, 0])]  # begin, end
        self.spans[:, 1] += self.spans[:, 0]
        if (self.spans[1:, 0] < self.spans[:-1, 1]).any():
            raise ValueError("two blocks of a Write overlap")

    def overlaps(self, other: "_Batch") -> bool:
        """Whether both write the same page."""
        at = np.searchsorted(other.spans[:, 1], self.spans[:, 0], side="right")
        inside = at < len(other.spans)
        return bool((other.spans[at[inside], 0] < self.spans[inside, 1]).any())


class DiskProcess:
    """A ``tiers.process.main.Backend``. ``files``, ``make_workers(name, threads)``: for tests with a simulated disk."""

    def __init__(
        self,
        host: TierProcessMain,
        options: m.Options,
        *,
        files: Files | None = None,
        make_workers: Callable[[str, int], Workers] | None = None,
        min_log: int = MIN_LOG,
    ):
        self._host, self._options, self._min_log = host, options, min_log
        self._files = files or Files()
        self._make_workers = make_workers or (
            lambda name, threads: Workers(name, threads, lambda call: host.reactor.call_soon(host.guard(call)))
        )
        self._pool = np.frombuffer(host.pool.view, np.uint64).reshape(-1, PAGE // 8)
        self._storage: Storage
        self._data: Data
        self._log: Log | None = None
        self._syncs: Syncs
        self._read_only = ""  # the reason, if nothing can be written any more
        self._shapes: dict[bytes, m.NamespaceShape] = {}
        self._journaled: set[bytes] = set()  # namespaces whose shapes are in the journal
        self._queue: list[_Batch] = []  # they overlap a batch in flight
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
            self._log = Log(storage.journal, self._make_workers("kvtier-journal", 1), self._snapshot, self._min_log)
        else:
            self._read_only = storage.notes[-1]
        self._data = self._open_data(str(options.get("backend", "auto")))
        rows = parents_first(self._table.rows())
        for at in range(0, len(rows), MAX_KEPT):
            shapes = list(self._shapes.values()) if not at else []
            self._host.send(m.Kept(list(unpack(rows[at : at + MAX_KEPT])), shapes))
            self._host.flush()
        self._look_for_room_later()
        note = "; ".join(filter(None, [*storage.notes, self._data.note]))
        return m.Opened(not self._read_only, note[:MAX_SENTENCE], storage.capacity)

    def _look_for_room_later(self) -> None:
        """Give way if others fill the file system; use more if the tier was limited and others have left. End if the
        files are there no more: what is written would be lost, and another store may use the folder."""
        storage, size, opened = self._storage, int(self._options["size"]), time.monotonic()

        def room() -> tuple[int, int] | None:
            in_place = self._files.is_at(storage.lock_path, storage.lock_fd)
            if not (in_place and self._files.is_at(storage.slots_path, storage.file_fd)):
                return None
            return self._files.room(storage.file_fd, storage.folder, storage.left)

        def looked(found: tuple[int, int] | None, error: OSError | None) -> None:
            if error is None and found is None:
                self._host.fail(f"{storage.folder} or its files were removed or replaced: it is opened again")
            if found is not None:
                has, room = found
                pages = data_pages(min(room, size))
                if room < ROOM_LOSS * has and pages < ROOM_LOSS * storage.capacity:
                    self._host.fail("others fill its file system: it is opened again, smaller")
                elif pages > ROOM_GROWTH * storage.capacity and time.monotonic() > opened + GROWTH_SECONDS:
                    self._host.fail("its file system has more room than when it was opened")
            later()

        def look() -> None:
            self._file_worker.submit(room, looked)

        def later() -> None:
            self._host.reactor.call_later(LOOK_SECONDS, self._host.guard(look))

        if storage.writable:
            later()

    def _open_data(self, backend: str) -> Data:
        storage, pool, note = self._storage, self._host.pool, ""
        if backend not in BACKENDS:
            raise KVTierError(f"disk_backend {backend!r} must be one of {', '.join(BACKENDS)}")
        # Without O_DIRECT, AIO blocks its caller. NIXL's queue on the C library's threads fails for good after its
        # first short read.
        if BACKENDS[backend] and (storage.direct or backend != "auto"):
            try:
                agent = StorageAgent(
                    self._host.reactor,
                    f"kvtier-disk-{os.getpid()}",
                    BACKENDS[backend],
                    # Not io_uring: the kernel does not wait for its I/O before a killed process is reaped, and the
                    # server relies on the end of all writes to slots.
                    {"POSIX": {"use_aio": "true", "kernel_queue_size": KERNEL_QUEUE_SIZE}},
                    on_unsettled=self._host.fail,
                )
                agent.register_pool(pool.address, pool.nbytes)
                agent.register_file(storage.data_fd, storage.capacity * PAGE)
                return NixlData(agent, storage.data_fd, pool.address, self._host.guard)
            except KVTierError as error:
                note = f"{error}; system calls are used instead of NIXL"
        return PlainData(self._files, storage.data_fd, pool.view, self._make_workers("kvtier-disk", MAX_THREADS), note)

    # -- messages -----------------------------------------------------------------------------------------------

    def handle(self, message: m.ToTierProcess) -> None:
        if isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Write):
            self._write(message)
        elif isinstance(message, m.Drop):
            self._drop(message.gone)
        else:
            raise TypeError(f"unexpected message {type(message).__name__}")

    def close(self) -> None:
        """I/O in flight, and the lock, last until the process ends."""

    def _read(self, message: m.Read) -> None:
        begun, good = time.monotonic(), [False] * len(message.moves)
        self._check(message.moves)
        wanted = [n for n, move in enumerate(message.moves) if self._table.mark(move) is not None]
        spans = [_span(message.moves[n]) for n in wanted]
        missing = "" if len(wanted) == len(good) else "some blocks are not on the disk"

        def done(came: list[bool], error: str) -> None:
            wrong = ""
            for n, whole, mark in zip(wanted, came, marks(self._pool, spans), strict=True):
                # After the read, too: the block may have been removed and overwritten meanwhile. That is no error.
                written = self._table.mark(message.moves[n])
                good[n] = whole and written == mark
                if whole and written not in (None, mark):
                    wrong = "the disk returned other bytes than were written"
            self._answer(message.id, good, error or missing or wrong, begun)

        if wanted:
            self._data.move(READ, spans, done)
        else:
            self._answer(message.id, good, missing, begun)

    def _drop(self, positions: Iterable[int]) -> None:
        gone = self._remove(positions)
        if self._log is not None and gone:
            self._log.append([j.gone(gone)], self._note_failure)

    def _write(self, message: m.Write) -> None:
        self._check(message.moves)
        for shape in message.namespaces:
            if self._shapes.get(shape.namespace_id) != shape:
                self._shapes[shape.namespace_id] = shape
                self._journaled.discard(shape.namespace_id)
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
        log = self._log
        if log is None or (self._read_only and batch.moves):
            self._end(batch, self._read_only)
            return
        # Blocks that the server did not name in ``gone``: it may have restored only some of those it was sent.
        found = self._table.remove({p for move in batch.moves for p in self._table.within(move.position, move.pages)})
        log.append([j.gone(found)] if found else [], lambda error: self._recorded(batch, error))

    def _recorded(self, batch: _Batch, error: str) -> None:
        spans = [(move.position, move.pages) for move in batch.moves]
        if error or not any(batch.good):
            self._end(batch, error)
        elif self._room.is_allocated(spans):
            self._move(batch)
        else:
            self._file_worker.submit(lambda: self._room.allocate(spans), lambda r, e: self._allocated(batch, r, e))

    def _allocated(self, batch: _Batch, result: tuple[list[bool], str] | None, error: OSError | None) -> None:
        text = "" if error is None else error_text(error)
        if result is not None:
            fits, text = result
            batch.good = [good and fit for good, fit in zip(batch.good, fits, strict=True)]
        self._note_failure(text)  # also of a full file system: opened again, the tier fits what room there is
        if error is not None or not any(batch.good):
            self._end(batch, text)
        else:
            batch.error = text
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
        for n, mark in zip(numbers, marks(self._pool, spans), strict=True):  # during the write
            batch.marks[n] = mark

    def _synced(self, batch: _Batch, error: str) -> None:
        if error or self._log is None:  # the state of the latest writes on disk is unknown
            self._end(batch, error, broken=True)
            return
        kept = [n for n, good in enumerate(batch.good) if good]
        new = {batch.moves[n].namespace_id for n in kept} - self._journaled
        entries = [j.namespace_id(self._shapes[s]) for s in new if s in self._shapes]
        self._journaled |= new
        entries += j.put(self._table.add(pack(batch.moves[n], batch.marks[n]) for n in kept))
        batch.recorded = True
        self._log.append(entries, lambda error: self._committed(batch, kept, error))

    def _committed(self, batch: _Batch, kept: list[int], error: str) -> None:
        if error:
            self._drop(batch.moves[n].position for n in kept)
            self._journaled -= {batch.moves[n].namespace_id for n in kept}
        self._end(batch, error or batch.error, ok=not error, broken=bool(error))

    def _end(self, batch: _Batch, error: str, *, ok: bool = False, broken: bool = False) -> None:
        del self._writing[batch]
        self._note_failure(error if broken else "")
        good = batch.good if ok else [False] * len(batch.moves)
        self._answer(batch.id, good, error or ("the block was removed meanwhile" if good else ""), batch.begun)
        self._start_queued()

    # -- parts --------------------------------------------------------------------------------------------------

    def _remove(self, positions: Iterable[int]) -> list[int]:
        """Remove blocks, also those being written. Returns the positions to record in the journal."""
        positions = list(positions)
        for batch in (*self._queue, *self._writing):
            for position in positions:
                number = batch.number_of.get(position)
                if number is not None and not batch.recorded:
                    batch.good[number] = False
        return self._table.remove(positions)

    def _note_failure(self, error: str) -> None:
        reason = (self._log.broken if self._log is not None else "") or error
        if reason and not self._read_only:
            self._read_only = reason
            logger.warning("kvtier: disk tier: %s is read only now (%s)", self._storage.folder, reason)

    def _answer(self, number: int, good: list[bool], error: str, begun: float) -> None:
        error = "" if good and all(good) else error
        seconds = time.monotonic() - begun
        self._host.send(m.Moved(number, good, error[:MAX_SENTENCE], seconds, not self._read_only))

    def _snapshot(self) -> list[j.Entry]:
        rows = self._table.rows()
        used = set(np.ascontiguousarray(rows["space"]).view("<u8")[::2].tolist())
        shapes = [s for s in self._shapes.values() if int.from_bytes(s.namespace_id[:8], "little") in used]
        self._journaled = {s.namespace_id for s in shapes}
        return j.snapshot(rows, shapes)

    def _check(self, moves: Sequence[m.Move]) -> None:
        """Raises ValueError for moves that no correct server sends."""
        pages, capacity = self._host.pool.nbytes // PAGE, self._storage.capacity
        for move in moves:
            if not (
                0 < move.slot <= pages - move.pages and 0 < move.position <= capacity - move.pages and move.pages > 0
            ):
                raise ValueError(f"{move.pages} pages at slot {move.slot} and position {move.position}")


def _span(move: m.Move) -> tuple[int, int, int]:
    return move.slot, move.position, move.pages

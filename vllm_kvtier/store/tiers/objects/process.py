"""The tier process of the object tier: moves blocks between the pool and a bucket or directory, one object per block.

Writers need no coordination: an object's name follows from its content (``object_names``), so that writing it again
changes nothing. An object whose length is not the block's is written again. The engine that loads a block verifies it.

Each request has a deadline; when a block of a message fails, the blocks not started fail too. A thread may write to a
slot until its request ends, so a Read is answered when all its requests have ended; if that takes too long, the server
kills this process. ``error`` of Moved and Located means that the object store failed; a missing or short object is no
error, and neither is a failed request of a store that answers others (``failures``).

Options of Open: ``url``, ``endpoint``, ``region``, ``size`` (of a directory, in bytes), and in seconds ``timeout`` (of
a silent server), ``look_seconds`` (of a Look), ``read_seconds`` (of one object), ``scan_seconds`` (between two scans of
a directory).
"""

import time
from collections.abc import Callable
from functools import partial

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.tiers.objects.failures import FailureCounts
from vllm_kvtier.store.tiers.objects.object_client import ObjectClient
from vllm_kvtier.store.tiers.objects.object_names import FORMAT, check_endpoint, parse_url
from vllm_kvtier.store.tiers.objects.shared_directory import SCAN_SECONDS, SharedDirectory
from vllm_kvtier.store.tiers.prefix_search import Name, Prefix, search
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.store.tiers.request_pool import Done, Job, Kind, Lane, Presence, RequestPool, Trouble
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# Parallel requests: each waits tens of milliseconds for the server. Reads have more than writes, because requests wait
# for reads.
PARALLEL_READS, PARALLEL_WRITES, PARALLEL_LOOKUPS = 16, 4, 32
MAX_REMEMBERED_OBJECTS = 1 << 18  # objects
THERE_SECONDS = 300.0  # validity of "exists"; a read finds an object that expired
ABSENT_SECONDS = 3.0  # validity of "does not exist"; another store may write it at any time
ACCESS_SECONDS = 30.0  # between two checks of the access rights, if absent objects are reported as forbidden
MIN_CHECK_SECONDS, CHECKS = 0.1, 10  # of a directory: whether a scan is due; so many checks in ``scan_seconds``


class ObjectProcess:
    """A ``tiers.process.main.Backend``."""

    def __init__(self, host: TierProcessMain, options: m.Options):
        self._host, self._location = host, parse_url(str(options["url"]))
        self._look_seconds = float(options.get("look_seconds", 4.0))
        self._read_seconds = float(options.get("read_seconds", 20.0))
        self._client = ObjectClient(
            self._location,
            check_endpoint(str(options.get("endpoint", ""))),
            str(options.get("region", "")),
            float(options.get("timeout", 5.0)),
            self._read_seconds,
        )
        self._directory: SharedDirectory | None = None
        self._scan_seconds = float(options.get("scan_seconds", SCAN_SECONDS))
        if self._location.scheme == "file":
            self._directory = SharedDirectory(self._location, int(options["size"]), self._scan_seconds)
        self._requests = RequestPool(host, PARALLEL_LOOKUPS, "ask")
        self._downloads = RequestPool(host, PARALLEL_READS, "read")
        self._uploads = RequestPool(host, PARALLEL_WRITES, "write")
        self._scans = RequestPool(host, 1, "scan")
        self._reads, self._writes = Lane(PARALLEL_READS), Lane(PARALLEL_WRITES)
        self._presence = Presence(MAX_REMEMBERED_OBJECTS, THERE_SECONDS, ABSENT_SECONDS)
        self._failures = FailureCounts()
        self._corrupt: dict[str, None] = {}  # objects with wrong contents that may still exist
        self._answered = 0.0  # when the server last answered a lookup, or failed a request that others may not
        self._undeletable = False  # a refused deletion was logged
        self._access_checked = 0.0
        self._trouble: Trouble | None = None  # of the last check of the access rights

    def open(self) -> m.Opened:
        """Check that the bucket can be reached and read. Raises KVTierError."""
        note = self._check_rights()
        self._scan_later()
        return m.Opened(writable=not note, note=note)

    def handle(self, message: m.ToTierProcess) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Write):
            self._write(message)
        elif isinstance(message, m.Drop):
            for move in message.moves:
                self._drop(self._key(move))
        elif not isinstance(message, m.Release):  # lookups hold nothing
            raise KVTierError(f"unexpected message {type(message).__name__}")

    def close(self) -> None:
        for pool in (self._requests, self._downloads, self._uploads, self._scans):
            pool.close()

    # -- opening ------------------------------------------------------------------------------------------------

    def _check_rights(self) -> str:
        """Find out the access rights. Returns "" or why the bucket is read only. Raises Trouble, or KVTierError for
        blocks of another format.

        Reads the marker, because the answer to a read explains an error (that to HEAD does not). If the marker is
        readable, "forbidden" for an absent object means that the bucket may not be listed.
        """
        marker, note, empty = self._location.marker, "", False
        try:
            found = self._client.read(marker, 2 * len(FORMAT))
            empty = not found and not self._client.size(marker)  # the power failed before its content was durable
            if empty:
                raise Trouble(f"{marker} is empty", Kind.ABSENT)
        except Trouble as missing:
            if missing.kind not in (Kind.ABSENT, Kind.FORBIDDEN):
                raise
            found = FORMAT
            try:
                if not self._client.put(marker, memoryview(FORMAT), create=not empty):  # another store was first
                    found = self._client.read(marker, 2 * len(FORMAT))
            except Trouble as trouble:
                if trouble.kind not in (Kind.FORBIDDEN, Kind.FULL) or missing.kind is Kind.FORBIDDEN:
                    raise
                note = f"read only: {trouble}"
        if found != FORMAT:
            raise KVTierError(f"{self._location} holds other data than blocks of this version; use another prefix")
        try:
            self._client.size(f"{marker}-absent")
        except Trouble as trouble:
            if trouble.kind is not Kind.FORBIDDEN:
                raise
            self._client.denied_is_absent = True
        return note

    def _check_access(self) -> None:
        """If absent objects are reported as forbidden, lost rights look like an empty bucket: check them regularly."""
        now = time.monotonic()
        if not self._client.denied_is_absent or now - self._access_checked < ACCESS_SECONDS:
            return
        self._access_checked = now

        def checked(result: object) -> None:
            self._failures.ended("find", result)
            self._trouble = None
            if isinstance(result, Trouble) and not self._failures.excuses("find", result):
                self._trouble = result

        self._requests.do(lambda: self._client.read(self._location.marker, len(FORMAT)), checked)

    def _scan_later(self) -> None:
        """Keep the directory below its size from now on."""
        directory = self._directory
        if directory is None:
            return

        def begin() -> None:
            self._scans.do(directory.scan_if_due, scanned)

        def scanned(result: object) -> None:
            if isinstance(result, tuple):
                self._host.send(m.Scanned(*result))
            self._scan_later()

        seconds = max(MIN_CHECK_SECONDS, self._scan_seconds / CHECKS)
        self._host.reactor.call_later(seconds, self._host.guard(begin))

    # -- lookups ------------------------------------------------------------------------------------------------

    def _look(self, message: m.Look) -> None:
        began = time.monotonic()
        prefix = Prefix(message.hash_block_size, message.groups, message.block_hashes, message.start)
        sizes = [shape.slot_pages * PAGE for shape in message.groups]
        timer: Timer | None = None  # None: answered
        failed = False

        def key(name: Name) -> str:
            return self._location.key(message.namespace_id, *name)

        def answer(num_hash_blocks: int, error: str = "") -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = None
                token = message.id if num_hash_blocks > message.start else 0
                seconds = time.monotonic() - began
                self._host.send(m.Located(message.id, token, num_hash_blocks, error, seconds, failed=failed))

        def ask(names: list[Name]) -> None:
            self._ask([(key(name), sizes[name[0]]) for name in names], on_answers, lambda: timer is not None)

        def on_answers(answers: list[bool | None] | Trouble) -> None:
            nonlocal failed
            if isinstance(answers, Trouble):
                answer(message.start, str(answers))
                return
            failed = failed or None in answers
            try:
                ask(rounds.send([each is True for each in answers]))
            except StopIteration as end:
                answer(end.value)

        def late() -> None:
            # If the server answered other requests meanwhile, only this process's queue is long.
            silent = f"the object store of {self._location}: no answer within {self._look_seconds:.0f} s"
            answer(message.start, silent if self._answered < began else "")

        timer = self._host.reactor.call_later(self._look_seconds, self._host.guard(late))
        if self._trouble is not None:
            answer(message.start, str(self._trouble))
            return
        rounds = search(prefix, lambda name: self._presence.get(key(name)))
        try:
            names = next(rounds)
        except StopIteration as end:
            answer(end.value)
            return
        if self._failures.pause_left:
            failed = True
            answer(message.start)
        else:
            ask(names)

    def _ask(
        self,
        wanted: list[tuple[str, int]],
        on_answers: Callable[[list[bool | None] | Trouble], None],
        needed: Callable[[], bool],
    ) -> None:
        """Ask whether objects of these names and lengths exist; None: the request failed. If the store has failed, the
        Trouble is the answer for all. ``needed()``, on any thread: whether the answer is still needed."""
        answers: list[bool | None] = [None] * len(wanted)
        left = len(wanted)

        def answered(i: int, result: object) -> None:
            nonlocal left
            if isinstance(result, Trouble):
                if not needed():
                    return
                self._failures.ended("find", result)
                if not self._failures.excuses("find", result):
                    on_answers(result)
                    return
            else:
                self._failures.ended("find", result)
                key, size = wanted[i]
                there = answers[i] = result == size and key not in self._corrupt
                self._presence.saw(key, there)
            self._answered = time.monotonic()
            left -= 1
            if left == 0 and needed():
                if not any(answers):
                    self._check_access()
                on_answers(answers)

        def ask(key: str) -> int | None:
            if needed():
                return self._client.size(key)
            raise Trouble("the lookup has ended")

        for i, (key, _) in enumerate(wanted):
            self._requests.do(partial(ask, key), partial(answered, i))

    # -- blocks -------------------------------------------------------------------------------------------------

    def _read(self, message: m.Read) -> None:
        def start(i: int, done: Done) -> None:
            key, deadline = self._key(message.moves[i]), time.monotonic() + self._read_seconds

            def ended(trouble: Trouble | None) -> None:
                self._failures.ended("read", trouble)
                if trouble is None or trouble.kind is Kind.ABSENT:
                    self._presence.saw(key, trouble is None)
                done(trouble)

            into = self._slot(message.moves[i])
            self._downloads.do(partial(self._get, key, into, deadline), _result_to(ended))

        self._move(message, self._reads, start)

    def _write(self, message: m.Write) -> None:
        def start(i: int, done: Done) -> None:
            key, data = self._key(message.moves[i]), self._slot(message.moves[i])

            def ended(trouble: Trouble | None) -> None:
                self._failures.ended("write", trouble)
                if trouble is None:
                    self._presence.saw(key, True)
                    self._corrupt.pop(key, None)
                done(trouble)

            # Often another store has written it, and a HEAD costs less than a PUT.
            put = partial(self._put, key, data, key not in self._corrupt)
            if key not in self._corrupt and self._presence.get(key):
                done(None)
            else:
                self._uploads.do(put, _result_to(ended))

        def begin() -> None:
            self._move(message, self._writes, start)

        if pause := self._failures.pause_left:
            self._host.reactor.call_later(pause, self._host.guard(begin))
        else:
            begin()

    def _get(self, key: str, into: memoryview, deadline: float) -> None:
        modified = self._client.get(key, into, deadline)
        if self._directory is not None:
            self._directory.was_used(key, modified)

    def _put(self, key: str, data: memoryview, unless_there: bool) -> None:
        """``unless_there``: with this length."""
        size = self._client.size(key) if unless_there else None
        if size == len(data):
            if self._directory is not None:
                self._directory.was_used(key, 0.0)
            return
        if self._directory is None:
            self._client.put(key, data, create=unless_there and size is None)
            return
        self._directory.check()
        try:
            self._client.put(key, data)
        except Trouble as trouble:
            if trouble.kind is Kind.FULL:
                self._directory.is_full()
            raise
        self._directory.was_written(len(data))

    def _move(self, message: m.Read | m.Write, lane: Lane, start: Callable[[int, Done], None]) -> None:
        began, what = time.monotonic(), "write" if isinstance(message, m.Write) else "read"

        def over(troubles: list[Trouble | None]) -> None:
            serious = [
                trouble
                for trouble in troubles
                if trouble is not None and trouble.kind is not Kind.ABSENT and not self._failures.excuses(what, trouble)
            ]
            refused = what == "write" and any(t.kind in (Kind.FORBIDDEN, Kind.FULL) for t in serious)
            error = str(serious[0]) if serious else ""
            good = [trouble is None for trouble in troubles]
            self._host.send(m.Moved(message.id, good, error, time.monotonic() - began, writable=not refused))

        lane.add(Job(len(message.moves), start, over))

    def _drop(self, key: str) -> None:
        """Delete a corrupt object. If that is not allowed, do not read it again."""
        self._presence.saw(key, False)
        self._corrupt[key] = None
        if len(self._corrupt) > MAX_REMEMBERED_OBJECTS:
            self._corrupt.pop(next(iter(self._corrupt)))

        def deleted(result: object) -> None:
            if isinstance(result, Trouble):
                if not self._undeletable:
                    logger.warning(
                        "kvtier: object tier: corrupt blocks cannot be deleted (%s); other nodes may read them", result
                    )
                self._undeletable = True
            elif key in self._corrupt:  # or it was written anew by now
                del self._corrupt[key]
                self._presence.saw(key, False)

        self._requests.do(lambda: self._client.delete(key), deleted)

    def _key(self, move: m.Move) -> str:
        return self._location.key(move.namespace_id, move.group, move.hash)

    def _slot(self, move: m.Move) -> memoryview:
        """Its bytes in the pool. Raises KVTierError if it is outside the pool: the process ends."""
        first, nbytes = move.slot * PAGE, move.pages * PAGE
        if not 0 < first < first + nbytes <= self._host.pool.nbytes:
            raise KVTierError(f"slot {move.slot} of {move.pages} pages is not in the pool")
        return self._host.pool.view[first : first + nbytes]


def _result_to(done: Done) -> Callable[[object], None]:
    return lambda result: done(result if isinstance(result, Trouble) else None)

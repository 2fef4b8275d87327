"""The mover of the object tier: blocks between the pool and an S3 bucket, one object a block.

Writers need not know of each other: an object's name follows from what is in it (``object_names``), so whoever
writes one that is there already changes nothing. What has another length than the block is no use and is written
anew. Whether the bytes are right, who loads the block sees.

Every wait has an end: each request has its deadline, and a message's other blocks are given up when one fails. A
thread may write to a slot until its request has ended, so a Read is answered when all its requests have, and if that
takes too long, the server ends this process. Moved and Located have an ``error`` where the object store is at fault;
that an object is not there, or too short, is none.

Options of Open: ``url`` (s3://bucket/prefix), ``endpoint``, ``region``, ``backend`` (auto, OBJ, boto3), and in seconds
``timeout`` (a server that says nothing), ``look_seconds`` (of a Look), ``read_seconds`` (of one object).
"""

import time
from collections.abc import Callable

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.objects.clients import Bucket, Kind, Trouble
from vllm_kvtier.store.lower.objects.data import BucketData, Data, nixl_data
from vllm_kvtier.store.lower.objects.jobs import Done, Hands, Job, Lane, Presence
from vllm_kvtier.store.lower.objects.names import FORMAT, check_endpoint, parse_url
from vllm_kvtier.store.lower.objects.search import Chain, Name, search
from vllm_kvtier.store.lower.runner import Host
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# A request waits tens of milliseconds for the server and its bytes take less: many at once. Fewer are written than
# read, which somebody waits for.
READS, WRITES, QUESTIONS = 16, 4, 32
REMEMBERED = 1 << 18  # objects
THERE_SECONDS = 300.0  # an object that was seen is believed to be there; reading it tells otherwise
ABSENT_SECONDS = 3.0  # another store may write it at any time
DOUBT_SECONDS = 30.0  # between two looks at whether we still have access, where absent objects look forbidden


class ObjectMover:
    def __init__(self, host: Host, options: dict):
        self._host, self._place = host, parse_url(str(options["url"]))
        self._look_seconds = float(options.get("look_seconds", 4.0))
        self._read_seconds = float(options.get("read_seconds", 20.0))
        self._backend = str(options.get("backend", "auto"))
        self._bucket = Bucket(
            self._place,
            check_endpoint(str(options.get("endpoint", ""))),
            str(options.get("region", "")),
            timeout=float(options.get("timeout", 5.0)),
            connections=READS + WRITES + QUESTIONS,
        )
        self._questions = Hands(host, QUESTIONS, "ask")
        self._uploads = Hands(host, WRITES, "write")
        self._data: Data | None = None
        self._reads, self._writes = Lane(READS), Lane(WRITES)
        self._presence = Presence(REMEMBERED, THERE_SECONDS, ABSENT_SECONDS)
        self._wrong: dict[str, None] = {}  # objects of the right length and wrong contents that may still be there
        self._answered = 0.0  # when the server last answered a question
        self._undeletable = False  # a deletion was refused, and that was said
        self._doubted = 0.0  # when we last looked whether we have access
        self._trouble: Trouble | None = None  # what that found

    def open(self) -> m.Opened:
        """Makes sure that the bucket can be reached and read. Raises KVTierError."""
        note = self._survey()
        self._data, why = self._make_data()
        return m.Opened(writable=not note, note="; ".join(filter(None, (note, why))))

    def handle(self, message: m.ToMover) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Write):
            self._write(message)
        elif isinstance(message, m.Drop):
            for move in message.moves:
                self._drop(self._key(move))
        elif not isinstance(message, m.Release):  # nothing is held for anybody
            raise KVTierError(f"an object store's mover is told {type(message).__name__}")

    def close(self) -> None:
        self._questions.close()
        self._uploads.close()
        if self._data is not None:
            self._data.close()

    # -- opening ------------------------------------------------------------------------------------------------

    def _survey(self) -> str:
        """Finds out what we may do; "" or why nothing can be written. Raises Trouble, or KVTierError for blocks of
        another format.

        The marker's contents say who is at fault (a question for an object's length alone is refused without words),
        and where it is there, a "forbidden" for another object that is not means just that.
        """
        marker, note = self._place.marker, ""
        try:
            found = self._bucket.read(marker, 2 * len(FORMAT))
        except Trouble as missing:
            if missing.kind not in (Kind.ABSENT, Kind.FORBIDDEN):
                raise
            try:
                self._bucket.put(marker, memoryview(FORMAT))
            except Trouble as trouble:
                if trouble.kind is not Kind.FORBIDDEN or missing.kind is Kind.FORBIDDEN:
                    raise
                note = f"read only: {trouble}"
            found = FORMAT
        if found != FORMAT:
            raise KVTierError(f"{self._place} holds something else than blocks of this version; use another prefix")
        try:
            self._bucket.size(f"{marker}-absent")
        except Trouble as trouble:
            if trouble.kind is not Kind.FORBIDDEN:
                raise
            self._bucket.denied_is_absent = True
        return note

    def _make_data(self) -> tuple[Data, str]:
        boto = BucketData(self._host, self._bucket, READS, self._uploads)
        if self._backend != "boto3":
            try:
                return nixl_data(self._host, self._bucket, boto), ""
            except KVTierError as error:
                if self._backend == "OBJ":
                    return boto, f"boto3 moves the bytes, not NIXL's OBJ: {error}"
        return boto, ""

    def _check_access(self) -> None:
        """Where absent objects look forbidden, losing all rights looks like an empty bucket: ask now and then."""
        now = time.monotonic()
        if not self._bucket.denied_is_absent or now - self._doubted < DOUBT_SECONDS:
            return
        self._doubted = now

        def told(result: object) -> None:
            self._trouble = result if isinstance(result, Trouble) else None

        self._questions.do(lambda: self._bucket.read(self._place.marker, len(FORMAT)), told)

    # -- questions ----------------------------------------------------------------------------------------------

    def _look(self, message: m.Look) -> None:
        began = time.monotonic()
        chain = Chain(message.unit_tokens, message.groups, message.chain, message.start)
        sizes = [shape.slot_pages * PAGE for shape in message.groups]

        def key(name: Name) -> str:
            return self._place.key(message.space, *name)

        def answer(units: int, error: str = "") -> None:
            nonlocal timer
            if timer is not None:
                timer.cancel()
                timer = None
                token = message.id if units > message.start else 0
                self._host.send(m.Located(message.id, token, units, error, time.monotonic() - began))

        def go_on(names: list[Name]) -> None:
            self._ask([(key(name), sizes[name[0]]) for name in names], heard, lambda: timer is not None)

        def heard(answers: list[bool] | Trouble) -> None:
            if timer is None:
                return
            if isinstance(answers, Trouble):
                answer(message.start, str(answers))
                return
            try:
                go_on(rounds.send(answers))
            except StopIteration as end:
                answer(end.value)

        def late() -> None:
            # Where others were answered meanwhile, it is our own queue that is long, and nothing is wrong.
            silent = f"the object store of {self._place}: no answer within {self._look_seconds:.0f} s"
            answer(message.start, silent if self._answered < began else "")

        timer = self._host.reactor.call_later(self._look_seconds, self._host.guard(late))
        if self._trouble is not None:
            answer(message.start, str(self._trouble))
            return
        rounds = search(chain, lambda name: self._presence.get(key(name)))
        try:
            go_on(next(rounds))
        except StopIteration as end:
            answer(end.value)

    def _ask(
        self,
        wanted: list[tuple[str, int]],
        heard: Callable[[list[bool] | Trouble], None],
        needed: Callable[[], bool],
    ) -> None:
        """Are objects of these names and lengths there? One Trouble is enough to know nothing. ``needed()``, on any
        thread: whether somebody still wants to know."""
        answers: list[bool | None] = [None] * len(wanted)
        left = len(wanted)

        def told(i: int, result: object) -> None:
            nonlocal left
            if isinstance(result, Trouble):
                if left > 0:
                    left = 0
                    heard(result)
                return
            self._answered = time.monotonic()
            key, size = wanted[i]
            answers[i] = result == size and key not in self._wrong
            self._presence.saw(key, answers[i])
            left -= 1
            if left == 0:
                if not any(answers):
                    self._check_access()
                heard(answers)

        def ask(key: str) -> int | None:
            if needed():
                return self._bucket.size(key)
            raise Trouble("nobody wants to know any more")

        for i, (key, _) in enumerate(wanted):
            self._questions.do(lambda key=key: ask(key), lambda result, i=i: told(i, result))

    # -- blocks -------------------------------------------------------------------------------------------------

    def _read(self, message: m.Read) -> None:
        def start(i: int, done: Done) -> None:
            key, deadline = self._key(message.moves[i]), time.monotonic() + self._read_seconds

            def ended(trouble: Trouble | None) -> None:
                if trouble is None or trouble.kind is Kind.ABSENT:
                    self._presence.saw(key, trouble is None)
                done(trouble)

            self._data.get(key, *self._slot(message.moves[i]), deadline, ended)

        self._move(message, self._reads, start)

    def _write(self, message: m.Write) -> None:
        def start(i: int, done: Done) -> None:
            key, slot = self._key(message.moves[i]), self._slot(message.moves[i])

            def ended(trouble: Trouble | None) -> None:
                if trouble is None:
                    self._presence.saw(key, True)
                    self._wrong.pop(key, None)
                done(trouble)

            def asked(size: object) -> None:
                if isinstance(size, Trouble):
                    ended(size)
                elif size == slot[1]:
                    ended(None)
                else:
                    self._data.put(key, *slot, ended)

            if key in self._wrong:
                self._data.put(key, *slot, ended)
            elif self._presence.get(key):
                ended(None)
            else:  # most often another store has written it: asking costs less than sending it again
                self._uploads.do(lambda: self._bucket.size(key), asked)

        self._move(message, self._writes, start)

    def _move(self, message: m.Read | m.Write, lane: Lane, start: Callable[[int, Done], None]) -> None:
        began = time.monotonic()

        def over(troubles: list[Trouble | None]) -> None:
            serious = [trouble for trouble in troubles if trouble is not None and trouble.kind is not Kind.ABSENT]
            denied = isinstance(message, m.Write) and any(t.kind is Kind.FORBIDDEN for t in serious)
            words = str(serious[0]) if serious else ""
            good = [trouble is None for trouble in troubles]
            self._host.send(m.Moved(message.id, good, words, time.monotonic() - began, writable=not denied))

        lane.add(Job(len(message.moves), start, over))

    def _drop(self, key: str) -> None:
        """It is wrong: deleted, and where that is not allowed, at least we do not take it again."""
        self._presence.saw(key, False)
        self._wrong[key] = None
        if len(self._wrong) > REMEMBERED:
            self._wrong.pop(next(iter(self._wrong)))

        def told(result: object) -> None:
            if isinstance(result, Trouble):
                if not self._undeletable:
                    logger.warning("kvtier: wrong blocks cannot be deleted, others may read them: %s", result)
                self._undeletable = True
            else:
                self._wrong.pop(key, None)
                self._presence.saw(key, False)

        self._questions.do(lambda: self._bucket.delete(key), told)

    def _key(self, move: m.Move) -> str:
        return self._place.key(move.space, move.group, move.hash)

    def _slot(self, move: m.Move) -> tuple[int, int]:
        """(first byte in the pool, bytes). Raises KVTierError for what is not in it: the process ends."""
        first, nbytes = move.slot * PAGE, move.pages * PAGE
        if not 0 < first < first + nbytes <= self._host.pool.nbytes:
            raise KVTierError(f"slot {move.slot} of {move.pages} pages is not in the pool")
        return first, nbytes

"""The object tier's tier process on a bucket that is a dict."""

import math
from types import SimpleNamespace

import pytest
from object_fakes import BLOCK_HASHES, PAGES, Loop, hash_of
from store_support import NAMESPACE_ID, block_hashes_of
from support import Clock, eventually

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.index.types import HASH_BYTES, ZERO
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.objects import process as object_mover
from vllm_kvtier.store.tiers.objects.failures import PAUSES, FailureCounts
from vllm_kvtier.store.tiers.objects.object_names import FORMAT, ObjectLocation
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.request_pool import Kind, RequestPool, Trouble
from vllm_kvtier.wire.slots import PAGE

PLACE = ObjectLocation("bucket", "x")


class FakeBucket:
    """``listable``: absent objects are reported as absent. ``fails``: what any request raises. ``asked``: by kind."""

    def __init__(self, *arguments, **options):
        self.place, self.endpoint = PLACE, "http://nowhere"
        self.objects, self.denied_is_absent = {}, False
        self.listable = self.writes = self.deletes = True
        self.fails: Trouble | None = None
        self.asked: list[tuple[str, str]] = []

    def _ask(self, what, key, missing_is_trouble):
        self.asked.append((what, key))
        if self.fails is not None:
            raise self.fails
        if key not in self.objects and missing_is_trouble:
            known_absent = self.listable or self.denied_is_absent
            raise Trouble(f"no {key}", Kind.ABSENT if known_absent else Kind.FORBIDDEN)

    def size(self, key):
        try:
            self._ask("size", key, True)
        except Trouble as trouble:
            if trouble.kind is Kind.ABSENT:
                return None
            raise
        return len(self.objects[key])

    def get(self, key, into, deadline):
        self._ask("get", key, True)
        if len(self.objects[key]) != len(into):
            raise Trouble("another length", Kind.ABSENT)
        into[:] = self.objects[key]
        return 0.0

    def read(self, key, most):
        self._ask("read", key, True)
        return self.objects[key] if len(self.objects[key]) <= most else b""

    def put(self, key, data, create=False):
        self._ask("put", key, False)
        if not self.writes:
            raise Trouble("may not write", Kind.FORBIDDEN)
        if create and key in self.objects:
            return False
        self.objects[key] = bytes(data)
        return True

    def delete(self, key):
        self._ask("delete", key, False)
        if not self.deletes:
            raise Trouble("may not delete", Kind.FORBIDDEN)
        self.objects.pop(key, None)


class FakeHands:
    """Calls are made when the loop runs."""

    def __init__(self, host, count, name):
        self._loop = host.reactor

    def do(self, call, done):
        def told():
            try:
                result = call()
            except Trouble as trouble:
                result = trouble
            self._loop.call_soon(lambda: done(result))

        self._loop.call_soon(told)

    def close(self):
        """Nothing to end."""


class MoverBench:
    def __init__(self, monkeypatch, **options):
        self.loop, self.sent = Loop(), []
        memory = bytearray(64 * PAGE)
        pool = SimpleNamespace(view=memoryview(memory), nbytes=len(memory), address=0)
        self.pool = pool
        host = SimpleNamespace(reactor=self.loop, pool=pool, send=self.sent.append, guard=lambda call: call)
        self.bucket = FakeBucket()
        monkeypatch.setattr(object_mover, "ObjectClient", lambda *a, **k: self.bucket)
        monkeypatch.setattr(object_mover, "RequestPool", FakeHands)
        self.tier_process = object_mover.ObjectProcess(host, {"url": str(PLACE), **options})
        self.last = 0

    def ask(self, kind, *arguments):
        self.last += 1
        self.tier_process.handle(kind(self.last, *arguments))
        self.loop.run()
        (answer,) = self.sent
        self.sent.clear()
        assert answer.id == self.last
        return answer

    def look(self, block_hashes=BLOCK_HASHES, start=0, groups=None):
        return self.ask(m.Look, NAMESPACE_ID, 16, groups or [GroupShape(1, PAGES)], block_hashes, start)

    def read(self, *numbers):
        return self.ask(m.Read, 1, self.moves(numbers))

    def write(self, *numbers):
        return self.ask(m.Write, self.moves(numbers))

    def drop(self, *numbers):
        self.tier_process.handle(m.Drop(moves=self.moves(numbers)))
        self.loop.run()

    def moves(self, numbers):
        return [m.Move(NAMESPACE_ID, 0, hash_of(n), ZERO, b"", 1 + i * PAGES, PAGES) for i, n in enumerate(numbers)]

    def fill(self, *numbers):
        """Give the slots that a message for these blocks names their contents."""
        for i, n in enumerate(numbers):
            self.slot(i)[:] = bytes([n]) * (PAGES * PAGE)

    def slot(self, i):
        return self.pool.view[(1 + i * PAGES) * PAGE : (1 + (i + 1) * PAGES) * PAGE]

    def key(self, number):
        return PLACE.key(NAMESPACE_ID, 0, hash_of(number))

    def have(self, *numbers):
        for n in numbers:
            self.bucket.objects[self.key(n)] = bytes([n]) * (PAGES * PAGE)

    def asked(self, what):
        return sum(kind == what for kind, _ in self.bucket.asked)


@pytest.fixture
def bench(monkeypatch):
    bench = MoverBench(monkeypatch)
    assert bench.tier_process.open() == m.Opened(writable=True)
    bench.bucket.asked.clear()
    return bench


def test_object_tier_process_open_writes_and_checks_marker(monkeypatch):
    bench = MoverBench(monkeypatch)
    assert bench.tier_process.open().writable and bench.bucket.objects == {"x/.kvtier": FORMAT}
    assert not bench.bucket.denied_is_absent
    assert bench.tier_process.open().writable and bench.asked("put") == 1
    bench.bucket.objects["x/.kvtier"] = b"kvtier blocks 2\n"
    with pytest.raises(KVTierError, match="another prefix"):
        bench.tier_process.open()


def test_object_tier_process_open_writes_an_empty_marker_again(monkeypatch):
    """The power failed after the first store had written it: its name was durable, its content was not."""
    bench = MoverBench(monkeypatch)
    bench.bucket.objects["x/.kvtier"] = b""
    assert bench.tier_process.open().writable and bench.bucket.objects == {"x/.kvtier": FORMAT}
    bench.bucket.objects["x/.kvtier"], bench.bucket.writes = b"", False
    assert "read only" in bench.tier_process.open().note
    bench.bucket.objects["x/.kvtier"], bench.bucket.writes = b"other data, longer than a marker" * 9, True
    with pytest.raises(KVTierError, match="another prefix"):
        bench.tier_process.open()


def test_object_tier_process_open_without_permissions(monkeypatch):
    bench = MoverBench(monkeypatch)
    bucket = bench.bucket
    bucket.listable = False
    assert bench.tier_process.open().writable and bucket.denied_is_absent, "found by a marker of our own"
    bucket.objects.clear()
    bucket.listable, bucket.writes, bucket.denied_is_absent = True, False, False
    opened = bench.tier_process.open()
    assert not opened.writable and "read only" in opened.note
    bucket.listable = False
    with pytest.raises(Trouble, match="may not write"):
        bench.tier_process.open()
    bucket.fails = Trouble("wrong key", Kind.DENIED)
    with pytest.raises(Trouble, match="wrong key"):
        bench.tier_process.open()


def test_object_tier_process_written_blocks_are_found_and_read(bench):
    bench.fill(0, 1, 2)
    assert bench.write(0, 1, 2).good == [True] * 3
    assert bench.asked("put") == bench.asked("size") == 3
    assert bench.write(0, 1, 2).good == [True] * 3 and bench.asked("put") == 3, "known to be there"
    located = bench.look()
    assert located.num_hash_blocks == 3 and located.token and not located.error
    bench.fill(9, 9, 9)
    moved = bench.read(0, 1, 2)
    assert moved.good == [True] * 3 and moved.error == ""
    assert [bench.slot(i)[0] for i in range(3)] == [0, 1, 2]
    assert bench.look(start=3).num_hash_blocks == 3 and bench.look(start=3).token == 0


def test_object_tier_process_skips_existing_objects_of_right_size(bench):
    bench.have(0, 1)
    bench.bucket.objects[bench.key(1)] = b"truncated"
    bench.fill(0, 1)
    assert bench.write(0, 1).good == [True, True]
    assert bench.asked("put") == 1 and len(bench.bucket.objects[bench.key(1)]) == PAGES * PAGE


def test_object_tier_process_long_write_of_known_objects_is_answered(bench):
    """None of its blocks waits for the server: 256 nested calls ended the process."""
    moves = [bench.moves([0])[0]] * 1000
    bench.ask(m.Write, moves[:1])
    assert bench.ask(m.Write, moves).good == [True] * 1000
    assert bench.asked("put") == 1


def test_object_tier_process_missing_or_short_object_is_no_error(bench):
    bench.have(0, 1, 2, 3)
    bench.bucket.objects[bench.key(2)] += b"x"
    moved = bench.read(0, 1, 2, 3)
    assert moved.good[:3] == [True, True, False] and not moved.error
    assert bench.look().num_hash_blocks == 2
    del bench.bucket.objects[bench.key(0)]
    assert bench.read(0).good == [False]
    assert bench.look().num_hash_blocks == 0, "remembered: it is missing"


def test_object_store_failure_is_reported(bench):
    bench.have(0)
    bench.bucket.fails = Trouble("it fails")
    located, moved, written = bench.look(), bench.read(0, 1), bench.write(5)
    assert (located.num_hash_blocks, located.error) == (0, "it fails")
    assert (moved.good, moved.error) == ([False, False], "it fails")
    assert (written.good, written.error, written.writable) == ([False], "it fails", True)
    bench.bucket.fails = None
    assert bench.look().num_hash_blocks == 1


def test_object_write_refusals_are_distinguished(bench):
    bench.bucket.writes = False
    moved = bench.write(0)
    assert (moved.good, moved.writable) == ([False], False) and "may not write" in moved.error


def test_object_tier_process_bad_block_is_deleted_and_rewritten(bench):
    bench.have(0, 1)
    assert bench.look().num_hash_blocks == 2
    bench.drop(0)
    assert bench.key(0) not in bench.bucket.objects and bench.look().num_hash_blocks == 0
    bench.bucket.deletes = False
    bench.have(0)
    bench.drop(0)
    assert bench.key(0) in bench.bucket.objects and bench.look().num_hash_blocks == 0, (
        "not taken again, though it is there"
    )
    bench.fill(7)
    assert bench.ask(m.Write, bench.moves([0])).good == [True]
    assert bench.bucket.objects[bench.key(0)][0] == 7, "although one of its length is there"
    assert bench.look().num_hash_blocks == 2


def test_object_that_is_written_anew_before_its_deletion_is_reported_is_there(bench, monkeypatch):
    bench.have(0)
    held = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier_process._requests, "do", lambda call, done: held.append((call, done)))
        bench.drop(0)
    [(delete, deleted)] = held
    result = delete()
    bench.fill(7)
    assert bench.ask(m.Write, bench.moves([0])).good == [True]
    deleted(result)
    assert bench.look().num_hash_blocks == 1 and bench.look().num_hash_blocks == 1


def test_object_tier_process_slow_lookup_times_out(bench):
    held = []
    bench.tier_process._requests.do = lambda call, done: held.append((call, done))
    bench.tier_process.handle(m.Look(7, NAMESPACE_ID, 16, [GroupShape(1, PAGES)], BLOCK_HASHES, 0))
    bench.loop.fire()
    (answer,) = bench.sent
    assert (answer.id, answer.num_hash_blocks) == (7, 0) and "no answer within 4 s" in answer.error
    for call, done in held:
        with pytest.raises(Trouble):  # no lookup waits: the server is not asked
            call()
        done(Trouble("late"))
    assert len(bench.sent) == 1 and not bench.bucket.asked
    # Others are answered: our own queue is long, and the server not to blame.
    bench.sent.clear()
    bench.tier_process.handle(m.Look(8, NAMESPACE_ID, 16, [GroupShape(1, PAGES)], BLOCK_HASHES, 0))
    held[-1][1](None)
    bench.loop.fire()
    assert bench.sent == [m.Located(8, 0, 0, "", bench.sent[0].seconds)]
    # Or answered with an error, and slowly: several in a row say that the store has failed, not the time.
    bench.sent.clear()
    bench.tier_process.handle(m.Look(9, NAMESPACE_ID, 16, [GroupShape(1, PAGES)], BLOCK_HASHES, 0))
    held[-1][1](Trouble("500", Kind.PASSING))
    bench.loop.fire()
    assert bench.sent == [m.Located(9, 0, 0, "", bench.sent[0].seconds)]


def test_object_tier_process_detects_lost_permissions(bench):
    bench.bucket.listable, bench.bucket.denied_is_absent = False, True
    assert bench.look().num_hash_blocks == 0
    bench.tier_process._access_checked = -math.inf
    bench.bucket.objects.clear()
    bench.bucket.denied_is_absent = True
    assert bench.look(block_hashes_of((3, "y"))).error == ""
    assert "no x/.kvtier" in bench.look(block_hashes_of((3, "z"))).error


def test_object_tier_process_exits_on_malformed_message(bench):
    for message in (
        m.Read(1, 1, [m.Move(NAMESPACE_ID, 0, hash_of(0), ZERO, b"", 63, PAGES)]),
        m.Write(1, [m.Move(NAMESPACE_ID, 0, hash_of(0), ZERO, b"", 0, PAGES)]),
        m.LeaseReply(1, 1, 1, []),
    ):
        with pytest.raises(KVTierError):
            bench.tier_process.handle(message)
            bench.loop.run()
    bench.tier_process.handle(m.Release(1))
    bench.tier_process.close()


def test_object_request_pool_reports_results_and_error_class_only():
    loop, faults, told = Loop(), [], []
    hands = RequestPool(SimpleNamespace(reactor=loop, guard=lambda call: call, fail=faults.append), 2, "test")
    trouble = Trouble("known")

    def fail():
        raise ValueError("a secret")

    def known():
        raise trouble

    for call in (lambda: 7, known, fail):
        hands.do(call, told.append)
    eventually(lambda: faults and len(loop.soon) == 2)
    assert told == [], "not on a thread of its own"
    loop.run()
    assert sorted(map(repr, told)) == ["7", repr(trouble)] and faults == ["unexpected error in a request: ValueError"]
    hands.do(lambda: 8, told.append)
    eventually(lambda: loop.soon)
    hands.close()
    hands.do(lambda: 9, told.append)
    loop.run()
    assert len(told) == 2


def failing(bench, monkeypatch, kind, *numbers):
    """Requests for these blocks fail from now on."""
    size, get, keys = bench.bucket.size, bench.bucket.get, [bench.key(n) for n in numbers]

    def fail(call):
        def request(key, *arguments):
            if key in keys:
                raise Trouble("not now", kind)
            return call(key, *arguments)

        return request

    monkeypatch.setattr(bench.bucket, "size", fail(size))
    monkeypatch.setattr(bench.bucket, "get", fail(get))


@pytest.mark.parametrize("kind", [Kind.PASSING, Kind.THROTTLED])
def test_object_tier_process_failed_request_is_not_a_failed_store(bench, monkeypatch, kind):
    """Each ended the process, also if all other requests were answered."""
    bench.have(*range(4))
    failing(bench, monkeypatch, kind, 2)
    located = bench.look(BLOCK_HASHES[: 3 * HASH_BYTES])
    assert (located.num_hash_blocks, located.error, located.failed) == (2, "", True)
    bench.loop.timers.clear()
    bench.tier_process._failures._until = 0.0  # the pause is over
    moved = bench.read(2)
    assert (moved.good, moved.error) == ([False], "")
    bench.tier_process._failures._until = 0.0
    written = bench.write(2)
    assert (written.good, written.error, written.writable) == ([False], "", True)
    assert bench.read(0, 1, 3).good == [True] * 3


def test_object_tier_process_failures_in_a_row_are_a_failed_store(bench, monkeypatch):
    failing(bench, monkeypatch, Kind.PASSING, *range(40))
    assert [bench.read(n).error for n in range(4)] == ["", "", "", "not now"]
    assert [bench.write(n).error for n in range(4)] == ["", "", "", "not now"], "an answer of another kind is none"
    bench.have(0)
    monkeypatch.undo()
    bench.read(0), bench.write(0)
    assert bench.look(BLOCK_HASHES[:HASH_BYTES]).num_hash_blocks == 1


def test_object_tier_process_throttled_pauses_lookups_and_writes(bench, monkeypatch):
    bench.have(0, 1, 2)
    failing(bench, monkeypatch, Kind.THROTTLED, 0)
    assert bench.look(BLOCK_HASHES[:HASH_BYTES]).failed
    bench.bucket.asked.clear()
    located = bench.look(BLOCK_HASHES[HASH_BYTES:])
    assert (located.num_hash_blocks, located.error, located.failed) == (0, "", True) and not bench.bucket.asked
    assert bench.read(1, 2).good == [True, True], "reads go on"
    bench.loop.timers.clear()
    bench.tier_process.handle(m.Write(77, bench.moves([5])))
    bench.loop.run()
    assert not bench.sent and not bench.asked("put")
    (pause,) = bench.loop.timers
    assert 0 < pause.delay <= PAUSES[0]
    bench.loop.fire()
    (written,) = bench.sent
    assert written.good == [True] and bench.asked("put") == 1


def test_object_failures_pause_grows_until_an_answer():
    clock, throttled = Clock(), Trouble("slow down", Kind.THROTTLED)
    failures, pauses = FailureCounts(clock, lambda: 1.0), []
    for _ in range(8):
        assert failures.excuses("find", throttled)
        failures.ended("find", throttled)
        failures.ended("find", throttled)  # was sent before the pause
        pauses.append(failures.pause_left)
        clock.now += pauses[-1]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 4, 4]) and not failures.excuses("find", throttled)
    failures.ended("find", None)
    assert failures.excuses("find", throttled) and not failures.pause_left
    failures.ended("find", throttled)
    assert failures.pause_left == pytest.approx(0.1)
    assert not failures.excuses("find", Trouble("wrong key", Kind.DENIED))

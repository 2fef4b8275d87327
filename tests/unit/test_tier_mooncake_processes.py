"""The two processes of the Mooncake tier, on a cluster that is a dict and has Mooncake's faults."""

import socket
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from mooncake_fakes import FakeClient, FakeCluster
from object_fakes import BLOCK_HASHES, PAGES, hash_of
from store_support import NAMESPACE_ID
from support import eventually

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.mooncake import connection, reader, segment
from vllm_kvtier.store.tiers.mooncake.client import Code, key_of
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE

OPTIONS = {
    "mooncake_master": "127.0.0.1:9", "mooncake_trusted_network": True, "mooncake_segment": "1MiB",
    "mooncake_replicas": 2, "mooncake_host": "", "mooncake_protocol": "tcp", "mooncake_devices": "",
}  # fmt: skip


class Bench:
    """A backend on a real reactor; ``failed``: why it ended itself."""

    def __init__(self, backend, cluster=None, place="reader", **options):
        memory = bytearray(64 * PAGE)
        self.pool = SimpleNamespace(view=memoryview(memory), nbytes=len(memory), address=0)
        self.cluster = cluster or FakeCluster(self.pool.view)
        self.reactor, self.sent, self.states, self.failed = Reactor("bench"), deque(), deque(), []
        host = SimpleNamespace(
            reactor=self.reactor,
            pool=self.pool,
            send=self._send,
            guard=lambda call: call,
            fail=self.failed.append,
        )

        def connect(parsed, address, nbytes, segment_bytes):
            return FakeClient(self.cluster, place)

        self.backend = backend(host, {**OPTIONS, **options}, connect)
        self.last = 0
        self.reactor.start()

    def _send(self, message):
        (self.states if isinstance(message, m.Availability) else self.sent).append(message)

    def state(self):
        return eventually(lambda: self.states and self.states.popleft(), what="a state")

    def open(self):
        self.backend.open()
        assert self.state().usable
        return self

    def on(self, call):
        done = threading.Event()
        self.reactor.call_soon(lambda: (call(), done.set()))
        assert done.wait(10)

    def begin(self, kind, *arguments):
        self.last += 1
        message = kind(self.last, *arguments)
        self.on(lambda: self.backend.handle(message))
        return message.id

    def ask(self, kind, *arguments):
        self.begin(kind, *arguments)
        return self.answer()

    def answer(self):
        message = eventually(lambda: self.sent and self.sent.popleft(), what="an answer")
        assert message.id == self.last
        return message

    def look(self, start=0, groups=None):
        groups = groups or [GroupShape(1, PAGES)]
        return self.ask(m.Look, NAMESPACE_ID, 16, groups, BLOCK_HASHES, start).num_hash_blocks

    def moves(self, numbers):
        return [m.Move(NAMESPACE_ID, 0, hash_of(n), ZERO, b"", 1 + i * PAGES, PAGES) for i, n in enumerate(numbers)]

    def slot(self, i):
        return self.pool.view[(1 + i * PAGES) * PAGE : (1 + (i + 1) * PAGES) * PAGE]

    def have(self, *numbers, place="a", group=0):
        for n in numbers:
            key = key_of(NAMESPACE_ID, group, hash_of(n))
            self.cluster.objects[key] = bytes([n]) * (PAGES * PAGE)
            self.cluster.copies[key] = [place]

    def close(self):
        self.cluster.resume.set()
        self.on(self.backend.close)
        self.reactor.stop()


@pytest.fixture(autouse=True)
def master(monkeypatch):
    """Accepts connections, or not."""
    state = SimpleNamespace(reachable=True)
    monkeypatch.setattr(connection, "reachable", lambda address, seconds: state.reachable)
    monkeypatch.setattr(connection, "RETRY_SECONDS", 0.01)
    return state


@pytest.fixture
def benches():
    made = []

    def make(*arguments, **more):
        made.append(Bench(*arguments, **more))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.fixture
def reading(benches):
    return benches(reader.MooncakeReader).open()


@pytest.fixture
def writing(benches):
    return benches(segment.MooncakeSegment, place="own").open()


# -- lookups ------------------------------------------------------------------------------------------------------


def test_mooncake_lookup_is_exact_and_stops_at_the_first_gap(reading, monkeypatch):
    monkeypatch.setattr(reader, "FIRST_NAMES", 4)
    monkeypatch.setattr(reader, "MORE_NAMES", 10)
    assert reading.look() == 0 and reading.cluster.asked("exist") == 1, "most prefixes are not there: one question"
    reading.have(*range(30))
    assert reading.look() == 30 and reading.look(start=7) == 30
    del reading.cluster.objects[key_of(NAMESPACE_ID, 0, hash_of(5))]  # the master evicts any block
    assert reading.look() == 5
    reading.have(5)
    # A window of 4 blocks before the end: what is missing before it does not matter, what is missing in it does.
    both = [GroupShape(1, PAGES), GroupShape(1, PAGES, window=64)]
    reading.have(*range(20, 30), group=1)
    assert reading.look(groups=both) == 30
    del reading.cluster.objects[key_of(NAMESPACE_ID, 1, hash_of(28))]
    assert reading.look(groups=both) == 28
    for n in range(20, 28):
        reading.cluster.objects.pop(key_of(NAMESPACE_ID, 1, hash_of(n)))
    assert reading.look(groups=both) == 0


def test_mooncake_lookup_of_a_silent_master_finds_nothing_in_time(reading, monkeypatch):
    reading.have(*range(4))
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.05)
    held = threading.Event()
    answer = FakeClient.exist
    monkeypatch.setattr(FakeClient, "exist", lambda self, keys: (held.wait(), answer(self, keys))[1])
    assert reading.look() == 0
    state = reading.state()
    assert not state.usable and "not answered" in state.reason and state.late
    held.set()


def test_mooncake_master_that_answers_a_long_queue_of_lookups_has_not_failed(reading, monkeypatch):
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.5)
    answer, asked = FakeClient.exist, []
    monkeypatch.setattr(FakeClient, "exist", lambda *args: (time.sleep(0.05), asked.append(1), answer(*args))[2])
    for _ in range(100):
        reading.begin(m.Look, NAMESPACE_ID, 16, [GroupShape(1, PAGES)], BLOCK_HASHES, 0)
    eventually(lambda: len(reading.sent) == 100)
    assert not reading.states and len(asked) < 80, "and none is looked up any more that nothing waits for"
    reading.have(0)
    reading.sent.clear()
    assert reading.look() == 1


# -- reads --------------------------------------------------------------------------------------------------------


def test_mooncake_reads_what_is_there(reading):
    reading.have(0, 1, place="a")
    reading.have(2, place="b")
    moved = reading.ask(m.Read, 1, reading.moves([0, 1, 2, 3]))
    assert moved.good == [True, True, True, False] and not moved.error
    assert all(reading.slot(i) == bytes([i]) * (PAGES * PAGE) for i in range(3))
    assert reading.cluster.asked("get") == 2, "one call for each place"
    reading.cluster.short = 1
    assert reading.ask(m.Read, 1, reading.moves([0])).good == [False], "an object of another length"
    assert not reading.failed


def test_mooncake_lease_is_taken_right_before_the_read(reading):
    reading.have(0)
    reading.ask(m.Read, 1, reading.moves([0]))
    assert [name for name, _ in reading.cluster.calls] == ["places", "get"]


def test_mooncake_failed_read_ends_the_process_and_names_the_place(reading):
    reading.have(0, place="a")
    reading.have(1, place="b")
    reading.cluster.gone.add("a")  # exist still says that its objects are there
    assert reading.look() == 2
    reading.begin(m.Read, 1, reading.moves([0, 1]))
    eventually(lambda: reading.failed)
    assert "from a failed (code -800)" in reading.failed[0]
    assert list(reading.sent) == [m.Avoid("a", reader.AVOID_SECONDS)], (
        "its slots are free when it is reaped, not before"
    )


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.LEASE_ENDED, Code.BAD_ARGUMENT, -1234])
def test_mooncake_read_ends_the_process_unless_the_error_is_known_to_be_harmless(reading, code):
    reading.have(0, place="a")
    reading.cluster.gone.add("a")
    reading.cluster.fails = int(code)
    if code == -1234:
        reading.begin(m.Read, 1, reading.moves([0]))
        eventually(lambda: reading.failed)
    else:
        assert reading.ask(m.Read, 1, reading.moves([0])).good == [False] and not reading.failed


def test_mooncake_read_that_hangs_ends_the_process(reading, monkeypatch):
    monkeypatch.setattr(reader, "READ_SECONDS", 0.02)
    reading.have(0, place="a")
    reading.cluster.hung.add("a")
    reading.begin(m.Read, 1, reading.moves([0]))
    eventually(lambda: reading.failed)
    assert "took more than 0.0 s" in reading.failed[0]
    assert list(reading.sent) == [m.Avoid("a", reader.AVOID_SECONDS)], "nothing says that its slots are free"
    # The data come long after, as those of the real library do: only the end of the process keeps them away.
    reading.have(0, place="a")
    reading.cluster.objects[key_of(NAMESPACE_ID, 0, hash_of(0))] = b"late" * (PAGES * PAGE // 4)
    reading.cluster.resume.set()
    eventually(lambda: bytes(reading.slot(0)[:4]) == b"late")


def test_mooncake_avoided_place_is_neither_found_nor_read(reading):
    reading.have(*range(4), place="a")
    reading.have(4, 5, place="b")
    reading.on(lambda: reading.backend.handle(m.Avoid("b", 60.0)))
    assert reading.look() == 4
    assert reading.ask(m.Read, 1, reading.moves([3, 4])).good == [True, False]
    reading.cluster.copies[key_of(NAMESPACE_ID, 0, hash_of(4))] = ["a", "b"]  # reads take the first copy
    assert reading.look() == 5
    reading.on(lambda: reading.backend.handle(m.Avoid("b", 0.0)))
    assert reading.look() == 6
    assert not reading.failed


# -- the master ---------------------------------------------------------------------------------------------------


def test_mooncake_master_that_is_gone_is_asked_again(reading):
    reading.have(*range(4))
    reading.cluster.master = int(Code.MASTER_GONE)
    assert reading.look() == 0
    state = reading.state()
    assert not state.usable and "-900" in state.reason and not state.late
    calls = len(reading.cluster.calls)
    assert reading.ask(m.Read, 1, reading.moves([0])).good == [False] and len(reading.cluster.calls) == calls
    reading.cluster.master = 0
    assert reading.state() == m.Availability(True, "", "reader")
    assert reading.look() == 4


def test_mooncake_is_not_set_up_before_the_master_can_be_reached(benches, master):
    master.reachable = False
    bench = benches(reader.MooncakeReader)
    bench.backend.open()
    state = bench.state()
    assert (
        not state.usable and "127.0.0.1:9 cannot be reached" in state.reason and bench.backend._master._client is None
    )
    assert bench.look() == 0
    master.reachable = True
    assert bench.state().usable


def test_mooncake_set_up_that_fails_ends_the_process(benches):
    bench = benches(reader.MooncakeReader)

    def connect(*arguments):
        raise KVTierError("another version")

    bench.backend._master._connect = connect
    bench.backend.open()
    eventually(lambda: bench.failed == ["another version"])


def test_mooncake_set_up_with_rdma_has_time_to_register_the_pool(benches, monkeypatch):
    monkeypatch.setattr(connection, "SETUP_RATE", 64 * PAGE / 600)  # ten minutes for the pool
    for protocol, seconds in (("tcp", 20.0), ("rdma", 620.0)):
        bench = benches(reader.MooncakeReader, mooncake_protocol=protocol)
        bench.on(bench.backend._master._watch)
        assert bench.backend._master._watchdog.when - time.monotonic() == pytest.approx(seconds, abs=15.0)
        bench.on(bench.backend._master._watched)


# -- writes -------------------------------------------------------------------------------------------------------


def test_mooncake_writes_what_is_missing_and_believes_only_exist(writing):
    for i in range(3):
        writing.slot(i)[:] = bytes([i]) * (PAGES * PAGE)
    writing.have(0)
    writing.cluster.half_made.add(key_of(NAMESPACE_ID, 0, hash_of(2)))
    moved = writing.ask(m.Write, writing.moves([0, 1, 2]))
    assert moved.good == [True, True, False] and moved.writable
    ((_, put),) = [call for call in writing.cluster.calls if call[0] == "put"]
    assert put == [key_of(NAMESPACE_ID, 0, hash_of(n)) for n in (1, 2)]
    assert writing.cluster.copies[put[0]] == ["own"]
    assert writing.ask(m.Write, writing.moves([0, 1])).good == [True, True] and writing.cluster.asked("put") == 1


def test_mooncake_writes_corrupt_blocks_anew(writing):
    """Only what was removed first: an object that stays is the corrupt one."""
    for i in range(3):
        writing.slot(i)[:] = b"good" * (PAGES * PAGE // 4)
    writing.have(0, 1, 2)
    keys = [key_of(NAMESPACE_ID, 0, hash_of(n)) for n in range(3)]
    writing.cluster.stays.add(keys[2])
    moved = writing.ask(m.Write, writing.moves([0, 1, 2]), [], [], [1, 2])
    assert moved.good == [True, True, False]
    assert [writing.cluster.objects[key][:4] for key in keys] == [bytes(4), b"good", bytes([2] * 4)]


@pytest.mark.parametrize("code", [Code.NO_SPACE, Code.TRANSFER, Code.MASTER_SILENT, -1234])
def test_mooncake_put_that_fails_with_any_code_pauses_writes(writing, code):
    writing.cluster.refuses = int(code)
    moved = writing.ask(m.Write, writing.moves([0]))
    assert moved.good == [False] and f"(code {int(code)})" in moved.error
    assert not moved.writable and not writing.failed, "a pause, and the tier process is not replaced"


def test_mooncake_lookup_before_a_write_that_fails_pauses_writes(writing):
    writing.cluster.master = -1234
    moved = writing.ask(m.Write, writing.moves([0]))
    assert moved.good == [False] and "-1234" in moved.error and not moved.writable
    assert not writing.cluster.asked("put")


def test_mooncake_drops_and_replicates(writing):
    writing.have(0, 1, 2, 4)
    writing.cluster.copies[key_of(NAMESPACE_ID, 0, hash_of(1))] = ["a", "b"]
    writing.cluster.copies[key_of(NAMESPACE_ID, 0, hash_of(4))] = ["own"]
    writing.on(lambda: writing.backend.handle(m.Replicate(writing.moves([4, 0, 1, 3]))))
    eventually(lambda: writing.cluster.copies[key_of(NAMESPACE_ID, 0, hash_of(0))] == ["a", "own"])
    writing.on(lambda: writing.backend.handle(m.Drop(moves=writing.moves([2]))))
    eventually(lambda: key_of(NAMESPACE_ID, 0, hash_of(2)) not in writing.cluster.objects)
    assert writing.cluster.asked("copy") == 1, "what has enough copies, or one here, gets no more; what is gone none"


def test_mooncake_refuses_slots_outside_the_pool(reading, writing):
    outside = [m.Move(NAMESPACE_ID, 0, hash_of(0), ZERO, b"", 63, PAGES)]
    for bench, message in ((reading, m.Read(1, 1, outside)), (writing, m.Write(1, outside))):
        with pytest.raises(KVTierError, match="not in the pool"):
            bench.backend.handle(message)


def test_mooncake_takes_the_route_to_the_masters_ipv4_address(monkeypatch):
    def getaddrinfo(name, port, type):
        both = [(socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port))]
        return [(family, type, 17, "", address) for family, address in both]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert MooncakeOptions.parse({**OPTIONS, "mooncake_master": "machine:50051"}).own_host() == "127.0.0.1"


def test_mooncake_options():
    parsed = MooncakeOptions.parse({**OPTIONS, "mooncake_master": "etcd://a:1;b"})
    assert [str(each) for each in parsed.probes] == ["a:1", "b:2379"] and parsed.segment_bytes == 1 << 20
    alike, other, here = (
        MooncakeOptions.parse({**OPTIONS, "mooncake_master": master}).cluster_digest
        for master in ("etcd://b:2379;a:1", "etcd://a:1", "localhost:50051")
    )
    assert alike == parsed.cluster_digest != other and here == ""
    assert MooncakeOptions.parse({**OPTIONS, "mooncake_segment": "0"}).segment_bytes == 0
    assert MooncakeOptions.parse(OPTIONS).own_host() == "127.0.0.1"
    for host in ("::1", "[::1]"):
        with pytest.raises(ConfigError, match="cannot read over IPv6, and .*::1.* is this node's address"):
            MooncakeOptions.parse({**OPTIONS, "mooncake_host": host}).own_host()
    for name, value in (
        ("master", "host"), ("master", "redis://h:1"), ("master", "etcd://"), ("replicas", 0), ("segment", "much"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"mooncake_{name}"):
            MooncakeOptions.parse({**OPTIONS, f"mooncake_{name}": value})
    with pytest.raises(ConfigError, match="no authentication.*mooncake_trusted_network"):
        MooncakeOptions.parse({**OPTIONS, "mooncake_trusted_network": False})

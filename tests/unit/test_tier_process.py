"""The server's end of a tier process: what it answers, when, and what becomes of one that fails."""

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from support import descriptors, eventually

from vllm_kvtier import __version__
from vllm_kvtier.store import linux
from vllm_kvtier.store.tiers.process import child as child_module
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.child import Child, spawn
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, OPENING, READY, STOPPED, TierContext, TierProcess
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame, write_frame

NAMESPACE_ID, HASH_BYTES, ZERO = b"s" * 16, b"h" * 16, bytes(16)


class FakeChild:
    """A process of the test's own making: it has a socket, it can be killed, and it ends when the test says so."""

    def __init__(self, sock: socket.socket, dies: bool):
        self.sock, self.dies = sock.dup(), dies
        self.pid, self.killed, self.silent, self.last_line = 4711, 0, False, ""
        self.ended, self._end = os.pipe()
        self.stderr, self._say = os.pipe()
        os.set_blocking(self.stderr, False)
        self._status: int | None = None
        self.lines: list[str] = []

    # what the tier process calls

    def kill(self) -> None:
        self.killed += 1
        if self.dies:
            self.end(-9)

    def reap(self) -> int | None:
        return self._status

    def read_lines(self) -> list[str]:
        if select.select([self.stderr], [], [], 0)[0]:
            os.read(self.stderr, 100)
        lines, self.lines = self.lines, []
        if lines:
            self.last_line = lines[-1]
        return lines

    def close(self) -> None:
        for fd in (self.ended, self.stderr):
            os.close(fd)

    # what the test does

    def end(self, status: int, words: str = "") -> None:
        if self._status is None:
            if words:
                self.lines.append(words)
                os.write(self._say, b"x")
            self._status = status
            self.sock.close()
            os.write(self._end, b"x")

    def say(self, *messages) -> None:
        for message in messages:
            write_frame(self.sock, m.encode(message))

    def hear(self):
        return m.decode_to_tier_process(read_frame(self.sock, time.monotonic() + 5, []))


class Bench:
    """A TierProcess on a real reactor, with children of the test's own making, and a list of its callbacks."""

    def __init__(self, dies=True, open_seconds=30.0, failures=0):
        self.children: list[FakeChild] = []
        self.told: list = []
        self.dies, self.failures, self.usable = dies, failures, 1 << 30
        self.reactor = Reactor("test-mover")
        spawn, limit = lambda *given: self.spawn(*given), lambda: self.usable
        context = TierContext(0, 1 << 20, self.reactor, spawn=spawn, limit=limit)
        self.tier_process = TierProcess("disk", {"path": "/x", "size": 1 << 20}, context, self, open_seconds)
        self.process_message = self.process_up = self.process_down = self.told.append

    def spawn(self, kind, sock, pool_fd, pool_bytes):
        assert (kind, pool_bytes) == ("disk", 1 << 20)
        if self.failures:
            self.failures -= 1
            raise OSError(12, "Cannot allocate memory")
        self.children.append(FakeChild(sock, self.dies))
        return self.children[-1]

    def on(self, call):
        """Its result, from the reactor's thread."""
        done, result = threading.Event(), []
        self.reactor.call_soon(lambda: (result.append(call()), done.set()))
        assert done.wait(5)
        return result[0]

    def up(self) -> FakeChild:
        self.on(self.tier_process.start)
        child = eventually(lambda: self.children and self.children[-1])
        opening = child.hear()
        assert isinstance(opening, m.Open) and opening.options["path"] == "/x" and opening.pool_bytes == 1 << 20
        assert opening.version == __version__
        child.say(m.Kept([]), m.Opened(True))
        eventually(lambda: self.tier_process.state == READY)
        return child

    def read(self, seconds=30.0, blocks=1):
        """Asks; returns where the reply will appear."""
        replies = []

        def ask():
            moves = [m.Move(NAMESPACE_ID, 0, HASH_BYTES, ZERO, b"", 7 + i, 1, 9) for i in range(blocks)]
            self.tier_process.request(m.Read(self.tier_process.next_id(), 0, moves), seconds, replies.append)

        self.on(ask)
        return replies


@contextmanager
def bench(**options):
    made = Bench(**options)
    made.reactor.start()
    try:
        yield made
        assert made.on(lambda: made.tier_process.stop(0.02)) is None
    finally:
        made.reactor.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    seconds = {"BACKOFF_SECONDS": (0.02, 0.1), "GRACE_SECONDS": 0.05, "STOP_SECONDS": 0.2, "STUCK_SECONDS": 0.1}
    for name, value in seconds.items():
        monkeypatch.setattr(f"vllm_kvtier.store.tiers.process.tier_process.{name}", value)


def test_tier_process_requests_are_answered():
    with bench() as b:
        child = b.up()
        assert [type(t) for t in b.told] == [m.Kept, m.Opened]
        replies = b.read(blocks=2)
        asked = child.hear()
        assert [move.slot for move in asked.moves] == [7, 8] and not replies
        child.say(m.Moved(asked.id, [True, False], "a bad sector"))
        eventually(lambda: replies)
        assert replies[0].good == [True, False]
        assert b.on(lambda: b.tier_process.send(m.Drop([3])))
        assert child.hear().gone == [3]
        child.say(m.Left(5))
        eventually(lambda: b.told[-1] == m.Left(5))
    assert b.tier_process.state == STOPPED and b.told[-1] == "the store ends" and child.killed


def test_tier_process_not_running_answers_at_once():
    with bench() as b:
        assert b.read() == [None]
        assert b.on(lambda: b.tier_process.send(m.Drop([3]))) is False


def test_tier_process_late_is_killed_and_answers_after_exit():
    with bench(dies=False) as b:
        child = b.up()
        replies = b.read(seconds=0.05)
        eventually(lambda: child.killed)
        assert b.tier_process.state == BACKOFF and "has not answered a read of 1 blocks" in b.tier_process.reason
        assert b.told[-1] == b.tier_process.reason and b.tier_process.timeouts == 1
        time.sleep(0.1)  # the device holds it: its I/O may still write to the slot
        assert not replies and len(b.children) == 1
        child.end(-9)
        eventually(lambda: replies)
        assert replies == [None]
        eventually(lambda: len(b.children) == 2)
        b.children[-1].dies = True


@pytest.mark.parametrize(
    "lie",
    [
        m.Moved(12345, [True]),
        m.Moved(1, [True, True]),
        m.Located(1, 1, 1),
        m.Opened(True),
        m.Refused("no such directory"),
    ],
)
def test_tier_process_wrong_answer_makes_tier_unavailable(lie):
    with bench() as b:
        child = b.up()
        replies = b.read()
        child.hear()
        child.say(lie)
        eventually(lambda: b.tier_process.restarts == 1)
        assert replies == [None] and child.killed
        eventually(lambda: len(b.children) == 2)


def test_tier_process_malformed_message_or_callback_error_restarts_it():
    with bench() as b:
        child = b.up()
        write_frame(child.sock, b"\xc1garbage")
        eventually(lambda: len(b.children) == 2)
        assert child.killed
        b.process_message = lambda message: 1 / 0
        again = b.children[-1]
        again.hear()
        again.say(m.Opened(True), m.Left(5))
        eventually(lambda: len(b.children) == 3)
        assert "could not be handled: ZeroDivisionError" in b.told[-1]


def test_tier_process_crash_is_reported_with_last_log_lines(caplog):
    with bench() as b:
        child = b.up()
        replies = b.read()
        child.end(1, "the disk is on fire")
        eventually(lambda: replies)
        assert replies == [None]
        for _ in range(3):  # and its successors
            n = len(b.children)
            eventually(lambda n=n: len(b.children) > n)
            b.children[-1].end(1, "the disk is on fire")
        eventually(lambda: b.tier_process.restarts >= 4)
    logged = [r.message for r in caplog.records if "unavailable" in r.message]
    assert logged == [
        "kvtier: disk tier: unavailable (its process ended (exit status 1): the disk is on fire); "
        "it is started again later"
    ]


def test_tier_process_failed_start_is_retried(caplog):
    caplog.set_level("INFO")
    with bench(failures=1) as b:
        b.on(b.tier_process.start)
        assert b.tier_process.state == BACKOFF and "Cannot allocate memory" in b.tier_process.reason
        child = eventually(lambda: b.children and b.children[-1])
        assert b.tier_process.state == OPENING
        child.say(m.Refused("another store uses this directory"))
        child.end(1)
        eventually(lambda: len(b.children) == 2)
        assert b.told[-1] == "another store uses this directory"
        b.children[-1].say(m.Opened(False, "read only"))
        eventually(lambda: b.tier_process.state == READY)
        assert b.told[-1] == m.Opened(False, "read only")
    messages = [record.message for record in caplog.records]
    assert "kvtier: disk tier: available again" in messages and "kvtier: disk tier: read only" in messages


def test_tier_process_start_without_descriptors_is_retried(monkeypatch):
    """A store whose descriptors are all in use for a moment must not lose its tiers for good."""
    make, left = socket.socketpair, [2]

    def socketpair(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(24, "Too many open files")
        return make(*args)

    with bench() as b:
        monkeypatch.setattr("vllm_kvtier.store.tiers.process.tier_process.socket.socketpair", socketpair)
        b.on(b.tier_process.start)
        child = eventually(lambda: b.children and b.children[-1])
        child.say(m.Opened(True))
        eventually(lambda: b.tier_process.state == READY)
        assert b.reactor.errors == 0 and b.tier_process.restarts == 2


def test_tier_process_open_timeout_is_extended_by_each_message():
    with bench(open_seconds=0.15) as b:
        b.on(b.tier_process.start)
        child = eventually(lambda: b.children and b.children[-1])
        for _ in range(4):
            time.sleep(0.08)
            child.say(m.Kept([]))
        assert not child.killed
        eventually(lambda: child.killed)
        assert b.told[-1] == "opening it took more than 0.15 s"


def test_tier_process_backoff_grows_and_resets(monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.tiers.process.tier_process.BACKOFF_SECONDS", (0.02, 0.16))
    with bench() as b:
        b.on(b.tier_process.start)
        for n in range(1, 5):
            eventually(lambda n=n: len(b.children) == n)
            b.children[-1].end(1)
        eventually(lambda: len(b.children) == 5)  # counted as a restart before it is there
        assert b.tier_process.restarts == 4 and b.tier_process._backoff == 0.16
        delays, call_later = [], b.reactor.call_later
        record = lambda delay, call: delays.append(delay) or call_later(delay, call)  # noqa: E731
        monkeypatch.setattr(b.reactor, "call_later", record)
        b.children[-1].say(m.Opened(True))
        eventually(lambda: b.tier_process._backoff == 0.02)
        assert delays == [0.16, 0.08, 0.04], "halved each time that it has worked for so long"


def test_tier_process_knows_how_much_of_the_pool_is_committed():
    """Its server may have to serve with less than it was to have."""
    with bench() as b:
        child = b.up()
        b.on(b.tier_process.limit_pool)
        b.usable = 1 << 16
        b.on(b.tier_process.limit_pool), b.on(b.tier_process.limit_pool)
        assert child.hear() == m.PoolLimit(1 << 16)
        child.end(1)
        again = eventually(lambda: len(b.children) == 2 and b.children[-1])
        assert again.hear().pool_bytes == 1 << 16
        b.usable = 1 << 12  # while it is opened
        again.say(m.Opened(True))
        assert again.hear() == m.PoolLimit(1 << 12)


def test_tier_process_stop_of_unkillable_child_returns(caplog):
    with bench(dies=False) as b:
        child = b.up()
        replies = b.read()
        b.on(b.tier_process.stop)
        assert replies == [None] and child.killed and b.tier_process.state == STOPPED
        assert "is left behind" in caplog.text


PROGRAM = """
import socket, sys, time
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.stream import read_frame, write_frame
sock = socket.socket(fileno=int(sys.argv[1]))
read_frame(sock, time.monotonic() + 20, [])
write_frame(sock, m.encode(m.Opened(True, "hello")))
print("a word on stderr", file=sys.stderr, flush=True)
while True:
    message = m.decode_to_tier_process(read_frame(sock, time.monotonic() + 60, []))
    if isinstance(message, m.Read):
        write_frame(sock, m.encode(m.Moved(message.id, [True] * len(message.moves))))
"""


def no_descriptors(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")  # Linux before 5.3, gVisor


@pytest.mark.parametrize("descriptors", [True, False])
def test_tier_process_real_child_is_restarted_and_stopped(caplog, monkeypatch, descriptors):
    if not descriptors:
        monkeypatch.setattr(linux, "pidfd_open", no_descriptors)

    def start(kind, sock, pool_fd, pool_bytes):
        return spawn([sys.executable, "-c", PROGRAM, str(sock.fileno())], (sock.fileno(),))

    with bench() as b:
        b.spawn = start
        b.on(b.tier_process.start)
        eventually(lambda: b.tier_process.state == READY, 30)
        first = b.tier_process._child.pid
        eventually(lambda: "a word on stderr" in caplog.text)
        replies = b.read()
        eventually(lambda: replies)
        assert replies[0].good == [True]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: b.tier_process.restarts == 1)
        eventually(lambda: "signal 9" in caplog.text)
        eventually(lambda: b.tier_process.state == READY, 30)
        second = b.tier_process._child.pid
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


@pytest.mark.parametrize("descriptors", [True, False])
def test_child_that_is_killed_ends_once(monkeypatch, descriptors):
    if not descriptors:
        monkeypatch.setattr(linux, "pidfd_open", no_descriptors)
        monkeypatch.setattr(linux, "pidfd_send_signal", no_descriptors)
    child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], ())
    poller = select.poll()
    poller.register(child.ended, select.POLLIN)
    assert not poller.poll(0) and child.reap() is None
    child.kill()
    assert poller.poll(10_000) and child.reap() == -signal.SIGKILL
    child.kill()
    assert child.reap() == -signal.SIGKILL
    child.close()
    eventually(lambda: not [each for each in threading.enumerate() if each.name == f"kvtier-child-{child.pid}"])


def test_tier_process_is_tried_again_where_no_thread_can_watch_its_child(monkeypatch):
    """It stayed OPENING for good, and each attempt left a pipe open."""

    def no_threads(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(linux, "pidfd_open", no_descriptors)
    with bench() as b, monkeypatch.context() as patch:
        patch.setattr(child_module.threading.Thread, "start", no_threads)
        before = descriptors()
        with pytest.raises(OSError, match="new thread"):
            child_module._end_of(os.getpid())
        assert descriptors() <= before
        b.spawn = lambda kind, sock, pool_fd, pool_bytes: spawn([sys.executable, "-c", ""], ())
        b.on(b.tier_process.start)
        eventually(lambda: b.tier_process.state == BACKOFF)


def test_child_that_nothing_can_watch_is_not_left_behind(monkeypatch):
    made = []
    monkeypatch.setattr(child_module, "_end_of", no_descriptors)  # as where there are too many open files
    monkeypatch.setattr(child_module, "Child", lambda process: made.append(process) or Child(process))
    with pytest.raises(OSError, match="not implemented"):
        spawn([sys.executable, "-c", "import time; time.sleep(600)"], ())
    assert made[0].wait(10) == -signal.SIGKILL

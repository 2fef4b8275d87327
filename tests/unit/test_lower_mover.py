"""The server's end of a mover: what it answers, when, and what becomes of one that fails."""

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from support import eventually

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.child import spawn
from vllm_kvtier.store.lower.mover import OPENING, READY, SET_ASIDE, STOPPED, Mover
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame, write_frame

SPACE, HASH, ZERO = b"s" * 16, b"h" * 16, bytes(16)


class FakeChild:
    """A process of the test's own making: it has a socket, it can be killed, and it ends when the test says so."""

    def __init__(self, sock: socket.socket, dies: bool):
        self.sock, self.dies = sock.dup(), dies
        self.pid, self.killed, self.silent, self.last_words = 4711, 0, False, ""
        self.ended, self._end = os.pipe()
        self.stderr, self._say = os.pipe()
        os.set_blocking(self.stderr, False)
        self._status: int | None = None
        self.lines: list[str] = []

    # what the mover calls

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
            self.last_words = lines[-1]
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
        return m.decode_to_mover(read_frame(self.sock, time.monotonic() + 5, []))


class Bench:
    """A Mover on a real reactor, with children of the test's own making. ``told``: what it called back."""

    def __init__(self, dies=True, open_seconds=30.0, failures=0):
        self.children: list[FakeChild] = []
        self.told: list = []
        self.dies, self.failures = dies, failures
        self.reactor = Reactor("test-mover")
        self.mover = Mover(
            "disk",
            {"path": "/x", "size": 1 << 20},
            0,
            1 << 20,
            self.reactor,
            lambda message: self.told.append(message),
            lambda opened: self.told.append(opened),
            lambda reason: self.told.append(reason),
            self.spawn,
            open_seconds=open_seconds,
        )

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
        self.on(self.mover.start)
        child = eventually(lambda: self.children and self.children[-1])
        opening = child.hear()
        assert isinstance(opening, m.Open) and opening.options["path"] == "/x" and opening.pool_bytes == 1 << 20
        child.say(m.Kept([]), m.Opened(True))
        eventually(lambda: self.mover.state == READY)
        return child

    def read(self, seconds=30.0, blocks=1):
        """Asks; returns where the reply will appear."""
        replies = []

        def ask():
            moves = [m.Move(SPACE, 0, HASH, ZERO, b"", 7 + i, 1, 9) for i in range(blocks)]
            self.mover.request(m.Read(self.mover.next_id(), 0, moves), seconds, replies.append)

        self.on(ask)
        return replies


@contextmanager
def bench(**options):
    made = Bench(**options)
    made.reactor.start()
    try:
        yield made
        assert made.on(lambda: made.mover.stop(0.02)) is None
    finally:
        made.reactor.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    for name, value in (("PAUSES", (0.02, 0.1)), ("GRACE", 0.05), ("STOP_SECONDS", 0.2), ("STUCK_SECONDS", 0.1)):
        monkeypatch.setattr(f"vllm_kvtier.store.lower.mover.{name}", value)


def test_asks_and_hears():
    with bench() as b:
        child = b.up()
        assert [type(t) for t in b.told] == [m.Kept, m.Opened]
        replies = b.read(blocks=2)
        asked = child.hear()
        assert [move.slot for move in asked.moves] == [7, 8] and not replies
        child.say(m.Moved(asked.id, [True, False], "a bad sector"))
        eventually(lambda: replies)
        assert replies[0].good == [True, False]
        assert b.on(lambda: b.mover.send(m.Drop([3])))
        assert child.hear().gone == [3]
        child.say(m.Left(5))
        eventually(lambda: b.told[-1] == m.Left(5))
    assert b.mover.state == STOPPED and b.told[-1] == "the store ends" and child.killed


def test_not_up_answers_at_once():
    with bench() as b:
        assert b.read() == [None]
        assert b.on(lambda: b.mover.send(m.Drop([3]))) is False


def test_a_late_one_is_killed_and_answers_come_when_it_is_reaped():
    with bench(dies=False) as b:
        child = b.up()
        replies = b.read(seconds=0.05)
        eventually(lambda: child.killed)
        assert b.mover.state == SET_ASIDE and "has not answered a read of 1 blocks" in b.mover.reason
        assert b.told[-1] == b.mover.reason and b.mover.timeouts == 1
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
def test_a_liar_is_set_aside(lie):
    with bench() as b:
        child = b.up()
        replies = b.read()
        child.hear()
        child.say(lie)
        eventually(lambda: b.mover.restarts == 1)
        assert replies == [None] and child.killed
        eventually(lambda: len(b.children) == 2)


def test_garbage_and_a_fault_of_the_callback():
    with bench() as b:
        child = b.up()
        write_frame(child.sock, b"\xc1garbage")
        eventually(lambda: len(b.children) == 2)
        assert child.killed
        b.mover._on_message = lambda message: 1 / 0
        again = b.children[-1]
        again.hear()
        again.say(m.Opened(True), m.Left(5))
        eventually(lambda: len(b.children) == 3)
        assert "could not be handled: ZeroDivisionError" in b.told[-1]


def test_a_crash_is_told_with_its_last_words(caplog):
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
        eventually(lambda: b.mover.restarts >= 4)
    said = [r.message for r in caplog.records if "set aside" in r.message]
    assert said == [
        "kvtier: the disk tier is set aside, and tried again later: its process ended (exit status 1): "
        "the disk is on fire"
    ]


def test_refused_while_opening_and_back_later(caplog):
    caplog.set_level("INFO")
    with bench(failures=1) as b:
        b.on(b.mover.start)
        assert b.mover.state == SET_ASIDE and "Cannot allocate memory" in b.mover.reason
        child = eventually(lambda: b.children and b.children[-1])
        assert b.mover.state == OPENING
        child.say(m.Refused("another store uses this directory"))
        child.end(1)
        eventually(lambda: len(b.children) == 2)
        assert b.told[-1] == "another store uses this directory"
        b.children[-1].say(m.Opened(False, "read only"))
        eventually(lambda: b.mover.state == READY)
        assert b.told[-1] == m.Opened(False, "read only")
    messages = [record.message for record in caplog.records]
    assert "kvtier: the disk tier is back" in messages and "kvtier: the disk tier: read only" in messages


def test_opening_too_long_but_each_word_counts():
    with bench(open_seconds=0.15) as b:
        b.on(b.mover.start)
        child = eventually(lambda: b.children and b.children[-1])
        for _ in range(4):
            time.sleep(0.08)
            child.say(m.Kept([]))
        assert not child.killed
        eventually(lambda: child.killed)
        assert b.told[-1] == "opening it took more than 0.15 s"


def test_pauses_grow_and_shrink(monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.lower.mover.PAUSES", (0.02, 0.16))
    with bench() as b:
        b.on(b.mover.start)
        for n in range(1, 5):
            eventually(lambda n=n: len(b.children) == n)
            b.children[-1].end(1)
        eventually(lambda: b.mover.restarts == 4)
        assert b.mover._pause == 0.16
        child = b.children[-1]
        child.say(m.Opened(True))
        eventually(lambda: b.mover._pause == 0.02)


def test_stop_with_one_that_never_ends(caplog):
    with bench(dies=False) as b:
        child = b.up()
        replies = b.read()
        b.on(b.mover.stop)
        assert replies == [None] and child.killed and b.mover.state == STOPPED
        assert "is left to itself" in caplog.text


PROGRAM = """
import socket, sys, time
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.wire.stream import read_frame, write_frame
sock = socket.socket(fileno=int(sys.argv[1]))
read_frame(sock, time.monotonic() + 20, [])
write_frame(sock, m.encode(m.Opened(True, "hello")))
print("a word on stderr", file=sys.stderr, flush=True)
while True:
    message = m.decode_to_mover(read_frame(sock, time.monotonic() + 60, []))
    if isinstance(message, m.Read):
        write_frame(sock, m.encode(m.Moved(message.id, [True] * len(message.moves))))
"""


def test_a_real_process(caplog):
    def start(kind, sock, pool_fd, pool_bytes):
        return spawn([sys.executable, "-c", PROGRAM, str(sock.fileno())], (sock.fileno(),))

    with bench() as b:
        b.mover._spawn = start
        b.on(b.mover.start)
        eventually(lambda: b.mover.state == READY, 30)
        first = b.mover._child.pid
        eventually(lambda: "a word on stderr" in caplog.text)
        replies = b.read()
        eventually(lambda: replies)
        assert replies[0].good == [True]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: b.mover.restarts == 1)
        assert "signal 9" in caplog.text
        eventually(lambda: b.mover.state == READY, 30)
        second = b.mover._child.pid
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)

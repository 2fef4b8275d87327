"""``python -m vllm_kvtier.store.lower.runner``: a mover, the process that moves one tier's bytes.

The server starts it with one end of a socketpair and the pool's memfd, says Open, and hears Opened or Refused. What
the process does with the messages (``moving``) is its kind's: a class named in ``KINDS``, imported only where it is
used, so that a disk's mover never loads what an object store needs.

It keeps nothing for the server: it ends when the socket ends, however that happens, and a fault in handling a
message ends it too, for the server to start a new one. Until it is reaped, I/O that it began may still write to slots.
"""

import argparse
import ctypes
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import LIMIT, get_logger
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream

logger = get_logger(__name__)

KINDS = {
    "disk": "vllm_kvtier.store.lower.disk.mover:DiskMover",
    "object": "vllm_kvtier.store.lower.objects.mover:ObjectMover",
    "nodes": "vllm_kvtier.store.lower.nodes.mover:NodeMover",
}
BACKLOG = 256 << 20  # bytes waiting for the server: all that was kept of a large disk, while it is busy
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SENTENCE = 4096  # characters of moving's Sentence


class Backend(Protocol):
    """What a kind is. Made with (host, options of Open); all of it is called on the reactor's thread."""

    def open(self) -> m.Opened:
        """May take a while, and ``host.send`` before it returns. Raises KVTierError: Refused, and the process ends."""

    def handle(self, message: m.ToMover) -> None:
        """Any message but Open. Does not block: I/O goes on in the background, or on a thread. Whatever it raises
        ends the process."""

    def close(self) -> None:
        """The process ends right after. Also called where ``open`` refused."""


class Pool:
    """The pool's memory, mapped. ``address``: of its first byte; ``view``: uint8[nbytes].

    Memory beyond what the server names in messages may not exist yet: touching it would make it exist.
    """

    def __init__(self, fd: int, nbytes: int):
        if os.fstat(fd).st_size < nbytes:
            raise KVTierError(f"the store's memory is {os.fstat(fd).st_size} bytes, not {nbytes} as it says")
        self.fd, self.nbytes = fd, nbytes
        self._mapping = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._mapping)
        self.address = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(self._mapping))


class Host:
    """What a backend has around it: the ``reactor``, the ``pool``, and the server to ``send`` to."""

    def __init__(self, pool: Pool, sock: socket.socket, make: Callable[["Host", dict], Backend]):
        self.pool, self._make = pool, make
        self.reactor = Reactor("kvtier-mover")
        self._backend: Backend | None = None
        self._over = threading.Event()
        self._failed = ""
        self._stream = Stream(
            self.reactor, sock, self._on_frame, self._on_close, max_frame=m.MAX_FRAME, backlog=BACKLOG
        )

    # -- any thread ---------------------------------------------------------------------------------------------

    def send(self, message: m.ToServer) -> None:
        """To the server, now or as soon as it reads. Where it is gone, this process is about to end."""
        self._stream.send(m.encode(message))

    def fail(self, reason: str) -> None:
        """Nothing sensible can be done any more, or what was begun can only be stopped by ending: the process ends,
        with this reason on stderr, and the server starts another."""
        self._failed = self._failed or reason
        self.reactor.call_soon(lambda: self._stream.close(reason))

    def guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """``callback`` for a timer, ``call_soon`` or a thread, such that a fault in it ends the process. (The reactor
        alone would drop the event and go on, and the server would wait for an answer in vain.)"""

        def guarded(*arguments: object) -> None:
            try:
                callback(*arguments)
            except Exception as error:
                logger.exception("kvtier: fault in a mover")
                self.fail(f"{type(error).__name__}: {error}")

        return guarded

    # -- the main thread ----------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Until the socket ends; "" or why this was a failure."""
        self.reactor.start()
        self._over.wait()
        self.reactor.stop()
        return self._failed

    # -- the reactor's thread -----------------------------------------------------------------------------------

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = m.decode_to_mover(frame)
            if self._backend is not None:
                self._backend.handle(message)
            elif isinstance(message, m.Open):
                self._open(message)
            else:
                raise KVTierError(f"{type(message).__name__} before Open")
        except Exception as error:
            self._failed = self._failed or f"{type(error).__name__}: {error}"
            raise

    def _open(self, message: m.Open) -> None:
        if message.pool_bytes != self.pool.nbytes:
            raise KVTierError(f"a pool of {self.pool.nbytes} bytes is mapped, and {message.pool_bytes} are spoken of")
        try:
            self._backend = self._make(self, message.options)
            opened = self._backend.open()
        except KVTierError as error:
            self.send(m.Refused(str(error)[:MAX_SENTENCE]))
            self.fail(str(error))
        else:
            self.send(opened)

    def _on_close(self, reason: str) -> None:
        logger.debug("kvtier: the mover ends: %s", reason)
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            self._over.set()


def backend_class(kind: str) -> Callable[[Host, dict], Backend]:
    """Imports it. Raises KVTierError where something that it needs is missing."""
    module, name = KINDS[kind].split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise KVTierError(f"the {kind} tier cannot be loaded: {error}") from error


def run(kind: str, sock: socket.socket, pool_fd: int, nbytes: int) -> str:
    """Serve as the mover of that kind until ``sock`` ends; "" or why it failed."""

    def make(host: Host, options: dict) -> Backend:
        return backend_class(kind)(host, options)

    return Host(Pool(pool_fd, nbytes), sock, make).serve()


def _die_with_parent() -> None:
    """SIGKILL when the thread that started us ends: the server's reactor, which lives as long as it serves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_kvtier.store.lower.runner")
    parser.add_argument("--kind", choices=sorted(KINDS), required=True)
    parser.add_argument("--socket", type=int, required=True, metavar="FD")
    parser.add_argument("--pool", type=int, required=True, metavar="FD")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    arguments = parser.parse_args()
    handler = logging.StreamHandler()
    handler.addFilter(LIMIT)
    logging.basicConfig(
        level=arguments.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {arguments.kind} mover: %(message)s",
        handlers=[handler],
    )
    # Ctrl-C in a terminal is for the server, which ends us by closing the socket when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (arguments.socket, arguments.pool):
        os.set_inheritable(fd, False)
    # A process that hangs, or was stopped, does not hear that its socket has ended: it would keep the tier's lock.
    _die_with_parent()
    try:
        failed = run(arguments.kind, socket.socket(fileno=arguments.socket), arguments.pool, arguments.bytes)
    except (KVTierError, OSError, msgspec.MsgspecError) as error:
        failed = str(error)
    if failed:
        logger.error("kvtier: %s", failed)
    # No interpreter's end: it would wait for threads that a device may hold forever, and free what I/O still uses.
    sys.stderr.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()

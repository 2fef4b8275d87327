"""``python -m vllm_kvtier.store.tiers.process.main``: a tier process, which moves the bytes of one tier.

The server starts it with one end of a socketpair and the pool's memfd, sends Open, and receives Opened or Refused. A
backend, named in ``KINDS``, handles the messages (``store.tiers.process.protocol``). It is imported on use, so that a
disk's process never loads the libraries of an object store.

The process ends when the socket closes, and on an error in a handler; the server then starts another. Until it is
reaped, its I/O may still write to slots.
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

from vllm_kvtier import __version__
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import LIMIT, get_logger
from vllm_kvtier.store.linux import leave_out_of_dumps
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream, StreamLimits

logger = get_logger(__name__)

KINDS = {
    "disk": "vllm_kvtier.store.tiers.disk.process:DiskProcess",
    "object": "vllm_kvtier.store.tiers.objects.process:ObjectProcess",
    "nodes": "vllm_kvtier.store.tiers.nodes.process:NodeProcess",
    "mooncake": "vllm_kvtier.store.tiers.mooncake.reader:MooncakeReader",
    "mooncake_segment": "vllm_kvtier.store.tiers.mooncake.segment:MooncakeSegment",
}
MAX_UNSENT_BYTES = 256 << 20  # unsent bytes, of a server that does not read
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SENTENCE = 4096  # characters of protocol.Sentence


class Backend(Protocol):
    """The tier's part. Constructed with (host, options of Open); all calls are on the reactor's thread."""

    def open(self) -> m.Opened:
        """Open the tier; may block, and may ``host.send`` before it returns. Raises KVTierError: Refused is sent, and
        the process ends."""

    def handle(self, message: m.ToTierProcess) -> None:
        """Handle any message but Open, without blocking. An exception ends the process."""

    def close(self) -> None:
        """Called before the process ends, also after ``open`` failed."""


class Pool:
    """The pool's memory, mapped. ``address``: of its first byte; ``view``: uint8[bytes of the mapping]. ``nbytes``: of
    it that may be used; less than those of the mapping if the server could not commit all.

    Only memory that the server names in messages may be touched: touching other pages would allocate them.
    """

    def __init__(self, fd: int, nbytes: int):
        if os.fstat(fd).st_size < nbytes:
            raise KVTierError(f"the store's memory file has {os.fstat(fd).st_size} bytes, not {nbytes}")
        self.fd, self.nbytes = fd, nbytes
        self._mapping = mmap.mmap(fd, nbytes)
        self.view = memoryview(self._mapping)
        self.address = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(self._mapping))
        leave_out_of_dumps(self.address, nbytes)


class TierProcessMain:
    """The environment of a backend: the ``reactor``, the ``pool``, and ``send`` to the server."""

    def __init__(self, pool: Pool, sock: socket.socket, make: Callable[["TierProcessMain", m.Options], Backend]):
        self.pool, self._make = pool, make
        self.reactor = Reactor("kvtier-tier")
        self._backend: Backend | None = None
        self._over = threading.Event()
        self._failed = ""
        self._stream = Stream(
            self.reactor, sock, self._on_frame, self._on_close, StreamLimits(m.MAX_FRAME, MAX_UNSENT_BYTES)
        )

    # -- any thread ---------------------------------------------------------------------------------------------

    def send(self, message: m.ToServer) -> None:
        """Send to the server, now or as soon as it reads. Ignored if the server is gone: this process is ending."""
        self._stream.send(m.encode(message))

    def fail(self, reason: str) -> None:
        """End the process with this reason on stderr; the server starts another. For errors without recovery, and for
        I/O that only the end of the process stops."""
        self._failed = self._failed or reason
        self.reactor.call_soon(lambda: self._stream.close(reason))

    def guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback of a timer, ``call_soon`` or a thread so that an exception ends the process. The reactor
        alone would drop the event, and the server would wait for an answer until its deadline."""

        def guarded(*arguments: object) -> None:
            try:
                callback(*arguments)
            except Exception as error:
                logger.exception("kvtier: tier process: unexpected error; the process ends")
                self.fail(f"{type(error).__name__}: {error}")

        return guarded

    # -- the main thread ----------------------------------------------------------------------------------------

    def serve(self) -> str:
        """Run until the socket closes. Returns the error, or ""."""
        self.reactor.start()
        self._over.wait()
        self.reactor.stop()
        return self._failed

    # -- the reactor's thread -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until the server has read all that was sent: between the messages of an ``open`` that sends many."""
        self._stream.flush()

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = m.decode_to_tier_process(frame)
            if isinstance(message, m.PoolLimit):
                self._limit_pool(message.pool_bytes)
            elif self._backend is not None:
                self._backend.handle(message)
            elif isinstance(message, m.Open):
                self._open(message)
            else:
                raise KVTierError(f"{type(message).__name__} before Open")
        except Exception as error:
            self._failed = self._failed or f"{type(error).__name__}: {error}"
            raise

    def _limit_pool(self, nbytes: int) -> None:
        if nbytes > self.pool.nbytes:
            raise KVTierError(f"the mapped pool has {self.pool.nbytes} bytes, not {nbytes} as the server says")
        self.pool.nbytes = nbytes

    def _open(self, message: m.Open) -> None:
        self._limit_pool(message.pool_bytes)
        try:
            if message.version != __version__:
                raise KVTierError(
                    f"the running store is vllm-kvtier {message.version or 'of another version'}, the installed "
                    f"package is {__version__}; stop the store (pid {os.getppid()}), and the next engine starts it anew"
                )
            self._backend = self._make(self, message.options)
            opened = self._backend.open()
        except KVTierError as error:
            self.send(m.Refused(str(error)[:MAX_SENTENCE]))
            self.fail(str(error))
        else:
            self.send(opened)

    def _on_close(self, reason: str) -> None:
        logger.debug("kvtier: tier process: ends (%s)", reason)
        try:
            if self._backend is not None:
                self._backend.close()
        finally:
            self._over.set()


def backend_class(kind: str) -> Callable[[TierProcessMain, m.Options], Backend]:
    """Import the backend. Raises KVTierError if one of its libraries is missing."""
    module, name = KINDS[kind].split(":")
    try:
        backend: Callable[[TierProcessMain, m.Options], Backend] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise KVTierError(f"the {kind} tier cannot be loaded: {error}") from error
    return backend


def run(kind: str, sock: socket.socket, pool_fd: int, nbytes: int) -> str:
    """Serve a tier until ``sock`` closes. Returns the error, or ""."""

    pool = Pool(pool_fd, nbytes)
    return TierProcessMain(pool, sock, lambda host, options: backend_class(kind)(host, options)).serve()


def _die_with_parent() -> None:
    """Ask for SIGKILL at the end of the thread that started this process: the server's reactor."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_kvtier.store.tiers.process.main")
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
        # Without the time, which the server logs: equal reasons are logged once.
        format=f"%(levelname)s {arguments.kind} tier process: %(message)s",
        handlers=[handler],
    )
    # Ctrl-C in a terminal is for the server, which closes the socket when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (arguments.socket, arguments.pool):
        os.set_inheritable(fd, False)
    # A hanging or stopped process would not notice that its socket has closed, and would keep the tier's lock.
    _die_with_parent()
    try:
        failed = run(arguments.kind, socket.socket(fileno=arguments.socket), arguments.pool, arguments.bytes)
    except (KVTierError, OSError, msgspec.MsgspecError) as error:
        failed = str(error)
    if failed:
        logger.error("kvtier: %s", failed)
    # Skip the interpreter's shutdown: it would wait for threads that a device may block forever, and free memory that
    # I/O still uses.
    sys.stderr.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()

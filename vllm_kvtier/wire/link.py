"""The link between an engine's scheduler side and its workers: a Unix socket that only this user can open.

It carries events that happen between steps or while the engine sleeps, when vLLM's own channels are silent: a worker is
ready, checksums are computed, peers are reading. Both sides derive the path from the engine's identity. The socket's
directory has mode 0700.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor, drain

MAX_SOCKET_PATH = 107
_PRESENT = b""  # the first message of each side


def link_path(engine_id: str, instance_id: str) -> str:
    """Raises KVTierError if other users can access the directory."""
    return private_path(f"{engine_id}|{instance_id}")


def private_path(identity: str, suffix: str = ".sock") -> str:
    """Path of a socket that only this user can open. Raises KVTierError if other users can access the directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # Containers often name a runtime directory that does not exist.
    folder = Path(runtime if os.path.isdir(runtime) else tempfile.gettempdir()) / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise KVTierError(f"{folder} must be a directory of mode 0700 owned by this user; remove it or fix it")
    # A Unix socket path is short: the identity is hashed.
    path = str(folder / f"{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}{suffix}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise KVTierError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket path; set XDG_RUNTIME_DIR to a "
            "shorter directory"
        )
    return path


def _unbounded(socket: zmq.Socket[bytes]) -> None:
    """Remove ZMQ's limit of 1000 queued messages: a dropped message would leave its receiver waiting. The jobs in
    flight bound the queue."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class LinkServer:
    """The scheduler side: receives from every worker, sends to all of them."""

    def __init__(self, reactor: Reactor, path: str, on_message: Callable[[m.LinkMessage], None]):
        self._on_message = on_message
        self._workers: set[bytes] = set()
        Path(path).unlink(missing_ok=True)
        self._socket = reactor.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        _unbounded(self._socket)
        self._socket.bind(f"ipc://{path}")
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))
        reactor.on_stop(lambda: Path(path).unlink(missing_ok=True))

    def send(self, message: msgspec.Struct) -> None:
        frame = m.encode(message)
        for worker in self._workers:
            self._socket.send_multipart([worker, frame], zmq.NOBLOCK)

    def _receive(self, frames: list[bytes]) -> None:
        self._workers.add(frames[0])
        if frames[-1] == _PRESENT:
            self._socket.send_multipart([frames[0], _PRESENT], zmq.NOBLOCK)
            return
        self._on_message(m.decode_link(frames[-1]))


class LinkClient:
    """The worker side. Messages sent before the scheduler side listens are delivered once it does; ``on_met`` is
    called then."""

    def __init__(
        self,
        reactor: Reactor,
        path: str,
        on_message: Callable[[m.LinkMessage], None],
        on_met: Callable[[], object] = lambda: None,
    ):
        self._on_message, self._on_met = on_message, on_met
        self._socket = reactor.context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        _unbounded(self._socket)
        self._socket.connect(f"ipc://{path}")
        self._socket.send(_PRESENT)
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(m.encode(message))

    def _receive(self, frames: list[bytes]) -> None:
        if frames[-1] == _PRESENT:
            self._on_met()
            return
        self._on_message(m.decode_link(frames[-1]))

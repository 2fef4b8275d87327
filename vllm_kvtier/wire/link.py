"""The local link between an engine's scheduler half and its workers: a Unix socket only this user can open.

It carries what vLLM's step-bound channels cannot, because it happens between steps or while the engine sleeps:
a worker is ready, checksums are made, peers are reading. The path follows from the engine's identity, which
both sides know; it lives in a directory of mode 0700.
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
_PRESENT = b""  # what each end says first


def link_path(engine_id: str, instance_id: str) -> str:
    """Raises KVTierError if the directory is not ours alone."""
    return private_path(f"{engine_id}|{instance_id}")


def private_path(identity: str, suffix: str = ".sock") -> str:
    """Of a socket that only this user can open. Raises KVTierError if the directory is not ours alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # Containers often name a runtime directory that nobody made.
    folder = Path(runtime if os.path.isdir(runtime) else tempfile.gettempdir()) / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise KVTierError(f"{folder} must be a directory of mode 0700 owned by this user; remove it or fix it")
    # Short, because a Unix socket path holds little: the identity is hashed.
    path = str(folder / f"{hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()}{suffix}")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise KVTierError(
            f"{path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket path; set XDG_RUNTIME_DIR to a "
            "shorter directory"
        )
    return path


def _unbounded(socket: zmq.Socket) -> None:
    """No message may be dropped, as ZMQ does with those beyond a thousand: somebody waits for each. What is under way
    is bounded by what both ends have to do with each other."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class LinkServer:
    """The scheduler half's side: hears every worker, tells all of them."""

    def __init__(self, reactor: Reactor, path: str, on_message: Callable[[m.LinkMessage], None]):
        self._on_message = on_message
        self._workers: set[bytes] = set()
        self._path = path
        Path(path).unlink(missing_ok=True)
        self._socket = reactor.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        _unbounded(self._socket)
        self._socket.bind(f"ipc://{path}")
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))
        reactor.on_stop(lambda: Path(path).unlink(missing_ok=True))

    def tell(self, message: msgspec.Struct) -> None:
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
    """A worker's side; messages sent before the scheduler half listens are delivered when it does. ``on_met`` is
    called when it is there."""

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

    def tell(self, message: msgspec.Struct) -> None:
        self._socket.send(m.encode(message))

    def _receive(self, frames: list[bytes]) -> None:
        if frames[-1] == _PRESENT:
            self._on_met()
            return
        self._on_message(m.decode_link(frames[-1]))

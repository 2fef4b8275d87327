"""The pool's memory in a client's address space."""

import ctypes
import mmap
import os
import socket
import time

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.linux import leave_out_of_dumps
from vllm_kvtier.wire.stream import read_frame, write_frame


class PoolMapping:
    """The pool of one store instance, mapped shared and writable. The memory stays valid after the store's end.

    A worker gets one from its StoreClient (kind "worker"). ``on_change`` reports a new ``instance`` (then call
    ``client.open_pool()`` again) and more ``ready_pages``. Pages beyond the ready ones must not be touched: each costs
    a page fault and may find no memory (SIGBUS). No slot crosses a multiple of ``store.protocol.PIECE_BYTES``, so
    memory is best registered with a device in whole pieces.

    ``buffer``: uint8[nbytes]. ``address``: of its first byte. ``fd``: the memfd, owned by this object.
    Raises KVTierError if the memory cannot be mapped; ``fd`` is closed then.
    """

    def __init__(self, fd: int, nbytes: int, instance: str):
        self.fd, self.nbytes, self.instance = fd, nbytes, instance
        try:
            if os.fstat(fd).st_size < nbytes:
                raise KVTierError(f"the store's memory file has {os.fstat(fd).st_size} bytes, not {nbytes}")
            self._mapping: mmap.mmap | None = mmap.mmap(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise KVTierError(
                f"the store's pool of {nbytes} bytes cannot be mapped: {error.strerror}; check the limit on address "
                "space (ulimit -v)"
            ) from error
        except KVTierError:
            os.close(fd)
            raise
        self.buffer = memoryview(self._mapping)
        self.address = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(self._mapping))
        leave_out_of_dumps(self.address, nbytes)

    def close(self) -> None:
        """Idempotent. The memory is unmapped when the last view of ``buffer`` is gone."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        os.close(self.fd)
        self.buffer.release()
        try:
            mapping.close()
        except BufferError:
            return  # the last view unmaps it


def shake_hands(path: str, hello: m.Hello, timeout: float) -> tuple[m.Welcome, int]:
    """Connect, handshake and disconnect. Returns the store's Welcome and a descriptor of its memory, which the caller
    closes. Raises KVTierError if no store answers at ``path`` within ``timeout`` seconds, or if it refuses."""
    deadline = time.monotonic() + timeout
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.settimeout(timeout)
            sock.connect(path)
            write_frame(sock, m.encode(hello))
            answer = m.decode_reply(read_frame(sock, deadline, fds, m.MAX_FRAME))
        except (OSError, EOFError, msgspec.DecodeError) as error:
            for fd in fds:
                os.close(fd)
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise KVTierError(f"no node store answers at {path}: {reason}; `kvtier store` starts one") from error
    if isinstance(answer, m.Welcome) and answer.protocol == m.PROTOCOL and len(fds) == 1:
        return answer, fds[0]
    for fd in fds:
        os.close(fd)
    if isinstance(answer, m.Refused):
        raise KVTierError(f"the node store at {path} refused: {answer.reason}")
    raise KVTierError(f"the node store at {path} has another version; stop it, and the next engine starts a new one")

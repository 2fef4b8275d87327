"""Bounds on the bytes that the proxy holds for all requests together: of their bodies, and of engines' answers."""

from vllm_kvtier.errors import KVTierError

# Of each body and answer, not counted: a connection's own buffers are as large, and small requests are served while
# large ones use up the bound.
FREE_BYTES = 64 << 10


class BuffersFull(KVTierError):
    """The proxy holds as much as it may."""


class Buffers:
    """``held``: bytes that are counted; at most ``limit``."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0


class Held:
    """What one request holds of ``buffers``. Must be entered, or released (idempotent)."""

    def __init__(self, buffers: Buffers):
        self._buffers = buffers
        self._counted = 0

    def resize(self, nbytes: int) -> None:
        """It holds ``nbytes`` now. Raises BuffersFull, and then holds as much as before."""
        counted = max(0, nbytes - FREE_BYTES)
        held = self._buffers.held + counted - self._counted
        if counted > self._counted and held > self._buffers.limit:
            raise BuffersFull(f"the proxy holds {self._buffers.held} bytes, of at most {self._buffers.limit}")
        self._buffers.held, self._counted = held, counted

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

"""Bounds on the bytes that the proxy holds for all requests together: of their bodies, and of engines' answers."""

from collections import Counter

from vllm_kvtier.errors import KVTierError

# Of each body and answer, not counted: a connection's own buffers are as large, and small requests are served while
# large ones use up the bound.
FREE_BYTES = 64 << 10

# Of the bound, for all requests of one tenant together, so that others are served beside it.
TENANT_SHARE = 0.75


class BuffersFull(KVTierError):
    """The proxy holds as much as it may."""


class Buffers:
    """``held``: bytes that are counted; at most ``limit``. ``by_tenant``: those of requests with a tenant."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self.by_tenant: Counter[bytes] = Counter()


class Held:
    """What one request holds of ``buffers``. Must be entered, or released (idempotent). ``tenant``: set before that, if
    its share is to be bounded."""

    def __init__(self, buffers: Buffers):
        self.tenant: bytes | None = None
        self._buffers = buffers
        self._counted = 0

    def resize(self, nbytes: int) -> None:
        """It holds ``nbytes`` now. Raises BuffersFull, and then holds as much as before."""
        buffers, counted = self._buffers, max(0, nbytes - FREE_BYTES)
        held = buffers.held + counted - self._counted
        if counted > self._counted and held > buffers.limit:
            raise BuffersFull(f"the proxy holds {buffers.held} bytes, of at most {buffers.limit}")
        if self.tenant is not None:
            # One request of any size is served.
            others = buffers.by_tenant[self.tenant] - self._counted
            if counted > self._counted and others and others + counted > buffers.limit * TENANT_SHARE:
                raise BuffersFull(f"the proxy holds {others} bytes of other requests of this tenant")
            buffers.by_tenant[self.tenant] = others + counted
            if not others + counted:
                del buffers.by_tenant[self.tenant]
        buffers.held, self._counted = held, counted

    def release(self) -> None:
        self.resize(0)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

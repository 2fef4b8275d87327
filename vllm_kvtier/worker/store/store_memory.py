"""The node store's memory in a worker: mapped, registered with the copier piece by piece, and replaced with the store.

The worker's connection to the store tells which instance serves and how much of its memory is ready. One *backing* (a
mapping and its copier) is in use at a time. When another instance serves, ``current`` becomes None at once; copies on
the old backing end; then it is closed, and the new memory is mapped. While no store serves, the last backing stays for
a while, because pinning it again would take seconds. On the worker's reactor; closing takes seconds too, on a thread of
its own.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES
from vllm_kvtier.worker.copy.base import Copier

logger = get_logger(__name__)

# Registering a piece takes this thread some 20 ms (the driver pins its pages). While requests wait for loads, the next
# piece is tried again after RETRY_SECONDS, for at most MAX_DELAY: a busy engine must get its memory too.
RETRY_SECONDS = 0.01
MAX_DELAY = 0.1
# Seconds for which the memory stays pinned after the store disconnected.
GRACE_SECONDS = 5.0
# Until a mapping that failed because file descriptors or memory ran out is tried again.
REFUSED_SECONDS = 60.0
UNMAP_THREAD = "kvtier-unmap"


class Backing:
    """One instance's memory with its copier. ``users`` counts the copies under way; ``give`` it back when one ends."""

    def __init__(self, mapping: PoolMapping, copier: Copier, on_closed: Callable[[], None]):
        """``on_closed`` is called on any thread."""
        self.instance, self.copier = mapping.instance, copier
        self.registered = 0  # bytes from the start that copies may use
        self.limit = 0  # bytes from the start that the store has made ready
        self.nbytes = mapping.nbytes  # of the pool; less if the store ran out of memory
        self._mapping, self._on_closed = mapping, on_closed
        self.users = 0
        self._retired = False
        self._closing = threading.Lock()

    def give(self) -> None:
        self.users -= 1
        if self._retired and not self.users:
            self._close_aside()

    def retire(self) -> None:
        """Begin no new copies; close when the last copy has ended, at once if there is none."""
        self._retired = True
        if not self.users:
            self._close_aside()

    def _close_aside(self) -> None:
        """Unpinning and unmapping take seconds, for which the caller's thread would do nothing else."""
        try:
            threading.Thread(target=self.close, name=UNMAP_THREAD, daemon=True).start()
        except RuntimeError:  # this process or container may have no more threads now
            self.close()

    def next_piece(self) -> tuple[int, int] | None:
        """(start, bytes) that can be registered next. Up to a multiple of PIECE_BYTES: no slot reaches across one."""
        end = min(self.nbytes, (self.registered // PIECE_BYTES + 1) * PIECE_BYTES)
        if not self.registered < end <= self.limit:
            return None
        return self.registered, end - self.registered

    def close(self) -> None:
        """Close now; the copier waits for copies under way. Idempotent; any thread."""
        with self._closing:
            if self._mapping is None:
                return
            mapping, self._mapping = self._mapping, None
            try:
                self.copier.close()
            except Exception:  # the device failed; the memory is unmapped nevertheless
                logger.exception("kvtier: store memory: unregistering it from the device failed")
            mapping.close()
        self._on_closed()


@dataclass(frozen=True)
class MemoryUser:
    """``on_change()`` is called when ``current`` or ``registered_pages`` changed. ``busy()``: whether requests wait for
    loads. ``lock``, reentrant, is held while memory or copier change: another thread polls the ``CopyEngine`` under the
    same lock."""

    on_change: Callable[[], None]
    busy: Callable[[], bool] = lambda: False
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)


class StoreMemory:
    """All methods, and ``user.on_change``, on the reactor's thread.

    ``connect(on_change)`` makes the worker's StoreClient; ``make_copier(mapping)`` a copier on that memory, ready to
    work (warmed up).
    """

    def __init__(
        self,
        reactor: Reactor,
        connect: Callable[[Callable[[], None]], StoreClient],
        make_copier: Callable[[PoolMapping], Copier],
        user: MemoryUser,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._reactor, self._make_copier, self._clock = reactor, make_copier, clock
        self._on_change, self._busy, self._lock = user.on_change, user.busy, user.lock
        self.current: Backing | None = None
        self.reason = "not connected to the node store yet"  # why memory is missing; "" if none is
        self._client = connect(self._changed)
        self._old: Backing | None = None  # retired, and not closed yet
        self._refused: str | None = None  # the instance whose memory cannot be used
        self._stuck = False  # registering failed for this backing
        self._pending = False  # ``_register`` is queued
        self._last_piece = 0.0
        self._closed = False

    def start(self) -> None:
        self._client.start()

    @property
    def instance(self) -> str:
        """The instance of the memory in use; "" for none."""
        return "" if self.current is None else self.current.instance

    @property
    def registered_pages(self) -> int:
        """Slots that end below this page can be copied from and to."""
        return 0 if self.current is None else self.current.registered // PAGE

    def close(self) -> None:
        """Unmap for good; waits for copies under way (milliseconds). Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._client.close()
        with self._lock:
            old, self.current = (self._old, self.current), None
            for backing in old:
                if backing is not None:
                    backing.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self._closed:
            return
        if not self._client.connected:
            if self.current is not None:
                self._reactor.call_later(GRACE_SECONDS, self._unmap_lost)
            return
        with self._lock:
            if self.current is not None and self.current.instance != self._client.instance:
                logger.info("kvtier: store memory: another instance of the node store serves; mapping its memory")
                self._retire()
            if self.current is None:
                self._map()
            backing = self.current
            if backing is not None and backing.instance == self._client.instance:
                backing.limit = max(backing.limit, self._client.ready_pages * PAGE)
                backing.nbytes = min(backing.nbytes, self._client.pool_pages * PAGE)
                self._register_soon()

    def _unmap_lost(self) -> None:
        """Unmap the memory of a store that did not come back: no job can name its slots, and a new store needs the
        memory, which only this mapping keeps alive."""
        with self._lock:
            if not self._closed and not self._client.connected and self.current is not None:
                self._retire()

    def _retire(self) -> None:
        self._old, self.current = self.current, None
        self._on_change()
        self._old.retire()

    def _old_closed(self) -> None:
        self._old = None
        self._changed()

    def _map(self) -> None:
        if self._old is not None or self._client.instance == self._refused:
            return
        instance, mapping = self._client.instance, None
        try:
            mapping = self._client.open_pool()
            if mapping is None:  # disconnected meanwhile; ``_changed`` is called when that changes
                return
            copier = self._make_copier(mapping)
        except Exception as error:  # the engine serves on without a store
            if mapping is not None:
                mapping.close()
            self._refused, self.reason = instance, f"the node store's memory cannot be used: {error}"
            if isinstance(error.__cause__ or error, OSError):
                logger.warning("kvtier: store memory: %s; it is tried again in %.0f s", self.reason, REFUSED_SECONDS)
                self._reactor.call_later(REFUSED_SECONDS, self._map_again)
            elif isinstance(error, KVTierError):
                logger.warning("kvtier: store memory: %s; prompts are recomputed", self.reason)
            else:
                logger.exception("kvtier: store memory: it cannot be used; prompts are recomputed")
            return
        self.current = Backing(mapping, copier, lambda: self._reactor.call_soon(self._old_closed))
        self._stuck, self.reason = False, ""

    def _map_again(self) -> None:
        self._refused = None
        self._changed()

    def _register_soon(self, delay: float = 0.0) -> None:
        if self._pending or self._stuck or self.current is None or self.current.next_piece() is None:
            return
        self._pending = True
        if delay:
            self._reactor.call_later(delay, self._register)
        else:
            self._reactor.call_soon(self._register)

    def _register(self) -> None:
        """Register one piece; then the reactor's other callbacks run."""
        self._pending = False
        backing = self.current
        piece = None if backing is None else backing.next_piece()
        if piece is None:
            return
        if self._busy() and self._clock() < self._last_piece + MAX_DELAY:
            self._register_soon(RETRY_SECONDS)
            return
        try:
            with self._lock:
                backing.copier.register(*piece)
        except Exception as error:
            # The registered pieces stay in use. More would be refused again (a limit on locked memory).
            self._stuck = True
            self.reason = f"only {backing.registered >> 20} MiB of the node store's memory can be used: {error}"
            logger.warning("kvtier: store memory: %s", self.reason)
            return
        backing.registered += piece[1]
        self._last_piece = self._clock()
        self._on_change()
        self._register_soon()

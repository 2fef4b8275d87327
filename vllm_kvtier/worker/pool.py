"""The node store's memory in a worker: mapped, given to the copier piece by piece, and changed with the store.

The worker's connection to the store says which instance serves and how much of its memory is ready. One *backing* (a
mapping and its copier) is in use at a time. When another instance serves, ``current`` is None at once, what runs on
the old backing ends there, only then is it closed, and then the new memory is mapped. While nobody serves, the last
backing stays for a while: pinning it again would take seconds.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE
from vllm_kvtier.worker.copier import Copier

logger = get_logger("vllm.kvtier.pool")

# Registering a piece keeps this thread for some 20 ms (the driver pins its pages). While requests wait for loads the
# next one is put off, but never longer than PATIENCE, or a busy engine would never get to its memory.
PUT_OFF = 0.01
PATIENCE = 0.1
# A store that is away for less, or a connection that is made anew, finds its memory pinned as before.
GRACE = 5.0


class Mapping(Protocol):
    """``store.mapping.PoolMapping`` as far as it is used here."""

    address: int
    nbytes: int
    instance: str

    def close(self) -> None: ...


class Client(Protocol):
    """``store.client.StoreClient`` (kind "worker") as far as it is used here."""

    connected: bool
    instance: str
    ready_pages: int
    pool_pages: int

    def start(self) -> None: ...

    def close(self) -> None: ...

    def open_pool(self) -> Mapping | None: ...


class Backing:
    """One instance's memory with the copier on it. ``take`` for each copy, ``give`` when it has ended."""

    def __init__(
        self,
        mapping: Mapping,
        copier: Copier,
        on_closed: Callable[[], None],
        soon: Callable[[Callable[[], None]], None],
    ):
        """``soon`` runs a callback later, on the reactor's thread."""
        self.instance, self.copier, self._soon = mapping.instance, copier, soon
        self.registered = 0  # bytes from the start that copies may use
        self.limit = 0  # bytes from the start that the store has made ready
        self.nbytes = mapping.nbytes  # of the pool; less where the store ran out of memory on the way
        self._mapping, self._on_closed = mapping, on_closed
        self._users = 0
        self._retired = False

    def take(self) -> None:
        self._users += 1

    def give(self) -> None:
        self._users -= 1
        if self._retired and not self._users:
            # Not here: unpinning takes seconds, and this may be the model runner's thread.
            self._soon(self.close)

    def retire(self) -> None:
        """Nothing new begins here; closed soon after the last copy has ended, at once if there is none."""
        self._retired = True
        if not self._users:
            self.close()

    def next_piece(self) -> tuple[int, int] | None:
        """(start, bytes) that can be registered next. Up to a multiple of PIECE: no slot reaches across one."""
        end = min(self.nbytes, (self.registered // PIECE + 1) * PIECE)
        if not self.registered < end <= self.limit:
            return None
        return self.registered, end - self.registered

    def close(self) -> None:
        """Now, whoever counts on it; the copier waits for what is under way. Idempotent."""
        if self._mapping is None:
            return
        mapping, self._mapping = self._mapping, None
        try:
            self.copier.close()
        except Exception:  # a device that failed: the memory is given back all the same
            logger.exception("kvtier: giving the node store's memory back to the device failed")
        mapping.close()
        self._on_closed()


class Pool:
    """All methods, and ``on_change``, on the reactor's thread.

    ``connect(on_change)`` makes the worker's StoreClient; ``make_copier(mapping)`` a copier on that memory, ready to
    work (warmed up). ``on_change()`` is called when ``current`` or ``registered_pages`` changed. ``busy()`` says
    whether requests wait for loads. ``lock``, reentrant, is held while memory or copier change: for an Offload that
    is driven on another thread too, under the same lock.
    """

    def __init__(
        self,
        reactor: Reactor,
        connect: Callable[[Callable[[], None]], Client],
        make_copier: Callable[[Any], Copier],
        on_change: Callable[[], None],
        busy: Callable[[], bool] = lambda: False,
        lock: AbstractContextManager | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._reactor, self._make_copier, self._on_change = reactor, make_copier, on_change
        self._busy, self._clock = busy, clock
        self._lock = nullcontext() if lock is None else lock
        self.current: Backing | None = None
        self.reason = "not connected to the node store yet"  # why there is not all the memory; "" if there is
        self._client = connect(self._changed)
        self._old: Backing | None = None  # retired, and not closed yet
        self._refused: str | None = None  # the instance whose memory we cannot use
        self._stuck = False  # registering failed for this backing
        self._pending = False  # a turn of registering is queued
        self._last_piece = 0.0
        self._closed = False

    def start(self) -> None:
        self._client.start()

    @property
    def instance(self) -> str:
        """Of the memory in use; "" for none."""
        return "" if self.current is None else self.current.instance

    @property
    def registered_pages(self) -> int:
        """Slots that end below this page can be copied from and to."""
        return 0 if self.current is None else self.current.registered // PAGE

    def close(self) -> None:
        """Unmap for good, waiting for what is under way if need be (milliseconds). Idempotent."""
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
                self._reactor.call_later(GRACE, self._let_go)
            return
        with self._lock:
            if self.current is not None and self.current.instance != self._client.instance:
                logger.info("kvtier: another node store serves; changing to its memory")
                self._old, self.current = self.current, None
                self._on_change()
                self._old.retire()
            if self.current is None:
                self._map()
            self._look_at_memory()

    def _let_go(self) -> None:
        """The store is gone for good, as it seems: nobody can be given its slots any more, and its memory, which only
        we keep alive, is what a new store needs."""
        with self._lock:
            if self._closed or self._client.connected or self.current is None:
                return
            self._old, self.current = self.current, None
            self._on_change()
            self._old.retire()

    def _soon(self, callback: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                callback()

        self._reactor.call_soon(locked)

    def _old_closed(self) -> None:
        self._old = None
        self._reactor.call_soon(self._changed)

    def _map(self) -> None:
        if self._old is not None or self._client.instance == self._refused:
            return
        instance, mapping = self._client.instance, None
        try:
            mapping = self._client.open_pool()
            if mapping is None:  # disconnected meanwhile; told again when that changes
                return
            copier = self._make_copier(mapping)
        except Exception as error:  # the engine serves on without a store
            if mapping is not None:
                mapping.close()
            self._refused, self.reason = instance, f"the node store's memory cannot be used: {error}"
            if isinstance(error, KVTierError):
                logger.warning("kvtier: %s; KV is computed instead", self.reason)
            else:
                logger.exception("kvtier: the node store's memory cannot be used; KV is computed instead")
            return
        self.current = Backing(mapping, copier, self._old_closed, self._soon)
        self._stuck, self.reason = False, ""

    def _look_at_memory(self) -> None:
        backing = self.current
        if backing is None or backing.instance != self._client.instance:
            return
        backing.limit = max(backing.limit, self._client.ready_pages * PAGE)
        backing.nbytes = min(backing.nbytes, self._client.pool_pages * PAGE)
        self._register_soon()

    def _register_soon(self, delay: float = 0.0) -> None:
        if self._pending or self._stuck or self.current is None or self.current.next_piece() is None:
            return
        self._pending = True
        if delay:
            self._reactor.call_later(delay, self._register)
        else:
            self._reactor.call_soon(self._register)

    def _register(self) -> None:
        """One piece; then the reactor's others have their turn."""
        self._pending = False
        backing = self.current
        piece = None if backing is None else backing.next_piece()
        if piece is None:
            return
        if self._busy() and self._clock() < self._last_piece + PATIENCE:
            self._register_soon(PUT_OFF)
            return
        try:
            with self._lock:
                backing.copier.register(*piece)
        except Exception as error:
            # What is registered stays in use. More would be refused again (a limit on locked memory).
            self._stuck = True
            self.reason = f"only {backing.registered >> 20} MiB of the node store's memory can be used: {error}"
            logger.warning("kvtier: %s", self.reason)
            return
        backing.registered += piece[1]
        self._last_piece = self._clock()
        self._on_change()
        self._register_soon()

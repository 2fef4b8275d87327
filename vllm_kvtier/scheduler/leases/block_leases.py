"""Base class of the leases on blocks that are pinned for one lease: of the prefix cache, and of a running prefill.

The blocks are pinned between two calls of vLLM's scheduler (``vllm_compat.hooks.scheduler_lock``) until the reader has
them, its connection ends or the lease expires.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)


class BlockLeases(ABC):
    kind: ClassVar[LeaseKind]
    unavailable: ClassVar[Refusal]  # while the lock is not known, and after an error
    busy: ClassVar[Refusal]  # with too many requests at once, or leases of the connection

    def __init__(self, engine: EngineContext, scheduler_lock: SchedulerLock, exports: ExportTable):
        self._engine, self._scheduler_lock, self._exports = engine, scheduler_lock, exports
        self._pool, self._groups = engine.pool, engine.geometry.groups
        self._hash_block_size = engine.geometry.hash_block_size

    def lease(
        self, request: m.LeaseRequest, connection: Hashable, seconds: float, answer: Callable[[Lease | Refusal], None]
    ) -> None:
        """Lease tokens from ``request.start`` on. Any thread that does not hold the lock; ``answer`` is called once, by
        the thread that holds it then."""
        if not self._scheduler_lock.known:
            answer(self.unavailable)
            return

        def lease() -> None:
            try:
                most = self._exports.has_most(connection)
                found = self.busy if most else self._lease(request, connection, seconds)
            except Exception:
                logger.exception("kvtier: a lease (%s) failed; it is refused", self.kind.value)
                found = self.unavailable
            answer(found)

        self._scheduler_lock.run_when_free(lease, lambda: answer(self.busy))

    # -- under the lock ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _lease(self, request: m.LeaseRequest, connection: Hashable, seconds: float) -> Lease | Refusal:
        """Find the blocks and ``_grant`` them."""

    def _grant(
        self,
        request: m.LeaseRequest,
        connection: Hashable,
        seconds: float,
        groups: list[GroupBlocks],
        tokens: int,
        ready_step: int = -1,
    ) -> Lease:
        """Pin the blocks of ``groups`` from ``request.start`` on, which hold ``tokens`` tokens of a prompt.
        ``ready_step``: the step that makes the last of their checksums."""
        export = Export(
            id="",
            kind=self.kind,
            tokens=tokens,
            block_hashes=(),
            digest=b"",
            lora_fingerprint=request.lora_fingerprint,
            groups=groups,
            pinned=self._pool.pin(self._wanted(request, groups)),
            ready_step=ready_step,
            deadline=time.monotonic(),
        )
        try:
            return self._exports.lease_cached(export, request.start, connection, seconds, served=not request.mapped)
        except Exception:
            self._pool.free(export.pinned)
            raise

    @staticmethod
    def _wanted(request: m.LeaseRequest, groups: list[GroupBlocks]) -> list[int]:
        return [i for group in groups for i in group.ids[request.start // group.block_tokens :] if i]

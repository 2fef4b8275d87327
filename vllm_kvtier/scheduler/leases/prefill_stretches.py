"""Leases on stretches of a prefill that goes on, for the decode engine that follows it.

The router named the prefill ahead (``Hints.export_as``). A stretch is what steps have computed since the last one, as
far as its checksums are made. Its blocks are pinned until the reader has them: vLLM may preempt the prefill, which then
goes on in other blocks. What the last step computes, and the partial last block, come with the export.

What only a preempted prefill had is not leased, so that vLLM may reuse it.
"""

import time
from collections.abc import Callable, Hashable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.scheduler.matching.request_state import RequestState, lora_fingerprint_of
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)

# A stretch has so many tokens, or half of those that the reader still lacks: with small steps neither engine has a
# message and a read for each step, and little is left for the last one.
MIN_STRETCH_TOKENS = 1024


def is_worth_a_stretch(ready: int, sent: int, prompt: int) -> bool:
    """Whether tokens [``sent``, ``ready``) of a prompt are enough for a stretch."""
    return ready - sent >= max(1, min(MIN_STRETCH_TOKENS, (prompt - sent) // 2))


class PrefillStretches:
    def __init__(
        self, engine: EngineContext, scheduler_lock: SchedulerLock, exporter: ExportBuilder, exports: ExportTable
    ):
        self._engine, self._scheduler_lock = engine, scheduler_lock
        self._exporter, self._exports, self._pool = exporter, exports, engine.pool
        geometry = engine.geometry
        self._groups, self._alignment, self._hash_block_size = (
            geometry.groups, geometry.alignment, geometry.hash_block_size,
        )  # fmt: skip
        # Behind a window blocks are freed while the prefill goes on; with lookahead there is no partial last block.
        possible = geometry.by_position and all(group.kind.whole_prefix for group in geometry.groups)
        possible &= not (geometry.whole_blocks or engine.info.hash_lookahead)
        self.possible: bool = possible and engine.config.follow_share > 0

    def lease(
        self, request: m.LeaseRequest, connection: Hashable, seconds: float, answer: Callable[[Lease | Refusal], None]
    ) -> None:
        """Lease tokens from ``request.start`` on. Any thread that does not hold the lock; ``answer`` is called once, by
        the thread that holds it then. NOT_READY: nothing now, perhaps later; UNKNOWN: the prefill has ended."""
        if not self._scheduler_lock.known:
            answer(Refusal.UNKNOWN if request.export in self._exporter.ended else Refusal.NOT_READY)
            return

        def lease() -> None:
            try:
                found = self._lease(request, connection, seconds)
            except Exception:
                logger.exception("kvtier: prefill stretches: a lease failed; it is refused")
                found = Refusal.NOT_READY
            answer(found)

        self._scheduler_lock.run_when_free(lease)

    def drop(self, name: str) -> None:
        """No engine will pull this prefill, should it still run. Any thread."""
        if self._scheduler_lock.known:
            self._scheduler_lock.run_when_free(lambda: self._drop(name))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _drop(self, name: str) -> None:
        if name in self._exporter.running:
            self._exporter.unwanted.add(name)

    def _lease(self, request: m.LeaseRequest, connection: Hashable, seconds: float) -> Lease | Refusal:
        if request.export in self._exporter.ended:
            return Refusal.UNKNOWN
        running = self._exporter.running.get(request.export)
        if running is None or not (self.possible and request.stretches):
            return Refusal.NOT_READY
        t, table = running
        prompt: int = t.request.num_prompt_tokens
        if not table.stretches_for:
            table.stretches_for = self._digest(t)
        if table.stretches_for != request.digest or lora_fingerprint_of(t.request) != request.lora_fingerprint:
            return Refusal.DIGEST
        if not is_worth_a_stretch(min(table.checksums_ready[g] * size for g, (size, _) in enumerate(self._groups)),
                                  request.start, prompt):  # fmt: skip
            return Refusal.NOT_READY
        found = [self._exporter.ready_blocks(t, table, g, request.start // s) for g, (s, _) in enumerate(self._groups)]
        ends = [(request.start // size + len(ids)) * size for ids, (size, _) in zip(found, self._groups, strict=True)]
        tokens = min(ends) // self._alignment * self._alignment
        if tokens <= request.start or not is_worth_a_stretch(tokens, request.start, prompt):
            return Refusal.NOT_READY
        groups = []
        for ids, (size, kind) in zip(found, self._groups, strict=True):
            before = request.start // size
            groups.append(GroupBlocks(size, [0] * before + ids[: tokens // size - before], kind))
        wanted = [i for group in groups for i in group.ids if i]
        if len(wanted) > self._exports.room(LeaseKind.STRETCH) or self._pool.unheld(wanted):
            return Refusal.NOT_READY  # readers are behind, or the prefill was preempted
        export = Export(
            id="",
            kind=LeaseKind.STRETCH,
            tokens=tokens,
            block_hashes=(),
            digest=b"",
            lora_fingerprint=request.lora_fingerprint,
            groups=groups,
            pinned=self._pool.pin(wanted),
            ready_step=-1,
            deadline=time.monotonic(),
        )
        try:
            return self._exports.lease_cached(export, request.start, connection, seconds, served=not request.mapped)
        except Exception:
            self._pool.free(export.pinned)
            raise

    def _digest(self, t: RequestState) -> bytes:
        prompt, size = t.request.num_prompt_tokens, self._hash_block_size
        tail = vr.tail_hash(t.request, prompt, size) if prompt % size else b""
        return vr.prefix_digest(vr.block_hashes(t.request, prompt, size), tail)

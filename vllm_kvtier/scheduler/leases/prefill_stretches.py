"""Leases on stretches of a prefill that goes on, for the decode engine that follows it.

The router named the prefill ahead (``Hints.export_as``). A stretch is what steps have computed since the last one, as
far as its checksums are made. Its blocks are pinned until the reader has them: vLLM may preempt the prefill, which then
goes on in other blocks. What the last step computes, and the partial last block, come with the export.

What only a preempted prefill had is not leased, so that vLLM may reuse it.
"""

from collections.abc import Callable, Hashable

from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.leases.block_leases import BlockLeases
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.scheduler.matching.request_state import RequestState, lora_fingerprint_of
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.wire import messages as m

# A stretch has so many tokens, or half of those that the reader still lacks: with small steps neither engine has a
# message and a read for each step, and little is left for the last one.
MIN_STRETCH_TOKENS = 1024


def is_worth_a_stretch(ready: int, sent: int, prompt: int) -> bool:
    """Whether tokens [``sent``, ``ready``) of a prompt are enough for a stretch."""
    return ready - sent >= max(1, min(MIN_STRETCH_TOKENS, (prompt - sent) // 2))


class PrefillStretches(BlockLeases):
    """Refusals: NOT_READY: nothing now, perhaps later; UNKNOWN: the prefill has ended."""

    kind = LeaseKind.STRETCH
    unavailable = busy = Refusal.NOT_READY

    def __init__(
        self, engine: EngineContext, scheduler_lock: SchedulerLock, exporter: ExportBuilder, exports: ExportTable
    ):
        super().__init__(engine, scheduler_lock, exports)
        self._exporter = exporter
        # With lookahead there is no partial last block.
        self.possible = engine.geometry.has_stretches and not engine.info.hash_lookahead
        self.possible &= engine.config.follow_share > 0

    def lease(
        self, request: m.LeaseRequest, connection: Hashable, seconds: float, answer: Callable[[Lease | Refusal], None]
    ) -> None:
        if not self._scheduler_lock.known and request.export in self._exporter.ended:
            answer(Refusal.UNKNOWN)  # or its reader would wait in vain
        else:
            super().lease(request, connection, seconds, answer)

    def release_export(self, name: str) -> None:
        """No engine will pull this prefill, should it still run or wait. Any thread."""
        if self._scheduler_lock.known:
            self._scheduler_lock.run_when_free(lambda: self._exporter.release_export(name))

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _lease(self, request: m.LeaseRequest, connection: Hashable, seconds: float) -> Lease | Refusal:
        if request.export in self._exporter.ended:
            return Refusal.UNKNOWN
        running = self._exporter.running.get(request.export)
        if running is None or not (self.possible and request.stretches):
            return Refusal.NOT_READY
        state, table = running
        prompt: int = state.request.num_prompt_tokens
        if not table.stretches_for:
            table.stretches_for = self._digest(state)
        if table.stretches_for != request.digest or lora_fingerprint_of(state.request) != request.lora_fingerprint:
            return Refusal.DIGEST
        if not is_worth_a_stretch(min(table.checksums_ready[g] * size for g, (size, _) in enumerate(self._groups)),
                                  request.start, prompt):  # fmt: skip
            return Refusal.NOT_READY
        firsts = [request.start // size for size, _ in self._groups]
        found = [self._exporter.ready_blocks(state, table, g, first) for g, first in enumerate(firsts)]
        ends = [(request.start // size + len(ids)) * size for ids, (size, _) in zip(found, self._groups, strict=True)]
        alignment = self._engine.geometry.alignment
        tokens = min(ends) // alignment * alignment
        if tokens <= request.start or not is_worth_a_stretch(tokens, request.start, prompt):
            return Refusal.NOT_READY
        groups = []
        for ids, (size, kind) in zip(found, self._groups, strict=True):
            before = request.start // size
            groups.append(GroupBlocks(size, [0] * before + ids[: tokens // size - before], kind))
        wanted = self._wanted(request, groups)
        if len(wanted) > self._exports.room(self.kind) or self._pool.unheld(wanted):
            return Refusal.NOT_READY  # readers are behind, or the prefill was preempted
        return self._grant(request, connection, seconds, groups, tokens)

    def _digest(self, state: RequestState) -> bytes:
        prompt, size = state.request.num_prompt_tokens, self._hash_block_size
        tail = vr.tail_hash(state.request, prompt, size) if prompt % size else b""
        return vr.prefix_digest(vr.block_hashes(state.request, prompt, size), tail)

"""A connector whose lower layers misbehave on demand, for tests of real engines; not part of serving.

An engine gets it by name, instead of the connector that it decorates, and is told what to do wrong by the plan
file (``devtools.faults``) that the environment variable KVTIER_FAULTS names:

    "kv_connector": "FaultyConnector", "kv_connector_module_path": "vllm_kvtier.devtools.faulty_connector"
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from vllm_kvtier import connector
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.devtools.faults import VARIABLE, FaultFile
from vllm_kvtier.scheduler import half as scheduler_half
from vllm_kvtier.scheduler.endpoint import Endpoint
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.worker import half as worker_half
from vllm_kvtier.worker.memory import CacheMemory
from vllm_kvtier.worker.transport import NixlTransport, Transfer, TransferState

faults = FaultFile(os.environ[VARIABLE])


class _Held(Transfer):
    """A read that may not be posted yet."""

    def __init__(self, post: Callable[[], Transfer], peer: str, size: int):
        super().__init__(None, peer, size)
        self.post = post


class FaultyTransport(NixlTransport):
    def read(self, peer: str, local: Any, near: np.ndarray, remote: Any, far: np.ndarray, size: int) -> Transfer:
        def post() -> Transfer:
            return super(FaultyTransport, self).read(peer, local, near, remote, far, size)

        plan = faults.plan()
        if plan.hold_before:
            faults.record("hold_before")
            return _Held(post, peer, size)
        transfer = post()
        if plan.hold_after:
            faults.record("hold_after")
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        plan = faults.plan()
        if plan.fail_reads:
            faults.record("fail_reads")
            return TransferState.FAILED
        if plan.hold_before or plan.hold_after:
            return TransferState.RUNNING
        if isinstance(transfer, _Held) and transfer.handle is None:
            try:
                transfer.handle = transfer.post().handle
            except Exception as error:  # what NIXL raises when a read cannot be started
                faults.record(f"late read refused: {error}")
                return TransferState.FAILED
        return super().poll(transfer)

    def release(self, transfer: Transfer) -> bool:
        return transfer.handle is None or super().release(transfer)

    def progress(self) -> None:
        if faults.plan().stall_serving:
            faults.record("stall_serving")
            return
        super().progress()


class FaultyMemory(CacheMemory):
    def make_sums(self, batches, after):
        pending = super().make_sums(batches, after)
        plan = faults.plan()
        for batch in batches:
            if plan.corrupt == "pages":
                self._flip(batch.group, int(batch.ids[0]))
            elif plan.corrupt == "sums":
                self.table[int(batch.ids[0])] ^= 1
            if plan.corrupt in ("pages", "sums"):
                faults.record(plan.corrupt)
        return pending

    def begin_check(self, groups, moves=()):
        if faults.plan().corrupt == "arrival":
            for g in groups:
                if len(g.local):
                    self._flip(g.group, int(g.local[-1]))
                    faults.record("arrival")
        return super().begin_check(groups, moves)

    def _flip(self, group: int, block: int) -> None:
        """One bit of the block's first token, in its last region."""
        view = self.transfer_view
        view.pages(view.groups[group].regions[-1])[block, 0, 0, 0] ^= 1


class FaultyPeers(Peers):
    def _send(self, connection, message) -> None:
        if not _dropped(message):
            super()._send(connection, message)


class FaultyEndpoint(Endpoint):
    def _send(self, identity, message) -> None:
        if not _dropped(message):
            super()._send(identity, message)


def _dropped(message: msgspec.Struct) -> bool:
    tag = type(message).__struct_config__.tag
    if tag in faults.plan().drop:
        faults.record(f"drop {tag}")
        return True
    return False


class FaultyConnector(KVTierConnector):
    """``KVTierConnector`` over the faulty layers above."""

    def __init__(self, *args: Any, **kwargs: Any):
        worker_half.NixlTransport, connector.CacheMemory = FaultyTransport, FaultyMemory
        scheduler_half.Peers, scheduler_half.Endpoint = FaultyPeers, FaultyEndpoint
        super().__init__(*args, **kwargs)


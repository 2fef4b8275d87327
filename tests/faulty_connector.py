"""A connector whose transport, memory and messages fail on demand, for tests of real engines.

The environment variable KVTIER_FAULTS names the plan file (``faults``). The engine needs this folder in PYTHONPATH:

    "kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"
"""

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
from faults import VARIABLE, FaultFile

from vllm_kvtier import connector
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler import wiring
from vllm_kvtier.scheduler.integrity import sync_load
from vllm_kvtier.scheduler.integrity.sync_load import SHORT_LOAD_SECONDS
from vllm_kvtier.scheduler.leases.lease_client import LeaseClient
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer
from vllm_kvtier.worker import connector_worker
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, Transfer, TransferState

faults = FaultFile(os.environ[VARIABLE])


class _Held(Transfer):
    """A read that is not posted yet."""

    def __init__(self, post: Callable[[], Transfer], peer: str, size: int):
        super().__init__(None, peer, size)
        self.post = post


class FaultyTransport(NixlTransport):
    def read(self, peer: str, *args: Any) -> Transfer:
        def post() -> Transfer:
            return super(FaultyTransport, self).read(peer, *args)

        plan = faults.plan()
        if plan.hold_before:
            faults.record("hold_before")
            return _Held(post, peer, args[-1])
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
    def compute_checksums(self, batches, after):
        pending = super().compute_checksums(batches, after)
        plan = faults.plan()
        for batch in batches:
            if plan.corrupt == "pages":
                self._flip(batch.group, int(batch.ids[0]))
            elif plan.corrupt == "checksums":
                self.table[int(batch.ids[0])] ^= 1
            if plan.corrupt in ("pages", "checksums"):
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


class FaultyLeaseClient(LeaseClient):
    def _send(self, connection, message) -> None:
        if not _dropped(message):
            super()._send(connection, message)


class FaultyLeaseServer(LeaseServer):
    def _send(self, identity, message) -> bool:
        return _dropped(message) or super()._send(identity, message)  # what is dropped on its way was sent


def _dropped(message: msgspec.Struct) -> bool:
    tag = type(message).__struct_config__.tag
    if tag in faults.plan().drop:
        faults.record(f"drop {tag}")
        return True
    return False


class FaultyConnector(KVTierConnector):
    """``KVTierConnector`` over the faulty classes above.

    computed: most tokens of a prompt behind which the step goes on, in an engine without a worker process.
    """

    computed = 0

    def __init__(self, *args: Any, **kwargs: Any):
        connector_worker.NixlTransport, connector.CacheMemory = FaultyTransport, FaultyMemory
        wiring.LeaseClient, wiring.LeaseServer = FaultyLeaseClient, FaultyLeaseServer
        super().__init__(*args, **kwargs)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        FaultyConnector.computed = max(scheduler_output.scheduled_cached_reqs.num_computed_tokens, default=0)
        return super().build_connector_meta(scheduler_output)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        sync_load.SHORT_LOAD_SECONDS = 1e9 if faults.plan().short_loads else SHORT_LOAD_SECONDS
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while 0 < faults.plan().hold_behind <= FaultyConnector.computed:
            time.sleep(0.002)
        super().start_load_kv(forward_context, **kwargs)


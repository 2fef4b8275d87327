"""Faults on purpose, for tests of real engines: a connector whose lower layers misbehave on demand.

Not part of serving. An engine gets it by name, instead of the connector it decorates:

    "kv_connector": "FaultyConnector", "kv_connector_module_path": "vllm_kvtier.devtools.faults"

and is told what to do wrong by a file, named by the environment variable KVTIER_FAULTS, which may change at any
time (``FaultFile``). No file, or an empty plan: nothing is wrong. What a fault did is appended to a second file, so
that a test can wait until it happened.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.scheduler import half as scheduler_half
from vllm_kvtier.scheduler.endpoint import Endpoint
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.worker import half as worker_half
from vllm_kvtier.worker.memory import CacheMemory
from vllm_kvtier.worker.transport import NixlTransport, Transfer, TransferState

VARIABLE = "KVTIER_FAULTS"


class FaultPlan(msgspec.Struct, forbid_unknown_fields=True):
    """What goes wrong from now on."""

    corrupt: str = ""  # "pages": one bit of ours after it was summed; "sums": our table; "arrival": what we read
    hold_before: bool = False  # reads are not even posted
    hold_after: bool = False  # reads are posted, and seem to run on
    fail_reads: bool = False  # reads end with an error
    stall_serving: bool = False  # no progress for peers that read from us
    drop: list[str] = []  # tags of messages (wire/messages.py) that are lost on their way out


class FaultFile:
    """The plan file and the record beside it; the same class writes (tests) and reads (engines)."""

    def __init__(self, path: str | os.PathLike):
        self._path, self._record = Path(path), Path(f"{path}.record")
        self._seen: tuple[int, int] | None = None
        self._plan = FaultPlan()

    def set(self, **plan: Any) -> None:
        """From now on this goes wrong, and nothing else. Atomic: a reader sees the old plan or the new one."""
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(FaultPlan(**plan)))
        part.replace(self._path)

    def plan(self) -> FaultPlan:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return FaultPlan()
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if stamp != self._seen:
            self._plan = msgspec.json.decode(self._path.read_bytes(), type=FaultPlan)
            self._seen = stamp
        return self._plan

    def record(self, what: str) -> None:
        with self._record.open("a") as file:
            file.write(what + "\n")

    def happened(self, what: str) -> int:
        """How often a fault of this name did something."""
        return self._record.read_text().splitlines().count(what) if self._record.exists() else 0


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

    def begin_check(self, groups):
        if faults.plan().corrupt == "arrival":
            for g in groups:
                if len(g.local):
                    self._flip(g.group, int(g.local[-1]))
                    faults.record("arrival")
        return super().begin_check(groups)

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
        global faults
        faults = FaultFile(os.environ[VARIABLE])
        worker_half.NixlTransport, worker_half.CacheMemory = FaultyTransport, FaultyMemory
        scheduler_half.Peers, scheduler_half.Endpoint = FaultyPeers, FaultyEndpoint
        super().__init__(*args, **kwargs)


faults: FaultFile  # of this engine, set by its connector

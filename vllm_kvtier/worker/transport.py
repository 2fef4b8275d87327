"""A thin wrapper of a NIXL agent: register, introduce peers, read, poll, abort.

Not thread-safe: the worker half calls it under one lock. The agent has no progress thread of its own: NIXL's never
sleeps and would cost an idle engine a whole core. Instead ``progress`` is driven while we read or are read.
"""

import enum
import importlib
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError

logger = logging.getLogger("vllm.kvtier.transport")


class TransferState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass
class Transfer:
    """One read under way; ``release`` it exactly once, after it is done or to abort it."""

    handle: Any
    peer: str
    bytes: int


def _nixl() -> Any:
    """NIXL's Python API: the meta package picks the build for torch's CUDA; the CPU set-up has only one build."""
    problems = []
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(str(error))
    raise KVTierError(f"NIXL cannot be imported ({problems[0]}); `pip install nixl` to pull KV between engines")


class NixlTransport:
    def __init__(self, name: str, backends: list[str]):
        """Raises KVTierError if NIXL is missing or none of ``backends`` can be created."""
        api = _nixl()
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=list(backends))
        self._agent = api.nixl_agent(name, config)
        missing = [b for b in backends if b not in self._agent.backends]
        if len(missing) == len(backends):
            raise KVTierError(
                f"NIXL has none of the backends {', '.join(backends)} here; "
                f"it has {', '.join(self._agent.plugin_list)}"
            )
        self.name = name
        self._registered: list[Any] = []  # registrations live as long as their descriptors
        self._peers: set[str] = set()
        self._lists: dict[str, list[Any]] = {}
        self._stale: list[Any] = []

    def register(self, spans: list[tuple[int, int]], memory: str, device: int) -> None:
        """Make (base, nbytes) spans readable by peers and usable as targets of our reads."""
        descriptors = self._agent.get_reg_descs([(base, size, device, "") for base, size in spans], memory)
        self._agent.register_memory(descriptors)
        self._registered.append(descriptors)

    def deregister(self) -> None:
        """Give up every span; call when no transfer is under way. Peers that still read get errors."""
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``; made after everything is registered."""
        return self._agent.get_agent_metadata()

    def knows(self, name: str) -> bool:
        return name in self._peers

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Idempotent."""
        if name not in self._peers:
            got = self._agent.add_remote_agent(metadata)
            got = got.decode() if isinstance(got, bytes) else got
            if got != name:
                raise KVTierError(f"the peer's NIXL agent calls itself {got}, not {name}")
            self._peers.add(name)

    def remove_peer(self, name: str) -> None:
        """Disconnect; reads from it that are still under way end with an error."""
        if name in self._peers:
            self._peers.discard(name)
            self._stale += self._lists.pop(name, [])
            self._agent.remove_remote_agent(name)

    def prepare(self, peer: str, rows: np.ndarray, memory: str, *, ours: bool) -> Any:
        """A descriptor list from strided rows uint64[m, 5] (address, length, device, stride, count).

        For reads from ``peer``, of its memory or of ours; it ends with ``remove_peer``.
        """
        handle = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT" if ours else peer, rows, memory)
        self._lists.setdefault(peer, []).append(handle)
        return handle

    def read(self, peer: str, local: Any, near: np.ndarray, remote: Any, far: np.ndarray, size: int) -> Transfer:
        """Start reading elements ``far`` of ``remote`` into elements ``near`` of ``local`` (int32, equal lengths)."""
        handle = self._agent.make_prepped_xfer("READ", local, near, remote, far)
        transfer = Transfer(handle, peer, size)
        try:
            state = self._agent.transfer(handle)
        except Exception:
            handle.release()
            raise
        if state == "ERR":
            handle.release()
            raise KVTierError(f"NIXL could not start a read of {size} bytes from {peer}")
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
        except Exception as error:  # NIXL raises its own classes, e.g. when the peer disconnected
            logger.debug("kvtier: read from %s: %s", transfer.peer, error)
            return TransferState.FAILED
        return {"DONE": TransferState.DONE, "PROC": TransferState.RUNNING}.get(state, TransferState.FAILED)

    def release(self, transfer: Transfer) -> bool:
        """Free a transfer, aborting it if needed. False if NIXL cannot abort it yet: its target memory may
        still be written, so call again before reusing that memory."""
        try:
            transfer.handle.release()
        except Exception as error:
            logger.debug("kvtier: read from %s cannot be aborted yet: %s", transfer.peer, error)
            return False
        return True

    def release_stale(self) -> None:
        """Free the lists of removed peers; call when no transfer is under way."""
        while self._stale:
            self._stale.pop().release()

    def progress(self) -> None:
        """Let NIXL answer peers that read from us (wire-up, and emulated reads where there is no RDMA)."""
        self._agent.get_new_notifs()

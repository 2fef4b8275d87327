"""A thin wrapper of NIXL: register, introduce peers, read, poll; and take memory back from reads that went wrong.

Two agents: peers read our memory from one, and we read theirs with the other. They are two because reading is what goes
wrong. UCX cannot take back a read that it has begun: after NIXL has released it and forgotten the peer, what the peer
sends late still lands in the memory that it was meant for (seen with NIXL 1.5.1 over TCP). Only when the agent is
gone, and its sockets and queues with it, is the memory ours again: ``retire``. That costs those who read from us
nothing, and the next read a new agent (20 ms and more) and new connections.

Not thread-safe: the worker half calls it under one lock. The agents have no progress threads: NIXL's never sleep and
would cost an idle engine a whole core. Instead ``progress`` is driven while we are read, and ``poll`` while we read.
"""

import enum
import gc
import importlib
import itertools
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.transport")


class TransferState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # a part of it may still be under way


@dataclass
class Transfer:
    """One read under way; ``release`` it exactly once, after it is done or before ``retire``."""

    handle: Any
    peer: str
    bytes: int
    failed: bool = False  # when it was posted


def nixl_api() -> Any:
    """NIXL's Python API: the meta package picks the build for torch's CUDA; the CPU set-up has only one build."""
    problems = []
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(str(error))
    raise KVTierError(f"NIXL cannot be imported ({problems[0]}); `pip install nixl` to pull KV between engines")


# Of UCX, for memory that sleep mode takes away and gives back: a mapping by which a peer's UCX reads it (CUDA IPC)
# would keep it from being freed, and so would a cached registration. vLLM's NixlConnector does the same.
MOVABLE = {"engine_config": "RCACHE_ENABLE=n,TLS=^cuda_ipc"}


class _Agent:
    """A NIXL agent and what is registered with it. Raises KVTierError without NIXL or any of ``backends``."""

    def __init__(self, name: str, backends: list[str], movable: bool = False):
        api = nixl_api()
        # A retired agent leaves reads behind, and UCX would write a line about each.
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        plain = [backend for backend in backends if not (movable and backend == "UCX")]
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=plain)
        self.nixl = api.nixl_agent(name, config)
        if plain != backends:
            self.nixl.create_backend("UCX", MOVABLE)
        missing = [b for b in backends if b not in self.nixl.backends]
        if len(missing) == len(backends):
            raise KVTierError(
                f"NIXL has none of the backends {', '.join(backends)} here; "
                f"it has {', '.join(self.nixl.plugin_list)}"
            )
        self._registered: list[Any] = []  # registrations live as long as their descriptors

    def register(self, spans: list[tuple[int, int]], memory: str, device: int) -> None:
        descriptors = self.nixl.get_reg_descs([(base, size, device, "") for base, size in spans], memory)
        self.nixl.register_memory(descriptors)
        self._registered.append(descriptors)

    def deregister(self) -> None:
        while self._registered:
            self.nixl.deregister_memory(self._registered.pop())


class NixlTransport:
    def __init__(self, name: str, backends: list[str], movable: bool = False):
        """``name``: no other agent's, also of those that have ended. ``movable``: the memory may be taken away
        (``close``) while peers know it. Raises KVTierError if NIXL is missing or none of ``backends`` can be created.
        """
        self.name, self._backends = name, list(backends)
        self._server: _Agent | None = _Agent(name, self._backends, movable)
        self._reader: _Agent | None = None
        self._numbers = itertools.count(1)
        self._spans: list[tuple[list[tuple[int, int]], str, int]] = []
        self._peers: set[str] = set()
        self._lists: list[Any] = []
        self._retiring: list[weakref.ref] = []  # agents that somebody still holds

    def register(self, spans: list[tuple[int, int]], memory: str, device: int) -> None:
        """Make (base, nbytes) spans readable by peers and usable as targets of our reads."""
        self._server.register(spans, memory, device)
        reader = self._open()  # here and not at the first read: nothing waits for it now
        self._spans.append((spans, memory, device))
        reader.register(spans, memory, device)

    def close(self) -> bool:
        """The memory is about to be taken away: both agents end, for good. Peers that still read get errors; an agent
        that answered one of them later (where reads are emulated) would end this process. False: one lives on
        (``retired`` looks again)."""
        self._spans.clear()
        server, self._server = self._server, None
        if server is not None:
            _try(server.deregister)
            self._retiring.append(weakref.ref(server.nixl.agent))
            del server
        return self.retire()

    def metadata(self) -> bytes:
        """What a peer needs for ``add_peer``; made after everything is registered."""
        return self._server.nixl.get_agent_metadata()

    def knows(self, name: str) -> bool:
        return name in self._peers

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Idempotent. After ``retire`` it makes the new agent."""
        if name not in self._peers:
            got = self._open().nixl.add_remote_agent(metadata)
            got = got.decode() if isinstance(got, bytes) else got
            if got != name:
                raise KVTierError(f"the peer's NIXL agent calls itself {got}, not {name}")
            self._peers.add(name)

    def prepare(self, peer: str, rows: np.ndarray, memory: str, *, ours: bool) -> Any:
        """A descriptor list from strided rows uint64[m, 5] (address, length, device, stride, count).

        For reads from ``peer``, of its memory or of ours; it ends with ``retire``.
        """
        handle = self._reader.nixl.prep_xfer_dlist("NIXL_INIT_AGENT" if ours else peer, rows, memory)
        self._lists.append(handle)
        return handle

    def read(self, peer: str, local: Any, near: np.ndarray, remote: Any, far: np.ndarray, size: int) -> Transfer:
        """Start reading elements ``far`` of ``remote`` into elements ``near`` of ``local`` (int32, equal lengths).

        If it raises, nothing has begun. What fails later, in the middle of it perhaps, ``poll`` says."""
        handle = self._reader.nixl.make_prepped_xfer("READ", local, near, remote, far)
        transfer = Transfer(handle, peer, size)
        try:
            transfer.failed = self._reader.nixl.transfer(handle) == "ERR"
        except Exception as error:
            logger.debug("kvtier: a read of %d bytes from %s could not be posted: %s", size, peer, error)
            transfer.failed = True
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        if transfer.failed:
            return TransferState.FAILED
        try:
            state = self._reader.nixl.check_xfer_state(transfer.handle)
        except Exception as error:  # NIXL raises its own classes, e.g. when the peer disconnected
            logger.debug("kvtier: read from %s: %s", transfer.peer, error)
            return TransferState.FAILED
        return {"DONE": TransferState.DONE, "PROC": TransferState.RUNNING}.get(state, TransferState.FAILED)

    def release(self, transfer: Transfer) -> None:
        """Free what NIXL keeps of a transfer. The memory that one was to fill which is not done is free after
        ``retire``, and not before."""
        try:
            transfer.handle.release()
        except Exception as error:
            logger.debug("kvtier: read from %s cannot be released: %s", transfer.peer, error)

    def retire(self) -> bool:
        """End the agent that reads, and with it every connection, list and read; release transfers and drop lists
        first, for they hold it. False: it lives on, and may still write (``retired`` looks again)."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._peers.clear()
            while self._lists:
                _try(self._lists.pop().release)
            _try(reader.deregister)
            # Handles hold this inner one.
            self._retiring.append(weakref.ref(reader.nixl.agent))
            del reader
        return self.retired()

    def retired(self) -> bool:
        """Whether every agent that was to end has ended."""
        self._retiring = [agent for agent in self._retiring if agent() is not None]
        if self._retiring:
            gc.collect()
            self._retiring = [agent for agent in self._retiring if agent() is not None]
        return not self._retiring

    def progress(self) -> None:
        """Let NIXL answer peers that read from us (wire-up, and emulated reads where there is no RDMA)."""
        self._server.nixl.get_new_notifs()

    def _open(self) -> _Agent:
        """The agent that reads, with all that is registered."""
        if self._reader is None:
            reader = _Agent(f"{self.name}:reader-{next(self._numbers)}", self._backends)
            for spans in self._spans:
                reader.register(*spans)
            self._reader = reader
        return self._reader


def _try(end: Any) -> None:
    try:
        end()
    except Exception as error:  # what it was to free, the end of the agent frees
        logger.debug("kvtier: NIXL: %s", error)

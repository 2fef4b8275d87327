"""A thin wrapper of NIXL: registers memory, adds peers, reads, polls, and takes memory back from failed reads.

Peers read this rank's memory from one agent; a second agent reads from peers, because reads are what fails. UCX cannot
cancel a read that it has begun: after NIXL released it and removed the peer, late data still lands in the target memory
(seen with NIXL 1.5.1 over TCP). The memory is free only when the agent that reads has ended, with its sockets and
queues: ``retire``. Peers that read from this rank do not notice; the next read needs a new agent (20 ms and more) and
new connections.

Not thread-safe: called under one lock. The agents have no progress threads: NIXL's never sleep and would cost an idle
engine a whole core. Instead ``progress`` is called while peers read, and ``poll`` while this rank reads.
"""

import enum
import gc
import importlib
import itertools
import os
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

# For NIXL's ``engine_config``: of network devices UCX uses, and listens on, loopback alone. Its ways within a machine
# (shared memory, CUDA IPC) are no network devices. UCX_NET_DEVICES in the environment wins.
LOOPBACK = "NET_DEVICES=lo"


class TransferState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # data may still arrive


@dataclass
class Transfer:
    """One read under way; ``release`` it exactly once, after it ended or before ``retire``."""

    handle: Any
    peer: str
    bytes: int
    failed: bool = False  # when it was posted


def nixl_api() -> Any:
    """NIXL's Python API: the meta package selects the build for torch's CUDA; a CPU set-up has only one build."""
    problems = []
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(str(error))
    raise KVTierError(f"NIXL cannot be imported ({problems[0]}); `pip install nixl` to pull KV between engines")


@dataclass(frozen=True)
class UcxLimits:
    """``movable``: the memory may be taken away while peers know it, as by sleep mode: a peer's mapping of it (CUDA
    IPC) or a cached registration would keep it from being freed. vLLM's NixlConnector sets the same. ``loopback``: as
    ``LOOPBACK``; no variable of this process is changed, because another connector's agents may need the network."""

    movable: bool = False
    loopback: bool = False

    @property
    def parameters(self) -> dict[str, str]:
        """Of NIXL's UCX backend."""
        options = (["RCACHE_ENABLE=n,TLS=^cuda_ipc"] if self.movable else []) + ([LOOPBACK] if self.loopback else [])
        return {"engine_config": ",".join(options)} if options else {}


NO_LIMITS = UcxLimits()


class _Agent:
    """A NIXL agent and its registrations. Raises KVTierError without NIXL or any of ``backends``."""

    def __init__(self, name: str, backends: list[str], limits: UcxLimits):
        api = nixl_api()
        # UCX would write a line about each read that a retired agent leaves behind.
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        plain = [backend for backend in backends if not (limits.parameters and backend == "UCX")]
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=plain)
        self.nixl = api.nixl_agent(name, config)
        if plain != backends and "UCX" in self.nixl.plugin_list:
            try:
                self.nixl.create_backend("UCX", limits.parameters)
            except Exception as error:  # NIXL's own classes
                where = " on loopback; UCX_TLS must leave it tcp, or UCX_NET_DEVICES name devices" * limits.loopback
                raise KVTierError(f"NIXL's UCX backend cannot be created{where}: {error}") from error
        missing = [b for b in backends if b not in self.nixl.backends]
        if len(missing) == len(backends):
            raise KVTierError(
                f"NIXL has none of the backends {', '.join(backends)} here; it has {', '.join(self.nixl.plugin_list)}"
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
    def __init__(self, name: str, backends: list[str], limits: UcxLimits = NO_LIMITS):
        """``name``: of no other agent, even one that has ended. Raises KVTierError if NIXL is missing or none of
        ``backends`` can be created."""
        self.name, self._backends, self._limits = name, list(backends), limits
        self._server: _Agent | None = _Agent(name, self._backends, limits)
        self._reader: _Agent | None = None
        self._numbers = itertools.count(1)
        self._spans: list[tuple[list[tuple[int, int]], str, int]] = []
        self._peers: set[str] = set()
        self._lists: list[Any] = []
        self._retiring: list[weakref.ref] = []  # agents that may not have ended

    def register(self, spans: list[tuple[int, int]], memory: str, device: int) -> None:
        """Make (base, nbytes) spans readable by peers and usable as targets of reads."""
        self._server.register(spans, memory, device)
        reader = self._open()  # now and not at the first read, which a request waits for
        reader.register(spans, memory, device)
        self._spans.append((spans, memory, device))

    def close(self) -> bool:
        """End both agents for good, because vLLM takes the memory away. Peers that still read get errors; an agent that
        answered one later (where reads are emulated) would end this process. False: an agent has not ended (``retired``
        checks again)."""
        self._spans.clear()
        server, self._server = self._server, None
        if server is not None:
            _try(server.deregister)
            self._retiring.append(weakref.ref(server.nixl.agent))
            del server
        return self.retire()

    def metadata(self) -> bytes:
        """The metadata for a peer's ``add_peer``; call when everything is registered."""
        return self._server.nixl.get_agent_metadata()

    def knows(self, name: str) -> bool:
        return name in self._peers

    def add_peer(self, metadata: bytes, name: str) -> None:
        """Idempotent. Makes a new agent after ``retire``."""
        if name not in self._peers:
            got = self._open().nixl.add_remote_agent(metadata)
            got = got.decode() if isinstance(got, bytes) else got
            if got != name:
                raise KVTierError(f"the peer's NIXL agent is named {got}, not {name}")
            self._peers.add(name)

    def prepare(self, peer: str, rows: np.ndarray, memory: str, *, ours: bool) -> Any:
        """A descriptor list from strided rows uint64[m, 5] (address, length, device, stride, count).

        For reads from ``peer``, of its memory or of ours; freed by ``retire``.
        """
        handle = self._reader.nixl.prep_xfer_dlist("NIXL_INIT_AGENT" if ours else peer, rows, memory)
        self._lists.append(handle)
        return handle

    def read(
        self, peer: str, local: Any, local_indices: np.ndarray, remote: Any, remote_indices: np.ndarray, size: int
    ) -> Transfer:
        """Start reading elements ``remote_indices`` of ``remote`` into ``local_indices`` of ``local`` (int32).

        If it raises, nothing has begun. ``poll`` reports later failures."""
        handle = self._reader.nixl.make_prepped_xfer("READ", local, local_indices, remote, remote_indices)
        transfer = Transfer(handle, peer, size)
        try:
            transfer.failed = self._reader.nixl.transfer(handle) == "ERR"
        except Exception as error:
            logger.debug("kvtier: NIXL: a read of %d bytes from %s could not be posted: %s", size, peer, error)
            transfer.failed = True
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        if transfer.failed:
            return TransferState.FAILED
        try:
            state = self._reader.nixl.check_xfer_state(transfer.handle)
        except Exception as error:  # NIXL raises its own classes, e.g. when the peer disconnected
            logger.debug("kvtier: NIXL: a read from %s failed: %s", transfer.peer, error)
            return TransferState.FAILED
        return {"DONE": TransferState.DONE, "PROC": TransferState.RUNNING}.get(state, TransferState.FAILED)

    def release(self, transfer: Transfer) -> None:
        """Free NIXL's state of a transfer. The target memory of one that has not ended is free only after
        ``retire``."""
        try:
            transfer.handle.release()
        except Exception as error:
            logger.debug("kvtier: NIXL: a read from %s cannot be released: %s", transfer.peer, error)

    def retire(self) -> bool:
        """End the agent that reads, with its connections, lists and reads. Release transfers and lists before,
        since they keep it alive. False: it has not ended and may still write (``retired`` checks again)."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._peers.clear()
            while self._lists:
                _try(self._lists.pop().release)
            _try(reader.deregister)
            # Handles refer to this inner object.
            self._retiring.append(weakref.ref(reader.nixl.agent))
            del reader
        return self.retired()

    def retired(self) -> bool:
        """Whether every retired agent has ended."""
        self._retiring = [agent for agent in self._retiring if agent() is not None]
        if self._retiring:
            gc.collect()
            self._retiring = [agent for agent in self._retiring if agent() is not None]
        return not self._retiring

    def progress(self) -> None:
        """Let NIXL answer peers that read from this rank (wire-up, and emulated reads without RDMA)."""
        self._server.nixl.get_new_notifs()

    def _open(self) -> _Agent:
        """The agent that reads, with all registrations."""
        if self._reader is None:
            limits = replace(self._limits, movable=False)  # no peer reads from it
            reader = _Agent(f"{self.name}:reader-{next(self._numbers)}", self._backends, limits)
            for spans in self._spans:
                reader.register(*spans)
            self._reader = reader
        return self._reader


def _try(end: Any) -> None:
    try:
        end()
    except Exception as error:  # the end of the agent frees the same
        logger.debug("kvtier: NIXL: %s", error)

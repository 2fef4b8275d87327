"""NIXL agents between nodes: a server agent exposes this node's pool, a reader agent reads from other nodes' pools.

The agents are separate because reads fail. UCX cannot cancel a read: after NIXL has released the transfer and removed
the peer, late data still arrives in its target memory (observed with NIXL 1.5.1 over TCP). The memory is safe to reuse
only after the agent, with its sockets and queues, is gone. So ``Reader`` is closed and replaced before a failed read is
reported, which takes 50 ms.

No agent has a progress thread, because that would never sleep. ``Poller`` makes progress while reads are in flight.
"""

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.tiers.process.nixl_agent import load_nixl
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES

logger = get_logger(__name__)

POLL_SECONDS = 50e-6  # between two polls: socket buffers hold more than a fast network delivers in that time
SLICE_SECONDS = 2e-3  # of polling, before messages and timers are handled
_PR_SET_TIMERSLACK = 29


class Pool(Protocol):
    """Memory that is read from or into (``store.tiers.process.main.Pool``)."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Poller:
    """Calls its callbacks repeatedly while one of them returns true; sleeps otherwise. Reactor's thread."""

    def __init__(self, reactor: Reactor, guard: Callable[[Callable[[], None]], Callable[[], None]]):
        self._reactor, self._slice = reactor, guard(self._run_slice)
        self._polls: list[Callable[[], bool]] = []
        self._running = False

    def add(self, poll: Callable[[], bool]) -> None:
        """``poll`` must not block, and returns whether it has more to do."""
        self._polls.append(poll)

    def wake(self) -> None:
        """A callback has something to do."""
        if not self._running:
            self._running = True
            # By default a thread's sleeps take 50 us longer than requested.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
            self._reactor.call_soon(self._slice)

    def _run_slice(self) -> None:
        end = time.monotonic() + SLICE_SECONDS
        while any([poll() for poll in self._polls]):  # a list, so that all are called
            if time.monotonic() >= end:
                self._reactor.call_soon(self._slice)
                return
            time.sleep(POLL_SECONDS)
        self._running = False


class Registered:
    """An agent and the pieces of the pool that it has registered. Each is registered when first needed: registering an
    unused piece would allocate its pages, and take a second for a few GiB.

    Raises KVTierError without NIXL or its UCX backend. ``generation``: counts registrations.
    """

    def __init__(self, pool: Pool, name: str):
        api = load_nixl()
        self.name, self._pool = name, pool
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        try:
            self._agent.create_backend("UCX", {})
        except Exception as error:  # NIXL's own classes, or KeyError
            set_to = os.environ.get("UCX_TLS", "")
            hint = f"; beside GPUs NIXL wants cuda_copy in UCX_TLS={set_to}" if set_to and "cuda" not in set_to else ""
            raise KVTierError(
                f"NIXL's UCX backend, needed between nodes, is not usable: {_text(error)}{hint}"
            ) from error
        self._registrations: dict[int, Any] = {}  # by piece
        self._metadata = b""
        self.generation = 0

    def register(self, pieces: set[int]) -> bool:
        """Register one of the pieces that are not registered yet, so that the caller can handle messages between.
        Returns whether there are more. Raises KVTierError if the memory cannot be registered."""
        missing = sorted(pieces - self._registrations.keys())
        for piece in missing[:1]:
            start = piece * PIECE_BYTES
            span = (self._pool.address + start, min(PIECE_BYTES, self._pool.nbytes - start), 0, "")
            try:
                self._registrations[piece] = self._agent.register_memory([span], "DRAM", backends=["UCX"])
            except Exception as error:
                raise KVTierError(
                    f"memory cannot be registered for the network: {_text(error)}; check the limit on locked memory "
                    "(ulimit -l)"
                ) from error
            self.generation += 1
            self._metadata = b""
        return len(missing) > 1

    def close(self) -> bool:
        """False: the agent is still referenced and remains alive."""
        try:
            for registration in self._registrations.values():
                self._agent.deregister_memory(registration, backends=["UCX"])
        except Exception as error:
            logger.debug("kvtier: memory cannot be deregistered: %s", _text(error))
        self._registrations.clear()
        alive = weakref.ref(self._agent.agent)  # transfers' handles reference it, too
        self._agent = None
        gc.collect()
        return alive() is None


class Server(Registered):
    """Exposes the pool to peers."""

    @property
    def metadata(self) -> bytes:
        """The NIXL metadata of all memory registered so far."""
        if not self._metadata:
            self._metadata = self._agent.get_agent_metadata()
        return self._metadata

    def progress(self) -> None:
        """Serve peers' reads on networks that need the CPU for it."""
        self._agent.get_new_notifs()


class Reader(Registered):
    """Reads from peers. Transfers are NIXL's handles."""

    def __init__(self, pool: Pool, name: str):
        super().__init__(pool, name)
        self.peers: dict[str, int] = {}  # generation of the metadata, by agent

    def add_remote_agent(self, agent: str, metadata: bytes, generation: int) -> None:
        """Add a peer, once per generation. Raises KVTierError if it cannot be reached or has another name."""
        if self.peers.get(agent) == generation:
            return
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise KVTierError(f"NIXL cannot reach it: {_text(error)}") from error
        name = name.decode() if isinstance(name, bytes) else name
        if name != agent:
            raise KVTierError(f"its NIXL agent is named {name}, not {agent}")
        self.peers[agent] = generation

    def remove_agent(self, agent: str) -> None:
        """Remove a peer that has no transfer in flight."""
        if self.peers.pop(agent, None) is not None:
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                logger.debug("kvtier: disconnecting %s: %s", agent, _text(error))

    def begin(self, agent: str, local: np.ndarray, remote: np.ndarray) -> Any:
        """Start to read remote rows into local ones, uint64[n, 3] of (address, bytes, device). Raises KVTierError if
        it cannot start. With a peer on this machine the call may take as long as the copy."""
        try:
            transfer = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, "DRAM"),
                agent,
                backends=["UCX"],
            )
        except Exception as error:
            raise KVTierError(f"NIXL cannot begin to read: {_text(error)}") from error
        try:
            self._agent.transfer(transfer)
        except Exception as error:  # ``state`` reports it again
            logger.debug("kvtier: a read failed at once: %s", _text(error))
        return transfer

    def state(self, transfer: Any) -> tuple[bool, str]:
        """(whether it has ended, its error or "")."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except Exception as error:
            return True, _text(error)
        return state != "PROC", "" if state in ("PROC", "DONE") else "NIXL gives no reason"

    def release(self, transfer: Any) -> None:
        """Release a transfer that has ended, or whose reader is about to be closed."""
        try:
            transfer.release()
        except Exception as error:
            logger.debug("kvtier: a read cannot be released: %s", _text(error))


def pieces_of(slots: np.ndarray) -> set[int]:
    """The pieces of a DRAM pool that contain these pages."""
    return set(np.unique(slots // (PIECE_BYTES // PAGE)).tolist())


def runs(
    local: np.ndarray, remote: np.ndarray, sizes: np.ndarray, max_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merge blocks that are adjacent on both sides into as few rows (local, remote, size) as possible: int64[n, 3], and
    the row of each block: int64[blocks].

    ``local``, ``remote``: byte offsets in this process's pool and in the peer's. No row crosses a multiple of
    PIECE_BYTES or exceeds ``max_bytes``, unless one block does. Blocks keep their order.
    """
    row_of = np.zeros(len(local), np.int64)
    if not len(local):
        return np.zeros((0, 3), np.int64), row_of
    local_ends, remote_ends = local + sizes, remote + sizes
    joined = (
        (local[1:] == local_ends[:-1])
        & (remote[1:] == remote_ends[:-1])
        & (local[1:] // PIECE_BYTES == local[:-1] // PIECE_BYTES)
        & (remote[1:] // PIECE_BYTES == remote[:-1] // PIECE_BYTES)
    )
    rows: list[list[int]] = [[int(local[0]), int(remote[0]), int(sizes[0])]]
    for i, (follows, size) in enumerate(zip(joined.tolist(), sizes[1:].tolist(), strict=True), 1):
        if follows and rows[-1][2] + size <= max_bytes:
            rows[-1][2] += size
        else:
            rows.append([int(local[i]), int(remote[i]), size])
        row_of[i] = len(rows) - 1
    return np.array(rows, np.int64), row_of


def quiet_ucx(loopback: bool) -> None:
    """Silence UCX's log, which repeats our own on every lost peer. ``loopback``: bind to loopback only. To be called
    before the first agent is made. Variables that the environment sets already win."""
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    if loopback:
        os.environ["UCX_NET_DEVICES"] = "lo"


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__

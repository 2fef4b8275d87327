"""NIXL agents between nodes: one that lets others read our pool, and one with which we read theirs, also an engine's
worker, into memory of its own that may be a GPU's.

They are two because reading is what goes wrong. UCX cannot take back a read that it has begun: after NIXL has
released it and forgotten the peer, data that a peer sends late still lands in the memory that it was meant for (seen
with NIXL 1.5.1 over TCP). Only when the agent is gone, and its sockets and queues with it, is the memory ours again.
So after a read that failed, ``Reader`` is ``close`` d before anybody hears of it, and replaced, which takes 50 ms.

No agent has a progress thread, which would never sleep: ``Drive`` calls what has to be called while something is
under way.
"""

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower.agent import load_nixl
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, PIECE

logger = get_logger(__name__)

POLL = 50e-6  # seconds between two looks: sockets hold more than a fast network brings in that time
STRETCH = 2e-3  # seconds of looking, before messages and timers get their turn
_PR_SET_TIMERSLACK = 29


class Pool(Protocol):
    """What is needed of ``runner.Pool``: memory that is read from, or into."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class Kind:
    """Of a pool's memory, as NIXL sees it. ``piece``: bytes that are registered at a time, beginning at multiples of
    it; nothing that is read may lie across. ``load``: gives NIXL's Python API, in whichever build this process uses."""

    memory: str = "DRAM"
    device: int = 0
    piece: int = PIECE
    load: Callable[[], Any] = load_nixl


class Drive:
    """Calls ``poll`` s again and again as long as one of them returns true; asleep otherwise. Reactor's thread."""

    def __init__(self, reactor: Reactor, guard: Callable[[Callable[[], None]], Callable[[], None]]):
        self._reactor, self._turn = reactor, guard(self._take_turn)
        self._polls: list[Callable[[], bool]] = []
        self._driving = False

    def add(self, poll: Callable[[], bool]) -> None:
        """``poll``: does a little, without blocking; whether it has more to do."""
        self._polls.append(poll)

    def wake(self) -> None:
        """One of them has something to do."""
        if not self._driving:
            self._driving = True
            # A thread's sleeps are 50 us longer than asked for, by default.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
            self._reactor.call_soon(self._turn)

    def _take_turn(self) -> None:
        end = time.monotonic() + STRETCH
        while any([poll() for poll in self._polls]):  # all of them, each time
            if time.monotonic() >= end:
                self._reactor.call_soon(self._turn)
                return
            time.sleep(POLL)
        self._driving = False


class Registered:
    """An agent and the pieces of the pool that it has registered, each when it is first needed: registering a piece
    that is not usable yet would make it exist, and take a second a few GiB.

    Raises KVTierError if there is no NIXL, or no UCX. ``generation``: counts what was registered.
    """

    def __init__(self, pool: Pool, name: str, kind: Kind | None = None):
        self.kind = kind or Kind()
        self._api = self.kind.load()
        self.name, self._pool = name, pool
        self._agent = self._api.nixl_agent(name, self._api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        try:
            self._agent.create_backend("UCX", {})
        except Exception as error:  # NIXL's own classes, or KeyError
            raise KVTierError(f"NIXL's UCX, which reads between nodes, cannot be used: {_words(error)}") from error
        self._registrations: dict[int, Any] = {}  # by piece
        self._metadata = b""
        self.generation = 0

    def register(self, pieces: set[int]) -> None:
        """Raises KVTierError if the memory cannot be registered."""
        for piece in sorted(pieces - self._registrations.keys()):
            kind, start = self.kind, piece * self.kind.piece
            span = (self._pool.address + start, min(kind.piece, self._pool.nbytes - start), kind.device, "")
            try:
                self._registrations[piece] = self._agent.register_memory([span], kind.memory, backends=["UCX"])
            except Exception as error:
                raise KVTierError(
                    f"memory cannot be registered for the network: {_words(error)}; is the limit on locked memory "
                    "(ulimit -l) high enough?"
                ) from error
            self.generation += 1
            self._metadata = b""

    def close(self) -> bool:
        """False: something still holds the agent, and it goes on."""
        try:
            for registration in self._registrations.values():
                self._agent.deregister_memory(registration, backends=["UCX"])
        except Exception as error:
            logger.debug("kvtier: memory cannot be deregistered: %s", _words(error))
        self._registrations.clear()
        alive = weakref.ref(self._agent.agent)  # which transfers' handles hold, too
        self._agent = None
        gc.collect()
        return alive() is None


class Server(Registered):
    """Lets others read."""

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read all that is registered by now."""
        if not self._metadata:
            self._metadata = self._agent.get_agent_metadata()
        return self._metadata

    def progress(self) -> None:
        """Answer peers' reads where the network cannot by itself."""
        self._agent.get_new_notifs()


class Reader(Registered):
    """Reads. Transfers are NIXL's handles."""

    def __init__(self, pool: Pool, name: str, kind: Kind | None = None):
        super().__init__(pool, name, kind)
        self.peers: dict[str, int] = {}  # generation of the metadata, by agent

    def introduce(self, agent: str, metadata: bytes, generation: int) -> None:
        """Once a generation. Raises KVTierError if it cannot be reached, or is somebody else."""
        if self.peers.get(agent) == generation:
            return
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise KVTierError(f"NIXL cannot reach it: {_words(error)}") from error
        name = name.decode() if isinstance(name, bytes) else name
        if name != agent:
            raise KVTierError(f"its NIXL agent calls itself {name}, not {agent}")
        self.peers[agent] = generation

    def forget(self, agent: str) -> None:
        """Of whom nothing is being read."""
        if self.peers.pop(agent, None) is not None:
            try:
                self._agent.remove_remote_agent(agent)
            except Exception as error:
                logger.debug("kvtier: disconnecting %s: %s", agent, _words(error))

    def begin(self, agent: str, local: np.ndarray, remote: np.ndarray) -> Any:
        """Start to read remote rows into local ones, uint64[n, 3] of (address, bytes, device). Raises KVTierError if
        nothing has begun. May take as long as copying it where the peer is on this machine."""
        try:
            transfer = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, self.kind.memory),
                self._agent.get_xfer_descs(remote, "DRAM"),
                agent,
                backends=["UCX"],
            )
        except Exception as error:
            raise KVTierError(f"NIXL cannot begin to read: {_words(error)}") from error
        try:
            self._agent.transfer(transfer)
        except Exception as error:  # found again by ``state``
            logger.debug("kvtier: a read failed at once: %s", _words(error))
        return transfer

    def state(self, transfer: Any) -> tuple[bool, str]:
        """(whether it is over, why it failed or "")."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except Exception as error:
            return True, _words(error)
        return state != "PROC", "" if state in ("PROC", "DONE") else "NIXL does not say why"

    def release(self, transfer: Any) -> None:
        """Of one that is over, or of a reader that is about to be closed."""
        try:
            transfer.release()
        except Exception as error:
            logger.debug("kvtier: a read cannot be released: %s", _words(error))


def pieces_of(slots: np.ndarray) -> set[int]:
    """Pieces of a pool of DRAM where these pages lie."""
    return set(np.unique(slots // (PIECE // PAGE)).tolist())


def runs(near: np.ndarray, far: np.ndarray, sizes: np.ndarray, most: int, piece: int = PIECE) -> list[np.ndarray]:
    """Blocks (bytes from the beginning of our pool and of the peer's, and sizes) as few rows (near, far, size) of what
    lies side by side on both sides, within one piece of each (``piece``: of ours), of ``most`` bytes at the most unless
    a block is longer: int64[n, 3]. Also returns which row each block is in: int64[blocks]. Blocks keep their order."""
    if not len(near):
        return [np.zeros((0, 3), np.int64), np.zeros(0, np.int64)]
    ends_near, ends_far = near + sizes, far + sizes
    joined = (
        (near[1:] == ends_near[:-1])
        & (far[1:] == ends_far[:-1])
        & (near[1:] // piece == near[:-1] // piece)
        & (far[1:] // PIECE == far[:-1] // PIECE)
    )
    row_of = np.zeros(len(near), np.int64)
    rows: list[list[int]] = [[int(near[0]), int(far[0]), int(sizes[0])]]
    for i, (follows, size) in enumerate(zip(joined.tolist(), sizes[1:].tolist(), strict=True), 1):
        if follows and rows[-1][2] + size <= most:
            rows[-1][2] += size
        else:
            rows.append([int(near[i]), int(far[i]), size])
        row_of[i] = len(rows) - 1
    return [np.array(rows, np.int64), row_of]


def quiet_ucx(loopback: bool) -> None:
    """Before the first agent is made. UCX's own words on every peer that goes are many, and ours say the same.
    ``loopback``: nobody else is to reach it. What the environment says already stands."""
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    if loopback:
        os.environ["UCX_NET_DEVICES"] = "lo"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__

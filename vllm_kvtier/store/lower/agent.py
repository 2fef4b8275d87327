"""A NIXL agent for storage and host memory on a mover's reactor: register, transfer, be told when it is done.

NIXL completes nothing by itself (its own progress thread never sleeps and would cost a core), so the agent is polled:
by a timer, and only while something is under way. Everything here belongs to the reactor's thread.
"""

import ctypes
import importlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

POLL = 250_000  # nanoseconds between looks; the reactor's own timers are of whole milliseconds
_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)
Rows = np.ndarray  # uint64[n, 3]: address in memory, or offset in a file or object; bytes; device, descriptor or number


def load_nixl() -> Any:
    """NIXL's Python API, whichever build is installed. Raises KVTierError if none is.

    The meta package comes last: it imports torch, for seconds, to choose between builds that differ in CUDA only.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read when its library is loaded
    problems = []
    for package in ("nixl_cu13", "nixl_cu12", "nixl"):
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(str(error))
        else:
            logging.getLogger(api.__name__.rpartition(".")[0]).setLevel(logging.WARNING)
            return api
    raise KVTierError(f"NIXL cannot be imported ({problems[0]}); `pip install nixl` to keep blocks below memory")


class Transfer:
    """One under way. ``abort`` it, or wait for ``done``."""

    __slots__ = ("_agent", "done", "handle", "names")

    def __init__(self, agent: "StorageAgent", done: Callable[[bool, str], None]):
        self._agent, self.done = agent, done
        self.handle: Any = None
        self.names: Any = None  # what was registered for it alone

    def abort(self) -> bool:
        """``done`` will not be called. False: NIXL cannot stop it; its memory may be read or written until it has
        ended (``done`` is called then after all), or until this process has."""
        return self._agent._abort(self)


class StorageAgent:
    """``backends``: of NIXL, in order of preference; the first that can be made is ``backend``, and why others could
    not is in ``note``. ``params``: {backend: its parameters}.

    ``on_unsettled(reason)``: a transfer failed in such a way that what is left of it may still write to its memory,
    which is to be reported by nobody as free: pass ``Host.fail``.
    Raises KVTierError if NIXL or every one of the backends is missing.
    """

    def __init__(
        self,
        reactor: Reactor,
        name: str,
        backends: str | Sequence[str],
        params: dict[str, dict[str, str]] | None = None,
        *,
        on_unsettled: Callable[[str], None],
    ):
        api = load_nixl()
        self._reactor, self._on_unsettled = reactor, on_unsettled
        self.name = name
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        self.backend, self.note = self._make(backends, params or {})
        self._under_way: dict[Transfer, None] = {}
        self._ticks = _Ticks(reactor, self._poll)
        self._registered: list[Any] = []
        self._names = itertools.count(1)

    @property
    def under_way(self) -> int:
        """Transfers of which nothing has been said yet."""
        return len(self._under_way)

    # -- memory, files, objects, peers ----------------------------------------------------------------------------

    def register(self, memory: str, rows: Sequence[tuple[int, int, int, str]]) -> Any:
        """Make these known: (address, bytes, 0, "") in "DRAM", (0, bytes, descriptor, "") of "FILE", (0, bytes,
        number, key) of "OBJ". Until ``forget``, or the agent's end. Raises KVTierError."""
        try:
            return self._agent.register_memory(list(rows), memory, backends=[self.backend])
        except Exception as error:  # NIXL's own classes
            raise KVTierError(f"NIXL's {self.backend} cannot use {memory}: {_words(error)}") from error

    def register_pool(self, address: int, nbytes: int) -> None:
        self._registered.append(self.register("DRAM", [(address, nbytes, 0, "")]))

    def register_file(self, fd: int, nbytes: int) -> None:
        self._registered.append(self.register("FILE", [(0, nbytes, fd, "")]))

    def forget(self, registration: Any) -> None:
        """Of ``register``; nothing that uses it may be under way."""
        self._agent.deregister_memory(registration, backends=[self.backend])

    def metadata(self) -> bytes:
        """What a peer's ``add_peer`` needs; made after everything is registered."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """The peer's name. Raises KVTierError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise KVTierError(f"NIXL cannot reach a peer: {_words(error)}") from error
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        """Disconnect; what is under way with it ends with an error."""
        self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        """Let NIXL answer peers that read from us, where the network needs our help; to be called again and again
        while any might."""
        self._agent.get_new_notifs()

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfer(
        self,
        op: str,
        local: Rows,
        remote: Rows | Sequence[str],
        done: Callable[[bool, str], None],
        *,
        memory: str = "FILE",
        peer: str | None = None,
    ) -> Transfer:
        """Begin to "READ" remote rows into local rows (of "DRAM"), or "WRITE" local to remote; equal lengths each.

        ``memory``: what remote rows are: "FILE", "OBJ", or "DRAM" of a ``peer``. Names instead of rows: whole
        objects. ``done(good, error)`` is called exactly once, never before this returns; the memory is free then
        (but see ``on_unsettled``). One bad row fails all.
        """
        transfer = Transfer(self, done)
        self._under_way[transfer] = None
        try:
            if not isinstance(remote, np.ndarray):
                remote, transfer.names = self._named(remote, local[:, 1], memory)
            api = self._agent
            transfer.handle = api.initialize_xfer(
                op,
                api.get_xfer_descs(np.ascontiguousarray(local, dtype=np.uint64), "DRAM"),
                api.get_xfer_descs(np.ascontiguousarray(remote, dtype=np.uint64), memory),
                peer or self.name,
                backends=[self.backend],
            )
        except Exception as error:  # nothing has begun
            reason = f"NIXL could not begin to {op.lower()}: {_words(error)}"
            self._reactor.call_soon(lambda: self._end(transfer, reason))
            return transfer
        try:
            state = api.transfer(transfer.handle)
        except Exception as error:
            state, reason = "ERR", _words(error)
        else:
            reason = "it does not say why"
        if state == "ERR":
            reason = f"NIXL could not {op.lower()}: {reason}"
            self._on_unsettled(reason)
            self._reactor.call_soon(lambda: self._end(transfer, reason))
        elif state == "DONE":
            self._reactor.call_soon(lambda: self._end(transfer, ""))
        else:
            self._ticks.run(True)
        return transfer

    def close(self) -> None:
        """No callback comes any more. What is under way goes on until the process has ended."""
        self._under_way.clear()
        self._ticks.close()

    def _make(self, backends: str | Sequence[str], params: dict) -> tuple[str, str]:
        problems = []
        for backend in [backends] if isinstance(backends, str) else backends:
            if backend not in self._agent.plugin_list:
                problems.append(f"NIXL has no {backend} here")
                continue
            try:
                self._agent.create_backend(backend, params.get(backend, {}))
                return backend, "; ".join(problems)
            except Exception as error:
                problems.append(f"NIXL's {backend} cannot be used: {_words(error)}")
        raise KVTierError("; ".join(problems))

    def _named(self, names: Sequence[str], lengths: np.ndarray, memory: str) -> tuple[Rows, Any]:
        rows = np.zeros((len(names), 3), np.uint64)
        rows[:, 1] = lengths
        rows[:, 2] = [next(self._names) for _ in names]
        named = [(0, int(n), int(number), name) for (_, n, number), name in zip(rows, names, strict=True)]
        return rows, self.register(memory, named)

    def _poll(self) -> None:
        try:
            for transfer in list(self._under_way):
                if transfer.handle is None or transfer not in self._under_way:
                    continue  # one's end may abort another
                try:
                    state = self._agent.check_xfer_state(transfer.handle)
                    reason = "it failed, and NIXL does not say why"
                except Exception as error:
                    state, reason = "ERR", _words(error)
                if state != "PROC":
                    self._end(transfer, "" if state == "DONE" else reason)
        finally:
            self._ticks.run(bool(self._under_way))

    def _end(self, transfer: Transfer, error: str) -> None:
        if transfer not in self._under_way:
            return
        del self._under_way[transfer]
        self._free(transfer)
        transfer.done(not error, error)

    def _abort(self, transfer: Transfer) -> bool:
        if transfer not in self._under_way:
            return True
        try:
            if transfer.handle is not None:
                transfer.handle.release()
        except Exception as error:
            logger.debug("kvtier: a transfer cannot be stopped: %s", error)
            return False
        del self._under_way[transfer]
        self._free(transfer)
        return True

    def _free(self, transfer: Transfer) -> None:
        try:
            if transfer.handle is not None:
                transfer.handle.release()
            if transfer.names is not None:
                self.forget(transfer.names)
        except Exception as error:
            logger.warning("kvtier: NIXL cannot free a transfer: %s", error)


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class _Ticks:
    """Calls ``tick()`` every POLL nanoseconds, late ones not again, while it runs: a timerfd."""

    def __init__(self, reactor: Reactor, tick: Callable[[], None]):
        self._reactor, self._tick, self._runs = reactor, tick, False
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise KVTierError(f"no timer can be had: {os.strerror(ctypes.get_errno())}")
        reactor.add_fd(self._fd, self._ready)

    def run(self, on: bool) -> None:
        if on != self._runs and self._fd >= 0:
            self._runs = on
            every = POLL if on else 0
            _libc.timerfd_settime(self._fd, 0, ctypes.byref(_Times(0, every, 0, every)), None)

    def close(self) -> None:
        if self._fd >= 0:
            self._reactor.remove_fd(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self, events: int) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # stopped meanwhile
        self._tick()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__

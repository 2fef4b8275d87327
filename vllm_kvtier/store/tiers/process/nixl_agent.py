"""A NIXL agent for storage and host memory on a tier process's reactor: register memory, transfer, report the end.

NIXL's own progress thread never sleeps and would occupy a core. Instead a timer polls the agent while transfers are in
flight. Everything runs on the reactor's thread.
"""

import ctypes
import importlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

POLL_NANOSECONDS = 250_000  # the reactor's own timers have a resolution of 1 ms
_CLOCK_MONOTONIC = 1
_libc = ctypes.CDLL(None, use_errno=True)
Rows = np.ndarray  # uint64[n, 3]: address in memory, or offset in a file; bytes; device or descriptor


def load_nixl() -> Any:
    """Import NIXL's Python API, in the build that is installed. Raises KVTierError if none is.

    The meta package comes last: it imports torch, which takes seconds, to choose the build for its CUDA version.
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
    raise KVTierError(f"NIXL cannot be imported ({problems[0]}); `pip install nixl` to use secondary tiers")


class Transfer:
    """A transfer in flight. ``abort`` it, or wait for ``done``."""

    __slots__ = ("_agent", "done", "handle")

    def __init__(self, agent: "StorageAgent", done: Callable[[bool, str], None]):
        self._agent, self.done = agent, done
        self.handle: Any = None

    def abort(self) -> bool:
        """Stop it; ``done`` is not called. False: NIXL cannot stop it, and its memory may be read or written until
        ``done`` is called or this process ends."""
        return self._agent._abort(self)


class StorageAgent:
    """``backends``: of NIXL, in order of preference. ``backend`` is the first that works; ``note`` says why earlier
    ones do not. ``params``: {backend: its parameters}.

    ``on_unsettled(reason)``: a transfer failed, but may still write to its memory, which must not be reported as free:
    pass ``TierProcessMain.fail``. Raises KVTierError if NIXL or all backends are missing.
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

    @property
    def under_way(self) -> int:
        """Transfers in flight."""
        return len(self._under_way)

    # -- memory, files -----------------------------------------------------------------------------------

    def register(self, memory: str, rows: Sequence[tuple[int, int, int, str]]) -> Any:
        """Register (address, bytes, 0, "") of "DRAM", or (0, bytes, descriptor, "") of "FILE", until the agent's
        end. Raises KVTierError."""
        try:
            return self._agent.register_memory(list(rows), memory, backends=[self.backend])
        except Exception as error:  # NIXL's own classes
            raise KVTierError(f"NIXL's {self.backend} cannot use {memory}: {_text(error)}") from error

    def register_pool(self, address: int, nbytes: int) -> None:
        self._registered.append(self.register("DRAM", [(address, nbytes, 0, "")]))

    def register_file(self, fd: int, nbytes: int) -> None:
        self._registered.append(self.register("FILE", [(0, nbytes, fd, "")]))

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfer(
        self,
        op: str,
        local: Rows,
        remote: Rows,
        done: Callable[[bool, str], None],
    ) -> Transfer:
        """Start to "READ" remote rows (of "FILE") into local rows (of "DRAM"), or to "WRITE" local to remote; equal
        lengths each.

        ``done(good, error)`` is called exactly once, never before this returns; the memory is free then (but see
        ``on_unsettled``). One bad row fails all.
        """
        transfer = Transfer(self, done)
        self._under_way[transfer] = None
        try:
            api = self._agent
            transfer.handle = api.initialize_xfer(
                op,
                api.get_xfer_descs(np.ascontiguousarray(local, dtype=np.uint64), "DRAM"),
                api.get_xfer_descs(np.ascontiguousarray(remote, dtype=np.uint64), "FILE"),
                self.name,
                backends=[self.backend],
            )
        except Exception as error:  # the transfer has not started
            reason = f"NIXL could not begin to {op.lower()}: {_text(error)}"
            self._reactor.call_soon(lambda: self._end(transfer, reason))
            return transfer
        try:
            state = api.transfer(transfer.handle)
        except Exception as error:
            state, reason = "ERR", _text(error)
        else:
            reason = "no reason given"
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
        """Make no further callbacks. Transfers in flight go on until the process ends."""
        self._under_way.clear()
        self._ticks.close()

    def _make(self, backends: str | Sequence[str], params: dict[str, dict[str, str]]) -> tuple[str, str]:
        problems = []
        for backend in [backends] if isinstance(backends, str) else backends:
            if backend not in self._agent.plugin_list:
                problems.append(f"NIXL has no {backend} here")
                continue
            try:
                self._agent.create_backend(backend, params.get(backend, {}))
                return backend, "; ".join(problems)
            except Exception as error:
                problems.append(f"NIXL's {backend} cannot be used: {_text(error)}")
        raise KVTierError("; ".join(problems))

    def _poll(self) -> None:
        try:
            for transfer in list(self._under_way):
                if transfer.handle is None or transfer not in self._under_way:
                    continue  # a callback may abort another transfer
                try:
                    state = self._agent.check_xfer_state(transfer.handle)
                    reason = "it failed, and NIXL gives no reason"
                except Exception as error:
                    state, reason = "ERR", _text(error)
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
        except Exception as error:
            logger.warning("kvtier: NIXL cannot free a transfer: %s", error)


class _Times(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class _Ticks:
    """Calls ``tick()`` every POLL_NANOSECONDS while it runs, by a timerfd; missed ticks are skipped."""

    def __init__(self, reactor: Reactor, tick: Callable[[], None]):
        self._reactor, self._tick, self._runs = reactor, tick, False
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise KVTierError(f"timerfd_create failed: {os.strerror(ctypes.get_errno())}")
        reactor.add_fd(self._fd, self._ready)

    def run(self, on: bool) -> None:
        if on != self._runs and self._fd >= 0:
            self._runs = on
            every = POLL_NANOSECONDS if on else 0
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


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__

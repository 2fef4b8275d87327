"""One process's connection to the cluster's master, and the threads that make its blocking calls.

A thread sets the client up once the master accepts connections, because the set-up blocks for 90 s without. If a call
says that the master failed, the connection is unusable, and the thread asks again each second.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.mooncake.client import Client, MooncakeClient, load_library, master_failed
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions, reachable
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

RETRY_SECONDS = 1.0
REACH_SECONDS = 1.0  # for a connection to the master
SETUP_SECONDS = 20.0  # plus what the segment takes, and with RDMA the pool; a longer set-up ends the process
SETUP_RATE = 256 << 20  # bytes/s

Connect = Callable[[MooncakeOptions, int, int, int], Client]


class MasterConnection:
    """``segment_bytes``: memory that this process gives to the cluster. ``connect``: as ``MooncakeClient``."""

    def __init__(
        self, host: TierProcessMain, options: MooncakeOptions, segment_bytes: int, connect: Connect = MooncakeClient
    ):
        self._host, self._options, self._segment_bytes, self._connect = host, options, segment_bytes, connect
        self._client: Client | None = None
        self._usable = False
        self._reported: m.Availability | None = None
        self._reporting = threading.Lock()
        self._closed = False
        self._wake = threading.Event()
        self._watchdog: Timer | None = None

    @property
    def client(self) -> Client | None:
        """None: unusable now."""
        return self._client if self._usable else None

    def open(self) -> None:
        """Raises KVTierError if the library is missing."""
        if self._connect is MooncakeClient:
            load_library()
            _hide_library_log()
        threading.Thread(target=self._host.guard(self._run), name="kvtier-master", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def check(self, codes: Sequence[int]) -> Sequence[int]:
        """Return ``codes``; if one says that the master failed, the connection is unusable. Any thread."""
        if code := master_failed(codes):
            self.failed(f"the master at {self._options.master} has failed (code {code})")
        return codes

    def failed(self, reason: str, late: bool = False) -> None:
        """A call failed because of the master; ``late``: it took too long. Any thread."""
        self._usable = False
        self._report(False, reason, late)
        self._wake.set()

    # -- its thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            if self._ask():
                self._wake.wait()
            else:
                self._wake.wait(RETRY_SECONDS)

    def _ask(self) -> bool:
        """Connect, if that is still to be done, and ask whether the master answers."""
        if self._client is None:
            if not any(reachable(address, REACH_SECONDS) for address in self._options.probes):
                self._report(False, f"{self._options.master} cannot be reached")
                return False
            self._set_up()
        if self._client is None:
            return False
        code = self._client.ping()
        if code:
            self._report(False, f"the master at {self._options.master} has failed (code {code})")
            return False
        self._usable = True
        self._report(True, "")
        return True

    def _set_up(self) -> None:
        self._host.reactor.call_soon(self._watch)
        pool = self._host.pool
        try:
            self._client = self._connect(self._options, pool.address, pool.nbytes, self._segment_bytes)
        except (KVTierError, OSError) as error:  # what is set up halfway cannot be ended but with the process
            self._host.fail(str(error))
            self._closed = True
        self._host.reactor.call_soon(self._watched)

    def _watch(self) -> None:
        pinned = self._host.pool.nbytes if self._options.protocol == "rdma" else 0
        seconds = SETUP_SECONDS + (self._segment_bytes + pinned) / SETUP_RATE
        late = f"the set-up of Mooncake's client took more than {seconds:.0f} s"
        self._watchdog = self._host.reactor.call_later(seconds, lambda: self._host.fail(late))

    def _watched(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _report(self, usable: bool, reason: str, late: bool = False) -> None:
        report = m.Availability(usable, reason[:1000], self._client.name if self._client is not None else "", late)
        with self._reporting:  # what was sent last is what is remembered
            if report != self._reported and not self._closed:
                self._reported = report
                self._host.send(report)


def _hide_library_log() -> None:
    """Drop what the library writes to stderr, several lines for each failed block; this process's own log stays."""
    sys.stderr.flush()
    own = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setStream(own)
    sys.stderr = own


def slots_of(host: TierProcessMain, moves: Sequence[m.Move]) -> tuple[list[int], list[int]]:
    """Addresses and sizes of slots. Raises KVTierError if one is outside the pool: the process ends."""
    addresses, sizes = [], []
    for move in moves:
        first, nbytes = move.slot * PAGE, move.pages * PAGE
        if not 0 < first < first + nbytes <= host.pool.nbytes:
            raise KVTierError(f"slot {move.slot} of {move.pages} pages is not in the pool")
        addresses.append(host.pool.address + first)
        sizes.append(nbytes)
    return addresses, sizes

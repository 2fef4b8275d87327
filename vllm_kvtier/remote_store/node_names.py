"""Stores that are found by DNS: a name with an address for each of them, as a headless Service of Kubernetes has."""

import hashlib
import socket
import threading
from collections.abc import Callable, Sequence

from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store.options import MAX_NODES, Address
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

REFRESH_SECONDS = 10.0  # CoreDNS's answers are valid for 5 to 30 s
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)


def resolve(name: Address) -> set[Address]:
    """Blocks, perhaps for seconds. Raises socket.gaierror."""
    found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return {Address(str(address[4][0]), name.port) for address in found}


class NodeNames:
    """Resolves ``names`` every REFRESH_SECONDS on a thread, until the reactor stops.

    ``on_change(addresses)`` is called on the reactor's thread when the addresses have changed. A name that DNS does not
    have, or that has no address, stands for no store. If DNS does not answer, its last answer stays valid. Of more than
    MAX_NODES addresses some are taken, by the hash of ``instance`` and address: each store takes others.
    """

    def __init__(
        self,
        reactor: Reactor,
        names: Sequence[Address],
        instance: str,
        on_change: Callable[[tuple[Address, ...]], None],
        resolve: Callable[[Address], set[Address]] = resolve,
    ):
        self._reactor, self._instance, self._on_change, self._resolve = reactor, instance, on_change, resolve
        self._known: dict[Address, set[Address]] = {name: set() for name in names}
        self._addresses: tuple[Address, ...] = ()
        self._logged: dict[Address, str] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Nothing happens without names. On the reactor's thread, or before it starts."""
        if self._known:
            self._reactor.on_stop(self._stopped.set)
            threading.Thread(target=self._run, name="kvtier-dns", daemon=True).start()

    def refresh(self) -> None:
        """Resolve each name once. Blocks; not on the reactor's thread."""
        for name in self._known:
            self._refresh(name)
        found = sorted(set().union(*self._known.values()), key=self._order)
        addresses = tuple(found[:MAX_NODES])
        if addresses == self._addresses:
            return
        logger.info("kvtier: remote store: %d stores by name, %d of them are asked", len(found), len(addresses))
        self._addresses = addresses
        self._reactor.call_soon(lambda: self._on_change(addresses))

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.refresh()
            self._stopped.wait(REFRESH_SECONDS)

    def _refresh(self, name: Address) -> None:
        try:
            self._known[name] = self._resolve(name)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESS:
                self._known[name] = set()
            if self._logged.get(name) != str(error):
                self._logged[name] = str(error)
                kept = len(self._known[name])
                logger.warning("kvtier: remote store: name %s: %s; %d known addresses stay", name, error, kept)
        else:
            self._logged.pop(name, None)

    def _order(self, address: Address) -> bytes:
        return hashlib.blake2b(f"{self._instance} {address}".encode()).digest()

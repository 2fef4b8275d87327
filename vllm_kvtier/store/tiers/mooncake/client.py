"""Mooncake's client library, as far as it is used: blocking calls with keys, addresses and sizes, and codes as results.

Codes below 0 are errors, for each key of a batch: see ``Code``. The library is imported on use.
"""

import enum
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions

KEY_PREFIX = "kvtier"
PING_KEY = f"{KEY_PREFIX}/ping"  # never stored
INSTALL = "pip install 'vllm-kvtier[mooncake]', or [mooncake-cuda] beside CUDA"
LIBRARIES = "Debian and Ubuntu: apt-get install libibverbs1 ibverbs-providers libnuma1 libcurl4"
# Read by the library when it is loaded: an unresponsive master fails a call after these times instead of 30 s.
ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_LOG_LEVEL": "ERROR",
}


class Code(enum.IntEnum):
    """Mooncake's error codes that are handled differently."""

    NO_SPACE = -200
    BAD_ARGUMENT = -600  # also an object that is larger than its slot
    NOT_FOUND = -704
    LEASE_ENDED = -707  # before the data were read
    TRANSFER = -800
    MASTER_GONE = -900
    MASTER_SILENT = -901


# Of a read: nothing was begun, or all of it has ended. After any other error data may still arrive.
HARMLESS = frozenset({Code.BAD_ARGUMENT, Code.NOT_FOUND, Code.LEASE_ENDED, Code.MASTER_GONE, Code.MASTER_SILENT})


def master_failed(codes: Sequence[int]) -> int:
    """The code among ``codes`` that says that the master failed; 0: none does."""
    return next((code for code in codes if code <= Code.MASTER_GONE), 0)


class Client(Protocol):
    """A connection to the cluster. Every call blocks; all but ``close`` may be called on any thread."""

    name: str  # of this client's segment, for ``put`` and ``copy``

    def exist(self, keys: Sequence[str]) -> list[int]:
        """By key 1, 0 or an error. Those that exist are leased for the master's lease time (10 s)."""

    def places(self, keys: Sequence[str]) -> dict[str, list[str]]:
        """Of the keys that exist, where their complete copies are; reads take the first. Leases them too."""

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read objects into memory of the pool. By key its size or an error."""

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Write objects, first into this client's own segment. 0 is no proof that an object is stored: another writer
        may have left it unfinished."""

    def copy(self, key: str) -> int:
        """Ask for one more copy, in this client's own segment; made in the background."""

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove objects although they are leased."""

    def ping(self) -> int:
        """0, or the master's error."""


class MooncakeClient:
    """Raises KVTierError if the library is missing or has another version of the protocol than the master, and OSError
    without a route to the master. ``segment_bytes``: memory of this process that the cluster may use."""

    def __init__(self, options: MooncakeOptions, pool_address: int, pool_bytes: int, segment_bytes: int):
        library = load_library()
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(
            options.own_host(),
            "P2PHANDSHAKE",
            segment_bytes,
            0,
            options.protocol,
            options.devices,
            options.master,
        )
        if code:
            raise KVTierError(
                f"Mooncake's client cannot be set up (code {code}); are master and client of one version, and is there "
                f"{segment_bytes >> 20} MiB of memory?"
            )
        code = self._store.register_buffer(pool_address, pool_bytes) if pool_bytes else 0
        if code:
            raise KVTierError(f"Mooncake's client cannot register the store's memory (code {code})")
        self.name = str(self._store.get_hostname())
        self._config = library.ReplicateConfig()
        self._config.replica_num = 1
        if segment_bytes:
            self._config.preferred_segment = self.name
        self._complete = library.ReplicaStatus.COMPLETE

    def exist(self, keys: Sequence[str]) -> list[int]:
        return list(self._store.batch_is_exist(list(keys)))

    def places(self, keys: Sequence[str]) -> dict[str, list[str]]:
        found: Mapping[str, Sequence[Any]] = self._store.batch_get_replica_desc(list(keys))
        return {
            key: [
                replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
                for replica in replicas
                if replica.status == self._complete and replica.is_memory_replica()
            ]
            for key, replicas in found.items()
        }

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return list(self._store.batch_get_into(list(keys), list(addresses), list(sizes)))

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return list(self._store.batch_put_from(list(keys), list(addresses), list(sizes), self._config))

    def copy(self, key: str) -> int:
        _, code = self._store.create_copy_task(key, [self.name])
        return int(code)

    def remove(self, keys: Sequence[str]) -> list[int]:
        return list(self._store.batch_remove(list(keys), True))

    def ping(self) -> int:
        return min(0, int(self._store.is_exist(PING_KEY)))


def load_library() -> Any:
    """Import ``mooncake.store``. Raises KVTierError that says what to install."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise KVTierError(f"Mooncake's library is not installed ({error}): {INSTALL}") from error
    except ImportError as error:
        raise KVTierError(f"Mooncake's library cannot be loaded ({error}); {LIBRARIES}") from error


def key_of(namespace_id: bytes, group: int, block_hash: bytes) -> str:
    """The object of a block. It names no rank: the namespace has the ranks' shape, and a slot the parts of all."""
    return f"{KEY_PREFIX}/{namespace_id.hex()}/g{group}/{block_hash.hex()}"

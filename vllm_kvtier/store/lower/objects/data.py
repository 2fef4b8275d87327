"""How an object store's bytes get from and to the pool: by NIXL's OBJ plugin where it loads, else by boto3's threads.

Questions, deletions and explanations are boto3's in both cases: OBJ only moves bytes, and says no more than that it
failed. Both find the credentials by themselves, in the usual places.
"""

import abc
import ctypes
import glob
import os
import secrets
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower.agent import StorageAgent
from vllm_kvtier.store.lower.objects.clients import ATTEMPTS, Bucket, Kind, Trouble
from vllm_kvtier.store.lower.objects.jobs import Done, Hands
from vllm_kvtier.store.lower.runner import Host

logger = get_logger(__name__)

OBJ_THREADS = 16
SENTINEL = 16  # bytes
MOST_FAILED = 8
LIBRARY = "libcuobjclient.so.1"  # that OBJ needs to be loaded, also where nothing of it is used


class Data(abc.ABC):
    """``first``: byte of the pool where the block begins. ``done`` is called on the reactor's thread, once, when the
    block's memory is not in use any more."""

    @abc.abstractmethod
    def get(self, key: str, first: int, nbytes: int, deadline: float, done: Done) -> None:
        """Kind.ABSENT if the object is not there, or is not so long. ``deadline``: time.monotonic()."""

    @abc.abstractmethod
    def put(self, key: str, first: int, nbytes: int, done: Done) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class BucketData(Data):
    def __init__(self, host: Host, bucket: Bucket, reads: int, uploads: Hands):
        self._pool, self._bucket = host.pool, bucket
        self._reads, self._uploads = Hands(host, reads, "read"), uploads

    def get(self, key, first, nbytes, deadline, done):
        into = self._pool.view[first : first + nbytes]
        self._reads.do(lambda: self._bucket.get(key, into, deadline), done)

    def put(self, key, first, nbytes, done):
        data = self._pool.view[first : first + nbytes]
        self._uploads.do(lambda: self._bucket.put(key, data), done)

    def close(self):
        self._reads.close()


class NixlData(Data):
    """``agent``: a StorageAgent with OBJ and the pool registered. ``other``: does what OBJ fails to, and can say why
    if it fails too. If it succeeds again and again, OBJ is given up.

    OBJ reads what there is of an object and calls it a success. So the end of the slot, where a block has a checksum,
    gets random bytes before the read: if they are still there after it, the object was too short.

    OBJ cannot stop what it has begun: a request that never ends, ends with this process.
    """

    def __init__(self, host: Host, agent, other: Data):
        self._pool, self._agent, self._other = host.pool, agent, other
        self._failed = 0  # times in a row that OBJ failed and the other did not

    def get(self, key, first, nbytes, deadline, done):
        if self._failed >= MOST_FAILED:
            self._other.get(key, first, nbytes, deadline, done)
            return
        end = self._pool.view[first + nbytes - SENTINEL : first + nbytes]
        sentinel = secrets.token_bytes(SENTINEL)
        end[:] = sentinel

        def ended(good: bool, error: str) -> None:
            if not good:
                self._other.get(key, first, nbytes, deadline, self._instead(done))
            elif end == sentinel:
                done(Trouble(f"an object is shorter than {nbytes} bytes", Kind.ABSENT))
            else:
                self._failed = 0
                done(None)

        self._transfer("READ", key, first, nbytes, ended)

    def put(self, key, first, nbytes, done):
        if self._failed >= MOST_FAILED:
            self._other.put(key, first, nbytes, done)
            return

        def ended(good: bool, error: str) -> None:
            if good:
                self._failed = 0
                done(None)
            else:
                self._other.put(key, first, nbytes, self._instead(done))

        self._transfer("WRITE", key, first, nbytes, ended)

    def close(self):
        self._agent.close()
        self._other.close()

    def _transfer(self, op: str, key: str, first: int, nbytes: int, ended: Callable[[bool, str], None]) -> None:
        row = np.array([[self._pool.address + first, nbytes, 0]], np.uint64)
        self._agent.transfer(op, row, [key], ended, memory="OBJ")

    def _instead(self, done: Done) -> Done:
        def ended(trouble: Trouble | None) -> None:
            if trouble is None:
                self._failed += 1
                if self._failed == MOST_FAILED:
                    logger.warning("kvtier: NIXL's OBJ fails where boto3 does not: boto3 moves the bytes from now on")
            done(trouble)

        return ended


def nixl_data(host: Host, bucket: Bucket, other: Data) -> NixlData:
    """Raises KVTierError if NIXL or its OBJ plugin cannot be loaded."""
    # At other levels it prints what servers say, for anybody to read; boto3 tells us what went wrong.
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    # As boto3 is told; the C++ SDK hears of it in no other way, and would try for most of a minute.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    load_library()
    params = {"OBJ": obj_params(bucket)}
    try:
        agent = StorageAgent(host.reactor, f"kvtier-object-{os.getpid()}", "OBJ", params, on_unsettled=host.fail)
        agent.register_pool(host.pool.address, host.pool.nbytes)
    except RuntimeError as error:  # of NIXL itself, where no plugin is found
        raise KVTierError(f"NIXL cannot be used: {type(error).__name__}") from error
    return NixlData(host, agent, other)


def obj_params(bucket: Bucket) -> dict[str, str]:
    """OBJ's parameters. Without credentials: it finds them where boto3 does, and what it is told it may print."""
    params = {
        "bucket": bucket.place.bucket,
        "region": bucket.region or "us-east-1",
        "use_virtual_addressing": str(bucket.virtual_addressing).lower(),
        "num_threads": str(OBJ_THREADS),
        "req_checksum": "required",  # blocks have their own, and not every S3 understands these
        "resp_checksum": "required",
    }
    if not bucket.at_amazon:
        params["endpoint_override"] = bucket.endpoint
        params["scheme"] = bucket.endpoint.partition(":")[0]
    certificates = os.environ.get("AWS_CA_BUNDLE") or ssl.get_default_verify_paths().cafile
    if certificates and params.get("scheme") != "http":
        params["ca_bundle"] = certificates
    return params


def load_library() -> None:
    """Load ``LIBRARY`` from where its packages put it, so that the plugin finds it loaded. Raises KVTierError.

    It comes with no wheel: NVIDIA's apt and dnf repositories have it (libcuobjclient-13-*), conda-forge and the CUDA
    redistributables too.
    """
    places = [LIBRARY]  # LD_LIBRARY_PATH and what ldconfig knows
    for path in (os.environ.get("CONDA_PREFIX"), sys.prefix):
        if path:
            places.append(str(Path(path) / "lib" / LIBRARY))
    places += sorted(glob.glob(f"/usr/local/cuda*/lib64/{LIBRARY}"), reverse=True)
    places += sorted(glob.glob(f"/usr/local/cuda*/targets/*/lib/{LIBRARY}"), reverse=True)
    for place in places:
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            logger.debug("kvtier: %s", error)
    raise KVTierError(
        f"its plugin needs {LIBRARY}, which is not found; install libcuobjclient from NVIDIA's CUDA repository "
        "(apt, dnf) or conda-forge, or name its folder in LD_LIBRARY_PATH"
    )

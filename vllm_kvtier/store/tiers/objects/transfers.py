"""Transfers between the pool and an object store: by NIXL's OBJ plugin if it can be loaded, else by boto3 on threads.

OBJ only moves bytes and gives no reason for a failure. boto3 does all other requests and explains failures. Both find
the credentials themselves.
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
from vllm_kvtier.store.tiers.objects.request_pool import Done, RequestPool
from vllm_kvtier.store.tiers.objects.s3_client import MAX_ATTEMPTS, Bucket, Kind, Trouble
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.store.tiers.process.nixl_agent import StorageAgent

logger = get_logger(__name__)

OBJ_THREADS = 16
SENTINEL_BYTES = 16  # bytes
MAX_FAILURES = 8  # of OBJ in a row
LIBRARY = "libcuobjclient.so.1"  # OBJ cannot be loaded without it, even if it is not used


class Data(abc.ABC):
    """``first``: the block's first byte in the pool. ``done`` is called once, on the reactor's thread, when the block's
    memory is no longer in use."""

    @abc.abstractmethod
    def get(self, key: str, first: int, nbytes: int, deadline: float, done: Done) -> None:
        """Kind.ABSENT if the object does not exist or is shorter. ``deadline``: time.monotonic()."""

    @abc.abstractmethod
    def put(self, key: str, first: int, nbytes: int, done: Done) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class BucketData(Data):
    def __init__(self, host: TierProcessMain, bucket: Bucket, reads: int, uploads: RequestPool):
        self._pool, self._bucket = host.pool, bucket
        self._reads, self._uploads = RequestPool(host, reads, "read"), uploads

    def get(self, key: str, first: int, nbytes: int, deadline: float, done: Done) -> None:
        into = self._pool.view[first : first + nbytes]
        self._reads.do(lambda: self._bucket.get(key, into, deadline), _result_to(done))

    def put(self, key: str, first: int, nbytes: int, done: Done) -> None:
        data = self._pool.view[first : first + nbytes]
        self._uploads.do(lambda: self._bucket.put(key, data), _result_to(done))

    def close(self) -> None:
        self._reads.close()


def _result_to(done: Done) -> Callable[[object], None]:
    return lambda result: done(result if isinstance(result, Trouble) else None)


class NixlData(Data):
    """``agent``: a StorageAgent with OBJ and the pool registered. ``other``: repeats what fails with OBJ, and gives the
    reason if it fails too. After MAX_FAILURES that ``other`` does not share, OBJ is no longer used.

    OBJ reports success for a shorter object. So the slot's last bytes, where a block has its checksum, are set to
    random bytes before the read: if they remain, the object was too short.

    OBJ cannot cancel a request: one that never ends is ended with this process.
    """

    def __init__(self, host: TierProcessMain, agent: StorageAgent, other: Data):
        self._pool, self._agent, self._other = host.pool, agent, other
        self._failures = 0  # in a row

    def get(self, key: str, first: int, nbytes: int, deadline: float, done: Done) -> None:
        if self._failures >= MAX_FAILURES:
            self._other.get(key, first, nbytes, deadline, done)
            return
        end = self._pool.view[first + nbytes - SENTINEL_BYTES : first + nbytes]
        sentinel = secrets.token_bytes(SENTINEL_BYTES)
        end[:] = sentinel

        def ended(good: bool, error: str) -> None:
            if not good:
                self._other.get(key, first, nbytes, deadline, self._instead(done))
            elif end == sentinel:
                done(Trouble(f"an object is shorter than {nbytes} bytes", Kind.ABSENT))
            else:
                self._failures = 0
                done(None)

        self._transfer("READ", key, first, nbytes, ended)

    def put(self, key: str, first: int, nbytes: int, done: Done) -> None:
        if self._failures >= MAX_FAILURES:
            self._other.put(key, first, nbytes, done)
            return

        def ended(good: bool, error: str) -> None:
            if good:
                self._failures = 0
                done(None)
            else:
                self._other.put(key, first, nbytes, self._instead(done))

        self._transfer("WRITE", key, first, nbytes, ended)

    def close(self) -> None:
        self._agent.close()
        self._other.close()

    def _transfer(self, op: str, key: str, first: int, nbytes: int, ended: Callable[[bool, str], None]) -> None:
        row = np.array([[self._pool.address + first, nbytes, 0]], np.uint64)
        self._agent.transfer(op, row, [key], ended, memory="OBJ")

    def _instead(self, done: Done) -> Done:
        def ended(trouble: Trouble | None) -> None:
            if trouble is None:
                self._failures += 1
                if self._failures == MAX_FAILURES:
                    logger.warning("kvtier: object tier: NIXL's OBJ failed %d times; boto3 is used", MAX_FAILURES)
            done(trouble)

        return ended


def nixl_data(host: TierProcessMain, bucket: Bucket, other: Data) -> NixlData:
    """Raises KVTierError if NIXL or its OBJ plugin cannot be loaded."""
    # At other levels it logs the servers' answers, which may contain secrets; boto3 reports the errors.
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    # The same as boto3's configuration. Without it the C++ SDK retries for most of a minute.
    os.environ.setdefault("AWS_RETRY_MODE", "standard")
    os.environ.setdefault("AWS_MAX_ATTEMPTS", str(MAX_ATTEMPTS))
    load_library()
    params = {"OBJ": obj_params(bucket)}
    try:
        agent = StorageAgent(host.reactor, f"kvtier-object-{os.getpid()}", "OBJ", params, on_unsettled=host.fail)
        agent.register_pool(host.pool.address, host.pool.nbytes)
    except RuntimeError as error:  # NIXL without any plugin
        raise KVTierError(f"NIXL is not usable: {type(error).__name__}") from error
    return NixlData(host, agent, other)


def obj_params(bucket: Bucket) -> dict[str, str]:
    """OBJ's parameters. Without credentials, because OBJ logs its parameters; it finds them where boto3 does."""
    params = {
        "bucket": bucket.location.bucket,
        "region": bucket.region or "us-east-1",
        "use_virtual_addressing": str(bucket.virtual_addressing).lower(),
        "num_threads": str(OBJ_THREADS),
        "req_checksum": "required",  # blocks have their own, and not every S3 server supports these
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
    """Load ``LIBRARY`` from the folders of its packages, so that the plugin finds it. Raises KVTierError.

    No wheel contains it. NVIDIA's apt and dnf repositories (libcuobjclient-13-*), conda-forge and the CUDA
    redistributables do.
    """
    paths = [LIBRARY]  # in LD_LIBRARY_PATH and ldconfig's cache
    for prefix in (os.environ.get("CONDA_PREFIX"), sys.prefix):
        if prefix:
            paths.append(str(Path(prefix) / "lib" / LIBRARY))
    paths += sorted(glob.glob(f"/usr/local/cuda*/lib64/{LIBRARY}"), reverse=True)
    paths += sorted(glob.glob(f"/usr/local/cuda*/targets/*/lib/{LIBRARY}"), reverse=True)
    for path in paths:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            logger.debug("kvtier: %s", error)
    raise KVTierError(
        f"its plugin needs {LIBRARY}, which was not found; install libcuobjclient from NVIDIA's CUDA repository "
        "(apt, dnf) or conda-forge, or add its folder to LD_LIBRARY_PATH"
    )

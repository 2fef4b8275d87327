"""GPU memory shared between engines of a node by CUDA IPC: handles of ours for peers, and peers' memory mapped here.

Whole allocations are shared: a process of the same user that maps one sees everything in it. A mapping keeps the memory
alive when its process has ended: a late read gets unverified data, but no bad address.
"""

from collections.abc import Iterable

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.messages import Shared, SharedSpan
from vllm_kvtier.worker.device.cuda_driver import CudaError, Driver
from vllm_kvtier.worker.peer_fetch import process_memory


def share(spans: Iterable[tuple[int, int]], device: torch.device, driver: Driver | None = None) -> Shared:
    """This process's identity, and handles of the allocations under ``spans``, (address, bytes) on ``device``.

    ``driver`` replaces one made for this call. Raises KVTierError if the memory cannot be shared: torch's expandable
    segments and vLLM's sleep mode map memory piece by piece, which has no such handles.
    """
    identity = process_memory.identity()
    made = None
    try:
        if driver is None:
            index = torch.cuda.current_device() if device.index is None else device.index
            driver = made = Driver(index)
        return Shared(*identity, driver.uuid(), _allocations(driver, spans))
    except CudaError as error:
        raise KVTierError(f"GPU memory cannot be shared with other engines of this node: {error}") from error
    finally:
        if made is not None:
            made.close()


def _allocations(driver: Driver, spans: Iterable[tuple[int, int]]) -> tuple[SharedSpan, ...]:
    found: dict[int, SharedSpan] = {}
    for address, nbytes in spans:
        try:
            base, size = driver.address_range(address)
            if address + nbytes > base + size:
                raise KVTierError(
                    f"{nbytes} bytes of GPU memory at {address:#x} are in more than one allocation (expandable "
                    "segments?): other engines of this node cannot map them"
                )
            if base not in found:
                found[base] = SharedSpan(base, size, driver.ipc_handle(base))
        except CudaError as error:
            raise KVTierError(
                f"GPU memory at {address:#x} cannot be shared with other engines of this node ({error}): "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments and sleep mode do not allow it"
            ) from error
    return tuple(found[base] for base in sorted(found))


class Mapped:
    """One process's shared allocations as this process sees them."""

    def __init__(self, spans: list[tuple[SharedSpan, int]], keys: list[tuple]):
        """``spans``: each with its address here; ``keys``: what :class:`Mappings` is to close."""
        self._spans, self.keys = spans, keys

    def translate(self, address: int, nbytes: int) -> int:
        """This process's address of the ``nbytes`` at the source's ``address``. Raises KVTierError if they are not
        within one allocation."""
        for span, here in self._spans:
            if span.base <= address and address + nbytes <= span.base + span.nbytes:
                return address - span.base + here
        raise KVTierError(f"{nbytes} bytes at {address:#x} are not in the memory that the source shares")


class Mappings:
    """The allocations mapped by this process's context, each once, with a count of its users. For one thread."""

    def __init__(self, driver: Driver):
        self._driver = driver
        # By process and allocation: [address here, number of users].
        self._open: dict[tuple, list[int]] = {}

    def open(self, shared: Shared) -> Mapped:
        """Map all spans of a process; :meth:`close` the result. Takes milliseconds for each new span.

        Raises KVTierError; then nothing more is mapped than before.
        """
        process_memory.check(shared)
        keys: list[tuple] = []
        spans: list[tuple[SharedSpan, int]] = []
        try:
            for span in shared.spans:
                key = (shared.node, shared.pid, shared.started, span.base, span.handle)
                entry = self._open.get(key)
                if entry is None:
                    entry = self._open[key] = [self._driver.open_ipc(span.handle), 0]
                entry[1] += 1
                keys.append(key)
                size = self._driver.address_range(entry[0])[1]
                if size < span.nbytes:  # or a kernel would read beyond it
                    raise KVTierError(f"it shares {span.nbytes} bytes at {span.base:#x}; only {size} are mapped")
                spans.append((span, entry[0]))
        except (CudaError, KVTierError) as error:
            self._release(keys)
            whose = f"process {shared.pid} ({shared.device})"
            raise KVTierError(f"GPU memory of {whose} cannot be mapped: {error}") from error
        return Mapped(spans, keys)

    def close(self, mapped: Mapped) -> None:
        """Unmap the spans that have no other user; no kernel may be reading them. Idempotent. Raises KVTierError if the
        driver fails; the spans are closed nevertheless."""
        keys, mapped.keys = mapped.keys, []
        self._release(keys)

    def _release(self, keys: Iterable[tuple]) -> None:
        failed: CudaError | None = None
        for key in keys:
            entry = self._open[key]
            entry[1] -= 1
            if entry[1]:
                continue
            del self._open[key]
            try:
                self._driver.close_ipc(entry[0])
            except CudaError as error:
                failed = failed or error
        if failed is not None:
            raise KVTierError(f"GPU memory of another engine cannot be unmapped: {failed}") from failed

"""GPU memory shared between engines of a node: handles of ours for others, theirs mapped here (CUDA IPC).

What is shared is whole allocations: a process that may map one (of the same user) sees everything in it. A mapping
keeps the memory alive when its process has ended, so that whoever reads on reads what nobody vouches for, but no bad
address.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.messages import Shared, SharedSpan
from vllm_kvtier.worker import process_memory
from vllm_kvtier.worker.cuda import CudaError, Driver


def share(spans: Iterable[tuple[int, int]], device: torch.device, driver: Driver | None = None) -> Shared:
    """Who this process is, and handles of the allocations under ``spans``, (address, bytes) on ``device``.

    ``driver``: in place of one made for this call. Raises KVTierError where memory cannot be shared so: torch's
    expandable segments and vLLM's sleep mode map memory piece by piece, for which there are no such handles.
    """
    try:
        who = process_memory.identity()
    except OSError as error:
        raise KVTierError(f"/proc does not tell who this process is ({error}): its memory cannot be shared") from error
    made = None
    try:
        if driver is None:
            index = torch.cuda.current_device() if device.index is None else device.index
            driver = made = Driver(index)
        return Shared(*who, driver.uuid(), _allocations(driver, spans))
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


@dataclass(frozen=True)
class _Span:
    base: int  # there
    nbytes: int
    here: int


class Mapped:
    """One process's shared allocations as this process sees them."""

    def __init__(self, spans: Sequence[_Span], keys: list[tuple]):
        """``keys``: what :class:`Mappings` is to close."""
        self._spans, self.keys = list(spans), keys

    def translate(self, address: int, nbytes: int) -> int:
        """Where the ``nbytes`` from ``address`` there are here; KVTierError if they are not within one allocation."""
        for span in self._spans:
            if span.base <= address and address + nbytes <= span.base + span.nbytes:
                return address - span.base + span.here
        raise KVTierError(f"{nbytes} bytes at {address:#x} are not in the memory that the source shares")


class Mappings:
    """All that is mapped by this process's context, each allocation once, however many open it. For one thread."""

    def __init__(self, driver: Driver):
        self._driver = driver
        # By process and allocation: address here, and how often it was opened.
        self._open: dict[tuple, list[int]] = {}

    def open(self, shared: Shared) -> Mapped:
        """Maps all spans of a process; :meth:`close` what it returns. Milliseconds for each that is new.

        Raises KVTierError, and then nothing more is mapped than before.
        """
        process_memory.check(shared)
        keys: list[tuple] = []
        spans = []
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
                    raise KVTierError(f"it shares {span.nbytes} bytes at {span.base:#x}, of which {size} are there")
                spans.append(_Span(span.base, span.nbytes, entry[0]))
        except (CudaError, KVTierError) as error:
            self._release(keys)
            whose = f"process {shared.pid} ({shared.device})"
            raise KVTierError(f"GPU memory of {whose} cannot be mapped: {error}") from error
        return Mapped(spans, keys)

    def close(self, mapped: Mapped) -> None:
        """Unmaps what nobody else has open; nothing may be reading it. Idempotent. Raises KVTierError if the driver
        fails; it is forgotten all the same."""
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

    @property
    def count(self) -> int:
        """Allocations that are mapped."""
        return len(self._open)

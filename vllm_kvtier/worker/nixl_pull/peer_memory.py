"""Base of the two forms in which peers see this rank's KV cache: raw (``worker.nixl_pull.exported_memory``) and encoded
(``worker.nixl_pull.encoded_memory``).

``transfer_view`` is the memory that NIXL reads and writes. Besides pages a pull reads checksums, from the source's
``table`` into the reader's ``arrived``: int64, one per block, in the same kind of memory as the pages.
"""

import torch

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.wire.geometry import CacheGeometry
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport


class PeerMemory:
    view: CacheView
    transfer_view: CacheView
    table: torch.Tensor
    arrived: torch.Tensor
    memory_type = "DRAM"  # NIXL's name of the pages' memory
    device_id = 0
    on_device = False
    wire_codec: str | dict[str, str] = "raw"  # the option, without "auto"

    def close(self) -> None:
        """Wait for work under way and give memory back; idempotent."""

    def clear_checksums(self) -> None:
        """vLLM resets its prefix cache: no block can be read any more."""
        raise NotImplementedError

    def clear_unread(self, groups: list[GroupPull]) -> None:
        """NIXL's read into these blocks failed, and writes them no more."""

    def geometry(self) -> CacheGeometry:
        """The geometry that a peer's memory must have to be copied here byte for byte."""
        return self.view.geometry()

    def register(self, transport: NixlTransport) -> None:
        spans = list(self.transfer_view.spans)
        spans += [(t.data_ptr(), t.numel() * 8) for t in (self.table, self.arrived)]
        transport.register(spans, self.memory_type, self.device_id)

"""What the two forms in which peers see this rank's KV cache have in common: ``memory`` as it is, ``coded_memory``
encoded.

``transfer_view`` is what NIXL reads and writes. A pull reads a table of checksums beside the pages, ``table`` of the
source into ``arrived`` of the reader: int64, one a block, in the same kind of memory as the pages.
"""

import torch

from vllm_kvtier.wire.geometry import CacheGeometry
from vllm_kvtier.worker.transport import NixlTransport
from vllm_kvtier.worker.views import CacheView


class PeerMemory:
    view: CacheView
    transfer_view: CacheView
    table: torch.Tensor
    arrived: torch.Tensor
    memory_type = "DRAM"  # NIXL's word for where the pages are
    device_id = 0
    on_device = False
    wire_codec: str | dict[str, str] = "raw"  # the option, without "auto"

    def close(self) -> None:
        """Waits for what is under way and gives memory back; idempotent."""

    def geometry(self) -> CacheGeometry:
        """What a peer's memory must share with ours to be copied here byte for byte."""
        return self.view.geometry()

    def register(self, transport: NixlTransport) -> None:
        spans = list(self.transfer_view.spans)
        spans += [(t.data_ptr(), t.numel() * 8) for t in (self.table, self.arrived)]
        transport.register(spans, self.memory_type, self.device_id)

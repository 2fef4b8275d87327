"""The contract of copiers, and the copier of a device: blocks of the KV cache to and from slots of a store.

``worker.copy.cuda_copier`` uses kernels and DMA engines, ``worker.copy.host_copier`` plain copies on a machine without
CUDA. A copier moves whole blocks of one group, encodes and decodes them where a codec applies, and computes or verifies
their checksums on the way. ``worker.store.copy_engine`` decides which blocks are copied and when.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vllm_kvtier.wire.slots import PartLayout
from vllm_kvtier.worker.cache_view import CacheView


class Copy(Protocol):
    """One call under way. It uses its blocks and slots until :meth:`done`, even if the request ends before."""

    nbytes: int  # of the parts it moves, encoded

    def done(self) -> bool:
        """Whether all of it has ended; never waits. Cheap enough to poll every millisecond.

        Raises RuntimeError if the device failed: then the state of every copy is unknown, and no more will work.
        """

    def make_stream_wait(self) -> None:
        """Kernels that the calling thread launches on its current stream from now on begin when this has ended."""

    @property
    def bad(self) -> np.ndarray | None:
        """bool [n], True where a loaded block's checksum did not match: its bytes must not be used.

        None for stores, and before :meth:`done` has returned True.
        """


class Copier(Protocol):
    """Not thread-safe: one thread at a time.

    ``piece_bytes``: the best size of a call, in bytes of parts. Smaller calls pay for their launches; larger ones delay
    later calls, since the calls of one direction run in order.
    """

    piece_bytes: int
    on_model_stream: bool  # whether stores are to gather on the model's stream while that has room

    def free_pieces(self, stream: Any) -> int:
        """Pieces that :meth:`store` can gather on ``stream``, the model's (torch.cuda.Stream), without making it wait
        for the link. Only with ``on_model_stream``."""
        raise NotImplementedError

    def store(
        self,
        group: int,
        blocks: np.ndarray,  # int64 [n] block ids of the cache
        keys: np.ndarray,  # uint64 [n] content keys of the checksums
        slots: np.ndarray,  # int64 [n] page numbers in the pool
        after: Any | None = None,  # torch.cuda.Event of the forward that writes the blocks; None: it has ended
        stream: Any | None = None,  # torch.cuda.Stream to gather on, if ``free_pieces`` are enough; None: an own one
    ) -> Copy:
        """Copy blocks into this rank's part of slots, each with its checksum; returns without waiting.

        Raises ValueError for a block outside the cache or a slot outside the registered memory; then nothing was
        copied.
        """

    def load(
        self,
        group: int,
        blocks: np.ndarray,
        keys: np.ndarray,
        slots: np.ndarray,
        after: Any | None = None,  # event after which the blocks may be written; the slots may be read at once
    ) -> Copy:
        """The reverse, with verification. A bad block is written too: see ``Copy.bad``."""

    def register(self, start: int, nbytes: int) -> None:
        """Make the pool's bytes ``start .. start + nbytes`` usable; ``start`` is the end of the last call.

        With CUDA this takes the calling thread about 70 ms a GiB of touched memory (the driver pins it); other Python
        threads run on. Raises RuntimeError with the driver's message if it refuses; memory registered before stays
        usable.
        """

    def warm_up(self) -> None:
        """Compile and allocate now instead of in the first copies (seconds on a GPU)."""

    def idle(self) -> bool:
        """Whether nothing is under way, so that the pool's memory may be unmapped after :meth:`close`."""

    def close(self) -> None:
        """Wait for copies under way (milliseconds) and give the pool's memory back; idempotent."""


def make_copier(
    view: CacheView,
    pool: tuple[int, int, Any],
    layouts: Sequence[PartLayout],
    part_offsets: Sequence[int],
    tuning: Any | None = None,
) -> Copier:
    """A copier between ``view`` and the pool mapped at ``pool`` = (address, bytes, an object with its buffer that
    is kept alive).

    ``layouts[g]`` and ``part_offsets[g]``: this rank's part of group g's slots (``codecs.parts.part_layout``) and its
    offset in them. ``tuning`` replaces the ``worker.tuning.Tuning`` of this machine (benchmarks and tests).
    Raises ValueError if layouts and groups do not match.
    """
    if len(layouts) != len(view.groups) or len(part_offsets) != len(view.groups):
        raise ValueError(f"{len(layouts)} layouts and {len(part_offsets)} offsets for {len(view.groups)} groups")
    if view.device.type == "cuda":
        from vllm_kvtier.worker.copy.cuda_copier import CudaCopier

        return CudaCopier(view, pool, layouts, part_offsets, tuning)
    from vllm_kvtier.worker.copy.host_copier import HostCopier

    return HostCopier(view, pool, layouts, part_offsets)

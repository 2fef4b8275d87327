"""Blocks of the KV cache to and from slots of the node store: what any copier promises, and which one to take.

``copier_cuda`` drives kernels and DMA engines, ``copier_host`` does the same with plain copies on a machine without
CUDA. A copier moves whole blocks of one group, encoding and decoding them where a codec keeps the group, and computes
or checks their checksums on the way; what is to be copied, when, and what a bad block means is ``worker.offload``'s to
know.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vllm_kvtier.wire.slots import PartLayout
from vllm_kvtier.worker.views import CacheView


class Copy(Protocol):
    """One order under way. Its blocks and slots belong to it until :meth:`done`, whatever becomes of the request."""

    nbytes: int  # of the parts it moves, encoded

    def done(self) -> bool:
        """Whether all of it has ended; never waits. Cheap enough to poll every millisecond.

        Raises RuntimeError if the device failed: then nothing is known about any copy, and no more will work.
        """

    def hold(self) -> None:
        """What the calling thread launches on its current stream from now on begins when all of this has ended."""

    @property
    def bad(self) -> np.ndarray | None:
        """bool [n], True where a loaded block's checksum did not match: its bytes must not be used.

        None for stores, and before :meth:`done` has returned True.
        """


class Copier(Protocol):
    """Not thread-safe: one thread calls all of it.

    ``piece_bytes``: work worth one call, in bytes of parts. Smaller calls pay for their launches, larger ones only
    delay what is ordered after them, since calls of one direction are done in their order.
    """

    piece_bytes: int

    def store(
        self,
        group: int,
        blocks: np.ndarray,  # int64 [n] block ids of the cache
        keys: np.ndarray,  # uint64 [n] content keys, that the checksums are made under
        slots: np.ndarray,  # int64 [n] page numbers in the pool
        after: Any | None = None,  # torch.cuda.Event of the forward that writes the blocks; None: they are written
    ) -> Copy:
        """Copies blocks into this rank's part of slots, each with its checksum; returns without waiting.

        Raises ValueError for a block outside the cache or a slot outside the registered memory, and then nothing
        was copied.
        """

    def load(
        self,
        group: int,
        blocks: np.ndarray,
        keys: np.ndarray,
        slots: np.ndarray,
        after: Any | None = None,  # event after which the blocks may be written; the slots may be read at once
    ) -> Copy:
        """The reverse; checks each block. A bad block is written all the same: see ``Copy.bad``."""

    def register(self, start: int, nbytes: int) -> None:
        """Makes the pool's bytes ``start .. start + nbytes`` usable, ``start`` being where the last call ended.

        Takes about 70 ms a GiB of touched memory with CUDA (the driver pins it), on the calling thread, other
        Python threads running on. Raises RuntimeError if the driver refuses, in its words; what was registered
        before stays usable.
        """

    def warm_up(self) -> None:
        """Compiles and allocates what the first copies would (seconds on a GPU)."""

    def idle(self) -> bool:
        """Whether nothing is under way, so that the pool's memory may be unmapped after :meth:`close`."""

    def close(self) -> None:
        """Waits for what is under way (milliseconds) and gives the pool's memory back; idempotent."""


def make_copier(
    view: CacheView,
    pool: tuple[int, int, Any],
    layouts: Sequence[PartLayout],
    part_offsets: Sequence[int],
    tuning: Any | None = None,
) -> Copier:
    """A copier between ``view`` and the pool mapped at ``pool`` = (address, bytes, an object with its buffer that
    is kept alive).

    ``layouts[g]`` and ``part_offsets[g]``: this rank's part of group g's slots (``wire.slots.part_layout``, or
    ``codecs.parts.part_layout`` for a group that a codec keeps), and where it begins in them.
    ``tuning``: a ``worker.tuning.Tuning`` in place of the one for this machine (benchmarks and tests).
    Raises ValueError if layouts and groups do not fit each other.
    """
    if len(layouts) != len(view.groups) or len(part_offsets) != len(view.groups):
        raise ValueError(f"{len(layouts)} layouts and {len(part_offsets)} offsets for {len(view.groups)} groups")
    if view.device.type == "cuda":
        from vllm_kvtier.worker.copier_cuda import CudaCopier

        return CudaCopier(view, pool, layouts, part_offsets, tuning)
    from vllm_kvtier.worker.copier_host import HostCopier

    return HostCopier(view, pool, layouts, part_offsets)

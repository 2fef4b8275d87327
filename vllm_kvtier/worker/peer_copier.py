"""Blocks out of the caches of other engines of this node: what any copier promises, and which one to take.

``peer_copier_cuda`` maps other GPUs' memory and reads it with a kernel, ``peer_copier_host`` reads other processes'
memory on a machine without CUDA. A copier reads all words of the blocks that a rank of the source holds, checks them
against the source's table of checksums under the reader's own keys, and puts what this rank needs of them into its own
pages, in logical order, whatever the layouts of both; what is to be copied, until when, and what a bad block means is
``worker.fetches``'s to know.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm_kvtier.worker.cover import Part
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import GroupPull


@dataclass(eq=False)
class CopyJob:
    """Blocks of one request from one source; block ids are within both caches, and 0 is none of them."""

    source: str
    groups: list[GroupPull]
    until: float = math.inf  # of time.monotonic(): copies in pieces begin no other after it; a launch ends by itself


class Copy(Protocol):
    """Jobs under way. Their blocks belong to it until :meth:`done`, whatever becomes of the requests."""

    nbytes: int  # read from the sources

    def done(self) -> bool:
        """Whether all of it has ended; never waits for the device. On a CPU this does a piece of the work.

        Raises RuntimeError if the device failed: then nothing is known about any copy, and no more will work.
        """

    def bad(self, job: int) -> set[int]:
        """Our ids of those blocks of ``jobs[job]`` that could not be read or whose checksum is wrong, in any part.
        Once it is done."""

    def why(self, job: int) -> str:
        """What went wrong with a job besides checksums, in a sentence; "" if nothing did. Once it is done."""

    def wait_on(self, stream: Any) -> None:
        """What is launched on ``stream`` (torch.cuda.Stream) from now on runs when all of this has ended. On a CPU
        there is nothing to wait on: ``wait``."""

    def wait(self, seconds: float) -> bool:
        """Waits until it is done, at most so long (a CPU may take a piece longer); whether it is."""


class PeerCopier(Protocol):
    """Not thread-safe: one thread at a time calls all of it."""

    def add(self, source: str, parts: Sequence[Part]) -> None:
        """Maps and prepares what ``worker.cover`` says is to be read of a source; idempotent. May take milliseconds.
        Raises KVTierError, in words, if this source can never be read so."""

    def forget(self, source: str) -> None:
        """Gives up what ``add`` made, as soon as nothing uses it; idempotent."""

    def start(self, jobs: Sequence[CopyJob], after: Any | None = None) -> Copy:
        """Begins to copy, all jobs in one launch; never waits for the device. Sources were added. ``after``:
        torch.cuda.Event behind which our blocks may be written.

        The checksum of a right block goes to our own table where one part is the whole of it (``PartGroup.whole``);
        of all others the table has 0 afterwards, which vouches for nothing. Raises RuntimeError if the device
        refuses; then nothing is copied."""

    def warm_up(self) -> None:
        """Compiles and allocates what the first copies would (seconds on a GPU)."""

    def close(self) -> None:
        """Waits for what is under way (milliseconds) and gives everything back; idempotent."""


def make_peer_copier(view: CacheView, table: torch.Tensor) -> PeerCopier:
    """A copier into ``view``; ``table``: int64 [num_blocks], our checksums, on the view's device."""
    if view.device.type == "cuda":
        from vllm_kvtier.worker.peer_copier_cuda import CudaPeerCopier

        return CudaPeerCopier(view, table)
    from vllm_kvtier.worker.peer_copier_host import HostPeerCopier

    return HostPeerCopier(view, table)

"""The contract of peer copiers: blocks from the caches of other engines of this node.

``worker.peer_fetch.cuda_copier`` maps other GPUs' memory and reads it with a kernel. ``worker.peer_fetch.host_copier``
reads other processes' memory on a machine without CUDA. A copier reads all words of the blocks that a rank of the
source holds, verifies them against the source's table of checksums with the reader's own keys, and writes the words
that this rank needs into its own pages, in logical order, whatever the layouts of both.
``worker.peer_fetch.fetch_jobs`` decides which blocks are copied and until when.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import SourceRank


@dataclass(eq=False)
class CopyJob:
    """Blocks of one request from one peer; block ids are within both caches and never 0."""

    instance: str  # of the engine that is read
    groups: list[GroupPull]
    until: float = math.inf  # time.monotonic() after which a host copy begins no piece; a launch ends by itself


class Copy(ABC):
    """Jobs under way. It uses their blocks until :meth:`done`, even if the requests end before."""

    poll_seconds = 0.0  # between two calls of ``done`` in ``wait``

    def __init__(self, num_jobs: int):
        self.nbytes = 0  # read from the sources
        self._bad: list[set[int]] = [set() for _ in range(num_jobs)]
        self._why = [""] * num_jobs

    @abstractmethod
    def done(self) -> bool:
        """Whether all of it has ended; never waits for the device. On a CPU each call does a piece of the work.

        Raises RuntimeError if the device failed: then the state of every copy is unknown, and no more will work.
        """

    def bad(self, job: int) -> set[int]:
        """Our ids of the blocks of ``jobs[job]`` that could not be read or have a wrong checksum on any rank of the
        source. Valid once it is done."""
        return self._bad[job]

    def why(self, job: int) -> str:
        """The error of a job, other than wrong checksums; "" if there was none. Valid once it is done."""
        return self._why[job]

    @abstractmethod
    def wait_on(self, stream: Any) -> None:
        """Kernels launched on ``stream`` (torch.cuda.Stream) from now on run when all of this has ended. On a CPU use
        ``wait``."""

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until it is done (on a CPU, a piece longer); returns whether it is."""
        until = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() >= until:
                return False
            if self.poll_seconds:
                time.sleep(self.poll_seconds)
        return True


class PeerCopier(Protocol):
    """Not thread-safe: one thread at a time."""

    def add(self, instance: str, parts: Sequence[SourceRank]) -> None:
        """Map and prepare the ranks of a source that ``shapes.tp_mapping`` selected; idempotent. May take
        milliseconds. Raises KVTierError if this source can never be read."""

    def remove(self, instance: str) -> None:
        """Unmap a source as soon as no copy uses it; idempotent."""

    def start(self, jobs: Sequence[CopyJob], after: Any | None = None) -> Copy:
        """Begin to copy, all jobs in one launch; never waits for the device. Call ``add`` for the sources before.
        ``after``: torch.cuda.Event behind which our blocks may be written.

        The checksum of a right block goes to our own table if the source's block is identical
        (``SourceGroup.identical_layout``); all other entries become 0, which no reader accepts. Raises RuntimeError if
        the device refuses; then nothing is copied."""

    def warm_up(self) -> None:
        """Compile and allocate now instead of in the first copies (seconds on a GPU)."""

    def close(self) -> None:
        """Wait for copies under way (milliseconds) and give all memory back; idempotent."""

"""A reset of vLLM's prefix cache, in the tables of checksums that other engines read: see ``lm.ClearChecksums``.

An engine with the parameters of an earlier hand-off may read its blocks before it is granted a lease. They are as they
were until vLLM uses them again, the weights may be others by then, and only a cleared table refuses them.
"""

import threading
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire import link as lm

logger = get_logger(__name__)


class ChecksumClearing:
    """``send``: to all ranks, from any thread."""

    def __init__(self, send: Callable[[lm.ClearChecksums], object]):
        self._send = send
        self._condition = threading.Condition()
        self._cleared: dict[int, int] = {}  # by rank that has reported: the generation
        self.generation = 0  # as ``StepWork.generation``

    def clear(self, seconds: float) -> None:
        """Return when all ranks have cleared their tables, or after ``seconds``. Scheduler's thread."""
        self.generation += 1
        self._send(lm.ClearChecksums(self.generation))
        with self._condition:
            if not self._condition.wait_for(lambda: not self._behind(), seconds):
                logger.warning(
                    "kvtier: ranks %s have not cleared their checksums within %g s of a reset of the prefix cache; "
                    "until they do, an engine may still take an earlier hand-off from them",
                    self._behind(),
                    seconds,
                )

    def _behind(self) -> list[int]:
        return sorted(rank for rank, generation in self._cleared.items() if generation < self.generation)

    # -- the reactor kvtier-scheduler -------------------------------------------------------------------------

    def present(self, rank: int) -> None:
        """Of a rank that has reported: before, nothing is read from it."""
        with self._condition:
            self._cleared.setdefault(rank, 0)

    def cleared(self, message: lm.ChecksumsCleared) -> None:
        with self._condition:
            self._cleared[message.rank] = max(self._cleared.get(message.rank, 0), message.generation)
            self._condition.notify_all()

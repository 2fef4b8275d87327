"""Loggers whose lines come at our rate, not at that of the clients that cause them.

Many lines tell what a peer, a client or a request did: 92,000 connections that sent nonsense once wrote 603,952
warnings in 20 s. So every logger of the package comes from ``get_logger``, and a process that configures logging itself
limits its handlers as well, for what libraries say (uvicorn warns of each request that is not HTTP).
"""

import logging
import threading
import time
from collections.abc import Callable

BURST_LINES = 10  # lines of one place in the code that may come at once
REFILL_SECONDS = 10.0  # then one in so many
MAX_PLACES = 4096  # places that are remembered; ours are some hundreds


class RateLimit(logging.Filter):
    """A filter for loggers and handlers: lets ``burst`` lines of one place in the code pass, then one in ``seconds``,
    which says how many were left out. DEBUG passes: it is turned on to see every line.

    A place is (file, line), a token bucket each: what a line says may be chosen by others, where it is written is not.
    A record that passed once is not counted again, by this limit or another one.
    """

    def __init__(
        self,
        burst: int = BURST_LINES,
        seconds: float = REFILL_SECONDS,
        max_places: int = MAX_PLACES,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self._burst, self._seconds, self._max_places, self._clock = burst, seconds, max_places, clock
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], list[float]] = {}  # -> [lines it may write, as of, lines left out]

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or getattr(record, "kvtier_passed", False):
            return True
        with self._lock:
            left_out = self._take((record.pathname, record.lineno))
        if left_out is None:
            return False
        record.kvtier_passed = True
        if left_out:  # appended to the template, whose own arguments are not looked at here
            record.msg = f"{record.msg} ({left_out} more lines like this one were left out)"
        return True

    def _take(self, place: tuple[str, int]) -> int | None:
        """How many lines were left out before this one; None: this one is, too."""
        now = self._clock()
        if place not in self._places:
            while len(self._places) >= self._max_places:
                del self._places[next(iter(self._places))]
            self._places[place] = [self._burst, now, 0]
        bucket = self._places[place]
        bucket[0] = min(self._burst, bucket[0] + (now - bucket[1]) / self._seconds)
        bucket[1] = now
        if bucket[0] < 1:
            bucket[2] += 1
            return None
        left_out, bucket[0], bucket[2] = int(bucket[2]), bucket[0] - 1, 0
        return left_out

    def clear(self) -> None:
        """As if nothing had been logged yet."""
        with self._lock:
            self._places.clear()


LIMIT = RateLimit()  # of this process


def get_logger(name: str) -> logging.Logger:
    """The logger of module ``name``, limited. Every module of the package gets its logger here.

    It is called ``vllm.kvtier.`` and so on: vLLM configures only loggers below ``vllm``."""
    logger = logging.getLogger(name.replace("vllm_kvtier", "vllm.kvtier", 1))
    logger.addFilter(LIMIT)  # once, however often this is called
    return logger


def unlimited() -> dict[str, bool]:
    """``extra`` of a line whose number is bounded elsewhere, or that is written for each request that was served: it is
    what an access log is for."""
    return {"kvtier_passed": True}


def open_files_again() -> None:
    """The next line makes a log file that was removed again."""
    for handler in logging.root.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.close()

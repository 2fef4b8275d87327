"""Starts a store where nobody listens: on a thread of its own, one at a time, and less and less often if it fails."""

import threading
import time
from collections.abc import Callable

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

PAUSE_SECONDS = 5.0, 60.0  # after a failed start, which costs half a second of a processor, first and longest


class Starter:
    """``launch`` returns once somebody listens, or raises KVTierError. ``done("" or why it failed)`` is called on the
    reactor's thread, to which all else belongs as well."""

    def __init__(self, reactor: Reactor, launch: Callable[[], None], done: Callable[[str], None]):
        self._reactor, self._launch, self._done = reactor, launch, done
        self._pause = PAUSE_SECONDS[0]
        self._failure, self._after = "", 0.0  # why, and until when nothing is started
        self._running = False

    def start(self) -> str:
        """Start one, if that is due and not under way. Returns what to say meanwhile."""
        if time.monotonic() < self._after:
            return self._failure
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="kvtier-launch", daemon=True).start()
        return "the node store is being started"

    def failed(self, failure: str) -> None:
        """Nobody is there after all that: ``start`` does nothing for a while."""
        self._failure, self._after = failure, time.monotonic() + self._pause
        self._pause = min(self._pause * 2, PAUSE_SECONDS[1])

    def succeeded(self) -> None:
        """One is connected: the next failure is the first again."""
        self._pause = PAUSE_SECONDS[0]

    def _run(self) -> None:
        try:
            self._launch()
            failure = ""
        except KVTierError as error:
            failure = str(error)
        except Exception as error:
            logger.exception("kvtier: unexpected error while starting the node store")
            failure = f"the node store could not be started: {error}"
        self._reactor.call_soon(lambda: self._ended(failure))

    def _ended(self, failure: str) -> None:
        self._running = False
        self._done(failure)

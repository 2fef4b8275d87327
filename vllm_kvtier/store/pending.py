"""An answer of the node store on its way."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import messages as m

logger = get_logger(__name__)


@dataclass(frozen=True)
class Failed:
    """Outcome of a question that got no answer; ``reason`` says why."""

    reason: str


Outcome = m.Found | m.Reserved | m.Done | m.Counts | m.Holding | Failed


class Pending:
    """An answer on its way. Any thread.

    ``outcome`` is None until it is there; then the reply struct (Found, Reserved, Done, Counts, Holding) or Failed.
    ``session`` names the connection it was asked on: leases and slots in the answer mean nothing on another one,
    so hand it back with them (``release(lease, session)``, ``commit(slots, session)``).
    """

    __slots__ = ("outcome", "session", "deadline", "_callbacks")
    _lock = threading.Lock()  # of all of them: it is held for a few instructions

    def __init__(self, session: int, deadline: float):
        self.outcome: Outcome | None = None
        self.session = session
        self.deadline = deadline
        self._callbacks: list[Callable[[Pending], None]] | None = None

    def wait(self, seconds: float) -> bool:
        """Block until the outcome is there, at most ``seconds``. Never on the reactor's thread."""
        if self.outcome is not None:
            return True
        there = threading.Event()
        self.then(lambda _: there.set())
        return there.wait(seconds)

    def then(self, callback: Callable[["Pending"], None]) -> None:
        """Call ``callback(self)`` on the reactor's thread when the outcome is there; here and now if it already is."""
        with self._lock:
            if self.outcome is None:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def resolve(self, outcome: Outcome) -> None:
        """Only the client calls this; a second outcome is ignored."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                logger.exception("kvtier: what was to follow an answer of the node store failed")

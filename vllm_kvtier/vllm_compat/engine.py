"""The engine core's thread: run something on it when the engine is idle, and wake it from another thread.

vLLM gives a connector no call while no request is there. Its engine core (0.25.1 to 0.33) calls
``_notify_idle_state_callbacks`` each time before it blocks on its input queue, and returns to that point after
a WAKEUP message; we wrap the former and send the latter. In vLLM's in-process mode there is no such loop and
nothing to wake: the next call into the scheduler does the work.
"""

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from vllm_kvtier.vllm_compat.probe import Feature, granted
from vllm_kvtier.vllm_compat.turns import Turns

logger = logging.getLogger("vllm.kvtier.engine")

_WRAPPED = "_kvtier_idle_hook"


def share_interpreter(seconds: float) -> None:
    """No thread of this process keeps the interpreter from others for longer than this (0: as it is; never raised).

    While it launches a step vLLM's thread would keep it for Python's 5 ms from the one that sends out answers, and from
    ours, whose messages others wait for.
    """
    if 0 < seconds < sys.getswitchinterval():
        sys.setswitchinterval(seconds)


class EngineThread:
    """``on_idle`` runs on the engine's thread whenever it is about to sleep, and after each ``wake``."""

    def __init__(self, on_idle: Callable[[], None]):
        self._engine: Callable[[], Any] = lambda: None
        self._wakeup: Any = None
        self._on_idle = on_idle
        self.turns = Turns()
        self._install()

    def _install(self) -> None:
        if not granted(Feature.IDLE):
            return  # released blocks wait for the next request
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCoreProc

        self._wakeup = (EngineCoreRequestType.WAKEUP, None)
        original = EngineCoreProc._notify_idle_state_callbacks
        original = getattr(original, _WRAPPED, original)
        me = self

        def notify(engine: Any) -> None:
            me._engine = weakref.ref(engine)
            if granted(Feature.PEER_FETCH):
                me.turns.watch(engine.scheduler)
            try:
                with me.turns.taken():
                    me._on_idle()
            except Exception:
                logger.exception("kvtier: idle work failed")
            original(engine)

        setattr(notify, _WRAPPED, original)
        EngineCoreProc._notify_idle_state_callbacks = notify

    def wake(self) -> None:
        """Any thread. Does nothing before the engine's loop started or where there is none."""
        engine = self._engine()
        if engine is not None:
            engine.input_queue.put_nowait(self._wakeup)

    @property
    def scheduler(self) -> Any | None:
        """vLLM's scheduler, once the loop has started."""
        return getattr(self._engine(), "scheduler", None)

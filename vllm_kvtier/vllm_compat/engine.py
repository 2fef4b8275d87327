"""The engine core's thread: run something on it when the engine is idle, and wake it from another thread.

vLLM gives a connector no call while no request is there. Its engine core (0.25.1 to 0.33) calls
``_notify_idle_state_callbacks`` each time before it blocks on its input queue, and returns to that point after
a WAKEUP message; we wrap the former and send the latter. In vLLM's in-process mode there is no such loop and
nothing to wake: the next call into the scheduler does the work. Either kind of engine core gets its requests by
``add_request``, where we learn which scheduler uses our connector, before the first request is scheduled.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from vllm_kvtier.containment import Containment
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat import undo
from vllm_kvtier.vllm_compat.probe import Feature, granted
from vllm_kvtier.vllm_compat.turns import Turns

logger = get_logger("vllm.kvtier.engine")

_WRAPPED = "_kvtier_idle_hook"
_ADDING = "_kvtier_add_request"


def share_interpreter(seconds: float) -> None:
    """No thread of this process keeps the interpreter from others for longer than this (0: as it is; never raised).

    While it launches a step vLLM's thread would keep it for Python's 5 ms from the one that sends out answers, and from
    ours, whose messages others wait for.
    """
    if 0 < seconds < sys.getswitchinterval():
        sys.setswitchinterval(seconds)


class EngineThread:
    """``on_idle`` runs on the engine's thread whenever it is about to sleep, and after each ``wake``.

    ``connector``: ours, by which the scheduler is known that uses it. ``on_scheduler`` is called with that once, on the
    engine's thread.
    """

    _all: "weakref.WeakSet[EngineThread]" = weakref.WeakSet()  # of this process: in-process engines may be several

    def __init__(
        self,
        on_idle: Callable[[], None],
        containment: Containment,
        connector: Any = None,
        on_scheduler: Callable[[Any], None] = lambda scheduler: None,
    ):
        self._engine: Callable[[], Any] = lambda: None
        self._scheduler: Callable[[], Any] = lambda: None
        self._wakeup: Any = None
        self._on_idle, self._connector, self._on_scheduler = on_idle, connector, on_scheduler
        self._contain = containment
        self.turns = Turns(containment)
        self._install()

    def _install(self) -> None:
        if not granted(Feature.IDLE):
            return  # released blocks wait for the next request
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCore, EngineCoreProc

        self._wakeup = (EngineCoreRequestType.WAKEUP, None)
        original = EngineCoreProc._notify_idle_state_callbacks
        EngineThread._all.add(self)
        EngineCore.add_request = _looking(EngineCore.add_request)
        original = getattr(original, _WRAPPED, original)
        me = self

        def notify(engine: Any) -> None:
            me._contain.attempt("idle", me._idle, engine)
            original(engine)

        setattr(notify, _WRAPPED, original)
        EngineCoreProc._notify_idle_state_callbacks = notify

    def _idle(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)
        self._found(engine.scheduler)
        self.turns.turn(self._on_idle)()

    def look_at(self, engine: Any) -> None:
        """Engine's thread, outside any turn: a request comes to this engine core."""
        if self._connector is not None and undo.uses(engine.scheduler, self._connector):
            self._found(engine.scheduler)

    def _found(self, scheduler: Any) -> None:
        if scheduler is not self._scheduler():
            self._scheduler = weakref.ref(scheduler)
            if granted(Feature.PEER_FETCH):
                self.turns.watch(scheduler)
            self._on_scheduler(scheduler)

    def wake(self) -> None:
        """Any thread. Does nothing before the engine's loop started or where there is none."""
        engine = self._engine()
        if engine is not None:
            engine.input_queue.put_nowait(self._wakeup)

    @property
    def scheduler(self) -> Any | None:
        """vLLM's scheduler, from before the first request is scheduled."""
        return self._scheduler()


def _looking(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method, before which every EngineThread looks at the engine core. Wrapped once, however often."""
    original = getattr(add_request, _ADDING, add_request)

    @functools.wraps(original)
    def looking(engine: Any, *args: Any, **kwargs: Any) -> Any:
        for thread in tuple(EngineThread._all):
            try:
                thread.look_at(engine)
            except Exception:
                EngineThread._all.discard(thread)
                logger.exception("kvtier: vLLM's scheduler cannot be found; what needs it is off")
        return original(engine, *args, **kwargs)

    setattr(looking, _ADDING, original)
    return looking

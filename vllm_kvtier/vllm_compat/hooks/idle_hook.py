"""vLLM's scheduler thread: runs a callback on it when the engine is idle, and wakes it from another thread.

vLLM does not call a connector while there are no requests. Its engine core (0.25.1 to 0.33) calls
``_notify_idle_state_callbacks`` before each wait on its input queue, and returns there after a WAKEUP message: this
module wraps the former and sends the latter. A data-parallel rank without requests does not wait while others of its
group have some, but runs dummy batches: after one of them this module does what is due. vLLM's in-process mode has no
such loop and nothing to wake: the next call of the scheduler does the work. All kinds of engine core get requests by
``add_request``, where this module finds the scheduler that uses our connector, before the first request is scheduled.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from vllm_kvtier.containment import Containment
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.hooks import rollback, step_pause
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.vllm_compat.hooks.waiting_loop import LoadedFirst, WaitingLoop
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

logger = get_logger(__name__)

_WRAPPED = "_kvtier_idle_hook"
_DUMMY = "_kvtier_dummy_batch"
_ADDING = "_kvtier_add_request"


class EngineThread:
    """``on_idle`` runs on the scheduler thread whenever it is about to sleep, and after each ``wake``; among dummy
    batches, after the last request ended and after each ``wake``.

    ``connector``: ours; identifies the scheduler that uses it. ``on_scheduler`` is called with that scheduler once, on
    the scheduler thread.
    """

    _all: ClassVar["weakref.WeakSet[EngineThread]"] = weakref.WeakSet()  # of this process, which may have several

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
        self._due = True  # among dummy batches ``on_idle`` is to run
        self._on_idle, self._connector, self._on_scheduler = on_idle, connector, on_scheduler
        self._contain, self._sees_pauses = containment, granted(Feature.PAUSED)
        self.scheduler_lock, self.waiting_loop = SchedulerLock(containment), WaitingLoop()
        self.loaded_first, self.admission = LoadedFirst(containment), Admission()
        self._install()
        step_pause.install()

    def _install(self) -> None:
        if not granted(Feature.IDLE):
            return  # released blocks are freed at the next request
        from vllm.v1.engine import EngineCoreRequestType
        from vllm.v1.engine.core import EngineCore, EngineCoreProc

        self._wakeup = (EngineCoreRequestType.WAKEUP, None)
        original = EngineCoreProc._notify_idle_state_callbacks
        EngineThread._all = weakref.WeakSet([*EngineThread._all, self])  # one that others iterate over stays as it is
        EngineCore.add_request = _looking(EngineCore.add_request)
        original = getattr(original, _WRAPPED, original)
        me = self

        def notify(engine: Any, *args: Any, **kwargs: Any) -> Any:
            me._contain.attempt("idle", me._idle, engine)
            return original(engine, *args, **kwargs)

        setattr(notify, _WRAPPED, original)
        EngineCoreProc._notify_idle_state_callbacks = notify
        run_dummy = getattr(EngineCore.execute_dummy_batch, _DUMMY, EngineCore.execute_dummy_batch)

        def dummy(engine: Any, *args: Any, **kwargs: Any) -> Any:
            result = run_dummy(engine, *args, **kwargs)
            me._contain.attempt("idle among dummy batches", me._after_dummy, engine)
            return result

        setattr(dummy, _DUMMY, run_dummy)
        EngineCore.execute_dummy_batch = dummy

    def _after_dummy(self, engine: Any) -> None:
        if engine.scheduler.has_requests():
            self._due = True
        elif self._due:
            self._idle(engine)

    def _idle(self, engine: Any) -> None:
        self._due = False
        self._engine = weakref.ref(engine)
        self._found(engine.scheduler)
        self.scheduler_lock.held(self._on_idle)()

    def look_at(self, engine: Any) -> None:
        """Scheduler thread, outside the scheduler lock: a request comes to this engine core."""
        self._due = True
        if self._connector is not None and rollback.uses(engine.scheduler, self._connector):
            self._found(engine.scheduler)

    def _found(self, scheduler: Any) -> None:
        if scheduler is not self._scheduler():
            self._scheduler = weakref.ref(scheduler)
            if granted(Feature.PRIORITIES):  # first: without it KV would be wrong
                rollback.evict_uncomputed(scheduler, self._contain)
            if granted(Feature.PEER_FETCH):
                self.scheduler_lock.install(scheduler)
            if granted(Feature.QUEUES):
                self.waiting_loop.install(scheduler)
                self.loaded_first.install(scheduler)
            if granted(Feature.ADMISSION):
                self.admission.install(scheduler, self.loaded_first.queue)
            self._on_scheduler(scheduler)

    def wake(self) -> None:
        """Wake the scheduler thread. Any thread. Does nothing before the engine's loop runs or where there is none."""
        self._due = True
        engine = self._engine()
        if engine is not None:
            engine.input_queue.put_nowait(self._wakeup)

    @property
    def draining(self) -> bool:
        """Whether the engine ends as soon as its work is done (``--shutdown-timeout``)."""
        engine = self._engine()
        if engine is None or not granted(Feature.DRAINING):
            return False
        return not engine.is_running() and engine.vllm_config.shutdown_timeout > 0

    @property
    def paused_scheduler(self) -> Any | None:
        """vLLM's scheduler while the engine is paused, or is to pause; None otherwise."""
        scheduler = self._scheduler()
        return scheduler if self._sees_pauses and scheduler is not None and rollback.is_paused(scheduler) else None

    @property
    def scheduler(self) -> Any | None:
        """vLLM's scheduler, from before the first request is scheduled."""
        return self._scheduler()


def _looking(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method, after every EngineThread looked at the engine core. A wrapped method is not wrapped again."""
    original = getattr(add_request, _ADDING, add_request)

    @functools.wraps(original)
    def looking(engine: Any, *args: Any, **kwargs: Any) -> Any:
        for thread in tuple(EngineThread._all):
            thread._contain.attempt("add request", thread.look_at, engine, repair=functools.partial(_discard, thread))
        return original(engine, *args, **kwargs)

    setattr(looking, _ADDING, original)
    return looking


def _discard(thread: EngineThread) -> None:
    EngineThread._all = weakref.WeakSet(each for each in EngineThread._all if each is not thread)
    logger.warning("kvtier: idle hook: vLLM's scheduler was not found; features that need it are off")

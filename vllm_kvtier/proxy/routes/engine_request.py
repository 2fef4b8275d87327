"""What a generating and a forwarded request share: they take slots at engines, and are refused with 429 without one."""

import time
from collections.abc import Awaitable, Callable, Iterable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines.engine import AnswersFull, AnswerTooLarge, Engine, EngineFailure, EngineSlot, Reply
from vllm_kvtier.proxy.engines.refusals import FULL, LACKS, LACKS_AT_ONCE, Wants
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.routes.client_answer import Answer, memory_full, refusal, unavailable
from vllm_kvtier.proxy.routing.admission import Choice, QueueFull
from vllm_kvtier.proxy.routing.router import candidates

logger = get_logger(__name__)


class Refusals:
    """Engines that have refused a request, while no other one has served it (see ``engines.refusals``)."""

    def __init__(self) -> None:
        self.wants: Wants = None
        self._status: dict[Engine, int] = {}

    def __contains__(self, engine: Engine) -> bool:
        return engine in self._status

    def add(self, engine: Engine, status: int) -> None:
        self._status[engine] = status
        if status in LACKS_AT_ONCE:
            engine.lacks(self.wants)

    def lacks(self, engine: Engine) -> bool:
        return self._status.get(engine) in LACKS

    def served_by(self, engine: Engine) -> None:
        """The request itself is not at fault."""
        engine.serves(self.wants)
        for other, status in self._status.items():
            if other is not engine:
                other.refused(status, self.wants)
        self._status.clear()

    def end(self) -> None:
        """No engine has served it. Those that made errors are probed."""
        for engine, status in self._status.items():
            if status >= 500:
                engine.check()


def for_client(error: Answer | None, later: Answer) -> Answer:
    """Which of two engines' errors the client gets: an engine that fails or is full may have what another one lacks."""

    def weight(status: int) -> int:
        return 2 if status == 429 else status >= 500

    return later if error is None or weight(later.status) >= weight(error.status) else error


class EngineRequest:
    """One request of a tenant. ``trace`` collects fields for the access log."""

    def __init__(self, core: ProxyCore, incoming: Incoming, tenant: bytes, trace: dict[str, object]):
        self._core = core
        self._config = core.config
        self._incoming = incoming
        self._held = incoming.answer_held
        self._tenant = tenant
        self._trace = trace
        self._refusals = Refusals()
        self._asked: dict[Engine, bool] = {}  # as ``router.Asked``
        self._attempts = 0  # of these, those that did not just lack something
        self._max_attempts = core.config.max_decode_attempts
        self._readmit_by: float | None = None  # deadline of all its further slots, once it needs one

    async def _acquire(self, role: str, choose: Callable[[], Choice | None], deadline: float) -> EngineSlot | None:
        """A slot as of ``Admission.acquire``, until ``deadline`` (monotonic seconds). Raises QueueFull."""
        began, wants = time.monotonic(), self._refusals.wants
        try:
            return await self._core.admission.acquire(role, self._tenant, choose, max(0.0, deadline - began), wants)
        finally:
            waited = time.monotonic() - began
            self._core.metrics.waited(role, waited)
            self._trace["queued"] = self._trace.get("queued", 0.0) + waited

    async def _next_engine(
        self,
        slot: EngineSlot,
        readmit: Callable[[float], Awaitable[EngineSlot | None]],
        ranked: Callable[[Engine], list[Engine]],
        error: Answer | None,
        last: Answer | None,
    ) -> Engine | None:
        """The engine to send the request to, where ``slot`` is then; None if none is left. Raises QueueFull.

        ``readmit``: acquires a slot at an engine that was not asked, until a deadline. ``ranked``: all engines, best
        first, the given one before others. ``error``: for the client, as it is now. ``last``: what the last engine
        answered. If that lacks something or is full, the request waits for another one as all do. Other failures are
        few: it goes at once, even to a full engine."""
        if self._attempts >= self._max_attempts:
            return None
        if last is not None and last.status in (*LACKS, *FULL):
            if self._readmit_by is None:
                self._readmit_by = time.monotonic() + self._config.queue_timeout
            slot.release()
            other = await readmit(self._readmit_by)
            if other is not None:
                slot.take(other)
            return None if other is None else slot.engine
        if slot.engine.usable and slot.engine not in self._asked:
            return slot.engine  # it was chosen for this request
        engines = ranked(slot.engine)
        usable = candidates(engines, self._refusals.wants, self._asked) or (engines if error is None else [])
        for engine in engines:
            if engine not in self._asked and (engine in usable or (engine is slot.engine and engine.healthy)):
                slot.move(engine, slot.tokens)
                return engine
        return None

    def _failed(self, engine: Engine, failure: EngineFailure) -> None:
        """It failed before the client had a byte. If it is late, this request may be a long one, and only one more is
        tried."""
        engine.failed(failure)
        if failure.late:
            self._max_attempts = min(self._max_attempts, self._attempts + 1)
        if failure.began:
            self._refusals.add(engine, 502)  # if another engine serves the request, it was not at fault

    def _refused(self, engine: Engine, status: int) -> None:
        """It refused what another may serve."""
        self._refusals.add(engine, status)
        if status in LACKS:
            self._asked[engine] = True
            self._attempts -= 1

    def _no_engine(self, error: Answer | None, engines: Iterable[Engine]) -> Answer:
        """The answer if none of a role's ``engines`` is left. ``error``: as of ``_next_engine``."""
        if error is not None and error.status in LACKS:
            # One that could not be asked, or failed, may have what the others lack.
            asked, wants = self._asked, self._refusals.wants
            lacking = (asked.get(engine) or wants in engine.lacking for engine in engines if engine.open)
            error = error if all(lacking) else None
        return error or unavailable("No engine could answer; the request can be sent again.")

    def _answer_too_large(self, failure: AnswerTooLarge, repeatable: bool = True) -> Answer:
        """An engine's answer was not read to its end. ``repeatable``: the client may send the request again."""
        if isinstance(failure, AnswersFull):
            self._core.count("memory_full")
            logger.warning("kvtier: proxy: no room for an answer (%s); the client gets an error", failure)
            if repeatable:
                return memory_full()
            message = "The engine executed the request; the proxy had no memory for its answer."
            return refusal(502, message, "overloaded_error")
        logger.warning("kvtier: proxy: an answer is too large (%s); the client gets 502", failure)
        return refusal(502, "The answer is larger than the proxy allows; ask for less.", "upstream_error")

    def _too_late(self) -> Answer:
        """The answer if an engine has had ``answer_timeout`` for one not streamed: others would take as long."""
        message = f"The answer took longer than {self._config.answer_timeout:g} s; ask for less, or for a stream."
        return refusal(504, message, "upstream_error", {"x-should-retry": "false"})

    def _note_error(self, reply: Reply, answer: Answer) -> None:
        """An engine has ended a stream with an error of its own, which the client gets."""
        reply.engine.check()
        self._note_broken(answer, f"{reply.engine} sent an error")

    def _note_broken(self, answer: Answer, reason: object) -> None:
        if not answer.broken:
            answer.broken = True
            self._core.count("broken_streams")
            logger.warning("kvtier: proxy: an answer ended early (%s); the client's answer is incomplete", reason)

    def _queue_full(self, error: QueueFull) -> Answer:
        self._core.count("too_busy")
        if error.displaced:
            self._core.count("displaced")
        message = f"{error} Try again in {error.retry_after} s."
        return refusal(429, message, "rate_limit_error", {"retry-after": str(error.retry_after)})

"""The slots of a request at a prefill engine and at a decode engine, which it takes at the same moment.

A request that waits for one of them does not hold the other, which requests for other engines may need. It waits for a
prefill engine first. If one is free in its turn and no decode engine is, it waits among those for decode engines until
there are both; those behind it that need no prefill engine, or another one, go first. A free prefill engine is offered
there first.

Lest the two are never free at once, one such request at each decode engine keeps a slot there until a prefill engine is
free (``Engine.keeper``). None holds a prefill slot while it waits, so that none waits for another in a circle.
"""

from collections.abc import Awaitable, Callable

from vllm_kvtier.proxy.engines.engine import Engine, EngineSlot
from vllm_kvtier.proxy.routing.admission import Choice
from vllm_kvtier.proxy.routing.conversations import ConversationRoute
from vllm_kvtier.proxy.routing.prompt import Prompt
from vllm_kvtier.proxy.routing.router import Router


class SlotPair:
    """Both slots, after ``acquire``. ``prefill``: None if no prefill engine can be used; ``decode``: None if all are
    drained. ``kept``: the last engine that kept a slot for it: others may wait for that one."""

    def __init__(self, router: Router, prompt: Prompt, route: ConversationRoute | None):
        self._router, self._prompt, self._route = router, prompt, route
        self.prefill: EngineSlot | None = None
        self.decode: EngineSlot | None = None
        self.kept: Engine | None = None

    async def acquire(self, wait: Callable[[str, Callable[[], Choice | None]], Awaitable[EngineSlot | None]]) -> None:
        """``wait(role, choose)``: as ``Admission.acquire``. Raises QueueFull, and then there are no slots."""
        try:
            self.prefill = await wait("prefill", self._at_prefill)
            if self.prefill is None:
                self.decode = await wait("decode", self._at_decode)
        except BaseException:
            for slot in (self.prefill, self.decode):
                if slot is not None:
                    slot.release()
            raise
        finally:
            self._keep(None)

    def _at_prefill(self) -> Choice | None:
        prefill = self._router.choose_prefill(self._prompt)
        if prefill is not None and prefill.engine is not None:
            self.decode = self._take(self._router.choose_decode(self._prompt, self._route, True))
            return prefill if self.decode is not None else None  # and then it waits for a decode engine
        return prefill

    def _at_decode(self) -> Choice | None:
        self._keep(None)
        decode = self._router.choose_decode(self._prompt, self._route, True)
        if decode is None or decode.engine is None:
            return decode
        prefill = self._router.choose_prefill(self._prompt)
        if prefill is None:
            return self._router.choose_decode(self._prompt, self._route, False)
        self.prefill = self._take(prefill)
        if self.prefill is not None:
            return decode
        self._keep(decode.engine)
        return Choice(None, full=prefill.full or frozenset())  # those behind it may need no prefill engine

    def _take(self, choice: Choice | None) -> EngineSlot | None:
        if choice is None or choice.engine is None:
            return None
        choice.engine.lacking.tried(self._prompt.wants)
        return EngineSlot(choice.engine, choice.tokens)

    def _keep(self, engine: Engine | None) -> None:
        """Have it keep a slot, unless it does so for another request; and the one before none."""
        if self.kept is not None and self.kept.keeper is self:
            self.kept.keeper = None
        if engine is not None and engine.keeper is None:
            engine.keeper, self.kept = self, engine

"""Chooses the prefill and the decode engine of a request.

An engine's cost is the number of prompt tokens to compute there before the request's first token: those of the requests
under way, plus ``request_cost_tokens`` for each of them, divided by the weight; and what this request needs, which the
policy says. The cheapest engine is chosen; among equals, the one with the fewest picks by weight.

A decode engine pulls what it lacks of a prefilled prompt, at a sixteenth of the cost of computing. A conversation stays
on its decode engine unless that is much busier than the least busy (``affinity_slack``), unavailable or full, or the
policy knows better.
Unavailable engines are skipped. If no decode engine is healthy, one of them is tried nevertheless.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.engines.refusals import Wants
from vllm_kvtier.proxy.messages.transfer_params import Source
from vllm_kvtier.proxy.routing.admission import Choice
from vllm_kvtier.proxy.routing.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.routing.policies.base import Expected, RoutingPolicy
from vllm_kvtier.proxy.routing.prompt import Prompt

_PULL_SHARE = 1 / 16

#: Engines that had a request already, and whether they answered that they lack what it wants.
Asked = Mapping[Engine, bool]
NOT_ASKED: Asked = MappingProxyType({})


class Router:
    """Chooses among the engines of a fleet; stateless."""

    def __init__(self, fleet: Fleet, policy: RoutingPolicy, config: ProxyConfig):
        self._fleet = fleet
        self.policy = policy
        self.config = config

    def choose_prefill(self, prompt: Prompt, asked: Collection[Engine] = ()) -> Choice | None:
        """The prefill engine for a prompt; None if none is usable, or has what the request wants. ``asked``: engines
        that the request had already."""
        open_engines = [engine for engine in self._fleet.prefill if engine.usable and engine not in asked]
        usable = [engine for engine in open_engines if prompt.wants not in engine.lacking]
        if not usable:
            return None
        free = [engine for engine in usable if not engine.full]
        if not free:
            return Choice(None, full=waits_for(usable, self._fleet.prefill))
        expected = self.policy.expect(prompt)
        engine = min(free, key=lambda e: self._rank(e, expected(e).cost))
        engine.lacking.tried(prompt.wants)
        return Choice(engine, expected(engine).uncached)

    def choose_decode(
        self, prompt: Prompt, route: ConversationRoute | None, prefilled: bool, asked: Asked = NOT_ASKED
    ) -> Choice | None:
        """The decode engine; None if none is open. ``prefilled``: a prefill engine computes the prompt."""
        usable = candidates(self._fleet.decode, prompt.wants, asked)
        free = [engine for engine in usable if not engine.full]
        if not free:  # a request that waits asks at the end of each other one: its prompt is not looked up
            return Choice(None, full=waits_for(usable, self._fleet.decode)) if usable else None
        expected = self.policy.expect(prompt)
        engine = next(each for each in self._rank_decode(prompt, route, prefilled, expected) if each in free)
        engine.lacking.tried(prompt.wants)
        return Choice(engine, 0 if prefilled else expected(engine).uncached)

    def rank_decode(self, prompt: Prompt, route: ConversationRoute | None, prefilled: bool = False) -> list[Engine]:
        """All open decode engines, best first."""
        return self._rank_decode(prompt, route, prefilled, self.policy.expect(prompt))

    def _rank_decode(
        self, prompt: Prompt, route: ConversationRoute | None, prefilled: bool, expected: Callable[[Engine], Expected]
    ) -> list[Engine]:
        engines = [engine for engine in self._fleet.decode if engine.open]
        if len(engines) == 1:
            return engines
        share = _PULL_SHARE if prefilled else 1
        lacks = {engine for engine in engines if prompt.wants in engine.lacking}
        engines.sort(key=lambda e: (not e.healthy, e in lacks, *self._rank(e, expected(e).cost * share)))
        keeps = prompt.name.explicit or self.policy.keeps_conversation(prompt, prefilled)
        previous = self._previous_engine(prompt.name, route) if keeps else None
        if previous is not None and previous.usable and previous in engines and previous not in lacks:
            least = min(engine.load for engine in engines if engine.healthy and engine not in lacks)
            if previous.load <= least + self.config.affinity_slack:
                engines.remove(previous)
                engines.insert(0, previous)
        return engines

    def sources(self, route: ConversationRoute | None, exclude: Engine | None = None) -> list[Source]:
        """The sources of the conversation for an engine (``exclude``), the latest first."""
        sources = []
        for holder in route.holders if route is not None else ():
            engine = self._engine_of(holder)
            # A drained engine still has its blocks.
            if engine is None or engine is exclude or not engine.healthy:
                continue
            if (source := engine.source_of(holder.source)) is not None:
                sources.append(source)
        return sources

    def _rank(self, engine: Engine, cost: float) -> tuple[float, float]:
        return self.policy.queued(engine, self.config.request_cost_tokens) + cost, engine.weighted_picks

    def _previous_engine(self, name: Name, route: ConversationRoute | None) -> Engine | None:
        """The latest holder that is usable; for a conversation with an id, else the engine that served it last."""
        if route is None:
            return None
        for holder in route.holders:
            engine = self._engine_of(holder)
            if engine is not None and engine.usable:
                return engine
        return self._fleet.find("decode", route.holders[0].decode) if name.explicit else None

    def _engine_of(self, holder: Holder) -> Engine | None:
        engine = self._fleet.find("decode", holder.decode)
        return engine if engine is not None and engine.instance == holder.instance else None


def candidates(engines: Iterable[Engine], wants: Wants, asked: Asked = NOT_ASKED) -> list[Engine]:
    """Of a role's engines those that a request may be sent to: available ones that are not known to lack what it wants;
    without such a one the available ones; without these, and before an engine has answered (``asked``), the others."""
    open_engines = [engine for engine in engines if engine.open]
    healthy = [engine for engine in open_engines if engine.healthy]
    having = [engine for engine in healthy if not (wants in engine.lacking or asked.get(engine, False))]
    found = [engine for engine in having or healthy if engine not in asked]
    return found or ([] if healthy or asked else open_engines)


def waits_for(usable: Iterable[Engine], engines: Iterable[Engine]) -> frozenset[Engine] | None:
    """``Choice.full`` of a request that waits for ``usable``, which are full, of a role's ``engines``."""
    return None if all(engine.full for engine in engines if engine.usable) else frozenset(usable)

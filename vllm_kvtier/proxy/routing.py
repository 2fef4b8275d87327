"""Which P and which D serve a request.

An engine's cost is about how many prompt tokens stand between now and the request's first token there: those that
requests under way have yet to compute, plus ``request_tokens`` for each such request, all by weight; and those of this
request that the engine has not seen before. The cheapest is chosen, among equals the one whose turn it is by weight.

D: where P computes, what D lacks is pulled, which costs a sixteenth of computing it. A conversation stays on its D
unless that one is much busier than the idlest (``affinity_slack``), set aside, or full. Engines that are set aside are
skipped; where no D is well, one of them is tried, for that is better than to refuse.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvtier.proxy.admission import Choice
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.engines import Engine
from vllm_kvtier.proxy.fleet import Fleet
from vllm_kvtier.proxy.params import Source
from vllm_kvtier.proxy.prefixes import PrefixMemory, Seen

_PULL_SHARE = 1 / 16


class Router:
    """Chooses among a fleet's engines; keeps no state of its own."""

    def __init__(self, fleet: Fleet, prefixes: PrefixMemory, config: ProxyConfig):
        self._fleet = fleet
        self._prefixes = prefixes
        self.config = config

    def prefill_wanted(self) -> bool:
        """Whether any P is well."""
        return any(engine.usable for engine in self._fleet.prefill)

    def choose_prefill(self, name: Name, tokens: int, besides: tuple[Engine, ...] = ()) -> Choice | None:
        """The P for a prompt of ``tokens``; None if none is well."""
        usable = [engine for engine in self._fleet.prefill if engine.usable and engine not in besides]
        if not usable:
            return None
        lacks = self._lacks(name, tokens)
        engine = min((e for e in usable if not e.full), key=lambda e: self._cost(e, lacks(e)), default=None)
        return Choice(engine, 0 if engine is None else lacks(engine))

    def choose_decode(self, name: Name, route: ConversationRoute | None, tokens: int, prefilled: bool) -> Choice | None:
        """The D, all of whose ``tokens`` P computes if ``prefilled``; never None as long as any D is open."""
        ranked = self.rank_decode(name, route, tokens, prefilled)
        if not ranked:
            return None
        # Room at an engine that is set aside is none, as long as others are well.
        well = [engine for engine in ranked if engine.well] or ranked
        engine = next((engine for engine in well if not engine.full), None)
        return Choice(engine, 0 if engine is None or prefilled else self._lacks(name, tokens)(engine))

    def rank_decode(
        self, name: Name, route: ConversationRoute | None, tokens: int = 0, prefilled: bool = False
    ) -> list[Engine]:
        """All Ds that are open, best first."""
        candidates = [engine for engine in self._fleet.decode if engine.open]
        if len(candidates) == 1:
            return candidates
        lacks = self._lacks(name, tokens)
        share = _PULL_SHARE if prefilled else 1
        candidates.sort(key=lambda engine: (not engine.well, *self._cost(engine, lacks(engine) * share)))
        home = self._home(name, route)
        if home is not None and home.usable and home in candidates:
            least = min(engine.load for engine in candidates if engine.well)
            if name.explicit or home.load <= least + self.config.affinity_slack:
                candidates.remove(home)
                candidates.insert(0, home)
        return candidates

    def sources(self, route: ConversationRoute | None, besides: Engine | None = None) -> list[Source]:
        """Whom an engine (``besides``) may ask for the conversation, the most promising first."""
        sources = []
        for holder in route.holders if route is not None else ():
            engine = self._holding(holder)
            # One that is drained still has what it has.
            if engine is not None and engine is not besides and engine.well and engine.source is not None:
                sources.append(engine.source)
        return sources

    def _cost(self, engine: Engine, lacking: float) -> tuple[float, float]:
        before = engine.tokens + engine.outstanding * self.config.request_tokens
        return before / (engine.weight or 1.0) + lacking, engine.turns

    def _lacks(self, name: Name, tokens: int) -> Callable[[Engine], int]:
        known = self._prefixes.known(name.pieces)
        return lambda engine: max(0, tokens - known.get(Seen.by(engine), 0))

    def _home(self, name: Name, route: ConversationRoute | None) -> Engine | None:
        """The D to prefer: the latest holder that lives on; an explicit id else stays where it was."""
        if route is None:
            return None
        for holder in route.holders:
            engine = self._holding(holder)
            if engine is not None and engine.usable:
                return engine
        return self._fleet.find("decode", route.holders[0].decode) if name.explicit else None

    def _holding(self, holder: Holder) -> Engine | None:
        engine = self._fleet.find("decode", holder.decode)
        return engine if engine is not None and engine.life == holder.life else None

"""Which P and which D serve a request.

P: the one that served the conversation last (its GPU prefix cache), else the one with the fewest requests
under way. D: likewise. Engines that are set aside are skipped; a D that is set aside comes last instead,
for a request that nobody else can serve is better tried than refused.
"""

from __future__ import annotations

from vllm_kvtier.proxy.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.engines import Engine
from vllm_kvtier.proxy.params import Source


class Router:
    """Chooses among engines; keeps no state of its own."""

    def __init__(self, prefill: list[Engine], decode: list[Engine], affinity_slack: int):
        self.prefill = prefill
        self.decode = decode
        self._slack = affinity_slack

    def pick_prefill(self, route: ConversationRoute | None) -> Engine | None:
        """The P for this request; None if none is well."""
        if route is not None and route.prefill is not None and self.prefill[route.prefill].well:
            return self.prefill[route.prefill]
        return next(iter(_idlest_first([engine for engine in self.prefill if engine.well])), None)

    def rank_decode(self, name: Name, route: ConversationRoute | None) -> list[Engine]:
        """All Ds, best first."""
        ranked = _idlest_first([engine for engine in self.decode if engine.well])
        home = self._home(name, route)
        if home is not None and home in ranked:
            least = ranked[0].outstanding
            if name.explicit or home.outstanding <= least + self._slack:
                ranked.remove(home)
                ranked.insert(0, home)
        return ranked + _idlest_first([engine for engine in self.decode if not engine.well])

    def sources(self, route: ConversationRoute | None, besides: Engine | None = None) -> list[Source]:
        """Whom an engine (``besides``) may ask for the conversation, the most promising first."""
        sources = []
        for holder in route.holders if route is not None else ():
            engine = self.decode[holder.decode]
            if engine is besides:
                continue
            if engine.well and self._still_holds(holder) and engine.source is not None:
                sources.append(engine.source)
        return sources

    def _home(self, name: Name, route: ConversationRoute | None) -> Engine | None:
        """The D to prefer: the latest holder that lives on; an explicit id else stays where it was."""
        if route is None:
            return None
        for holder in route.holders:
            if self._still_holds(holder) and self.decode[holder.decode].well:
                return self.decode[holder.decode]
        return self.decode[route.holders[0].decode] if name.explicit else None

    def _still_holds(self, holder: Holder) -> bool:
        return self.decode[holder.decode].life == holder.life


def _idlest_first(engines: list[Engine]) -> list[Engine]:
    # Among equals the one that rested longest, or a quiet proxy would use its first engine only.
    return sorted(engines, key=lambda engine: (engine.outstanding, engine.last_asked))

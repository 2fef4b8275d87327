"""The engines there are now, by role; those that join and those that leave while requests are under way.

An engine that is no longer in the list gets no new requests, keeps those it has, and is let go when the last is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import ROLES, EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engine_http import certificates
from vllm_kvtier.proxy.engines import Engine

logger = get_logger(__name__)


class Fleet:
    """``on_change(engine)``: whether it can be used has changed. ``on_left(engine)``: a request is over there."""

    def __init__(self, on_change: Callable[[Engine], None], on_left: Callable[[Engine], None]):
        """Empty; ``apply`` fills it."""
        self._on_change = on_change
        self._on_left = on_left
        self._engines: dict[str, list[Engine]] = {role: [] for role in ROLES}
        self._leaving: dict[tuple[str, int], Engine] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._next_index = dict.fromkeys(ROLES, 0)

    @property
    def prefill(self) -> list[Engine]:
        return self._engines["prefill"]

    @property
    def decode(self) -> list[Engine]:
        return self._engines["decode"]

    @property
    def pooling(self) -> list[Engine]:
        return self._engines["pooling"]

    def __iter__(self) -> Iterator[Engine]:
        """All that are in the list, Ps first."""
        for role in ROLES:
            yield from self._engines[role]

    def leaving(self) -> list[Engine]:
        return list(self._leaving.values())

    def find(self, role: str, index: int) -> Engine | None:
        """An engine that is in the list, or leaving."""
        for engine in self._engines[role]:
            if engine.index == index:
                return engine
        return self._leaving.get((role, index))

    def apply(self, config: ProxyConfig, *, greet: bool = True) -> None:
        """Have exactly the engines of ``config``. Raises ConfigError where one's key or certificates are no use; then
        all engines are as before. ``greet``: ask new ones how they are, in the background."""
        wanted = {role: self._wanted(role, getattr(config, role), config) for role in ROLES}
        for role, engines in wanted.items():
            for engine in self._engines[role]:
                if engine not in engines:
                    self._let_go(engine)
            for engine, address in engines.items():
                if engine not in self._engines[role]:
                    self._join(engine, greet)
                else:
                    engine.update(address, config)
            self._engines[role] = list(engines)

    def _wanted(
        self, role: str, addresses: tuple[EngineAddress, ...], config: ProxyConfig
    ) -> dict[Engine, EngineAddress]:
        present = {engine.url: engine for engine in self._engines[role]}
        wanted = {}
        for address in addresses:
            engine = present.get(address.url)
            if engine is not None and engine.certificates == certificates(address):
                # Read here what `apply` reads again, so that it cannot fail half way.
                Engine(role, -1, address, config)
            else:
                engine = Engine(role, self._next_index[role], address, config)
                self._next_index[role] += 1
            wanted[engine] = address
        return wanted

    def _join(self, engine: Engine, greet: bool) -> None:
        self._catch_up(engine)
        engine.on_change = self._changed
        engine.on_left = self._left
        if greet:
            engine.greet()
        logger.info("%s is used.", engine)

    def _let_go(self, engine: Engine) -> None:
        engine.leaving = True
        self._leaving[engine.role, engine.index] = engine
        logger.info("%s is no longer in the list; %d requests are under way there.", engine, engine.outstanding)
        self._close_if_idle(engine)
        self._on_change(engine)

    def _changed(self, engine: Engine) -> None:
        if engine.usable:
            self._catch_up(engine)
        self._on_change(engine)

    def _catch_up(self, engine: Engine) -> None:
        """One that was not there, or was set aside, does not get all the turns that the others had meanwhile."""
        others = [other.turns for other in self._engines[engine.role] if other is not engine and other.usable]
        engine.turns = max(engine.turns, min(others, default=0.0))

    def _left(self, engine: Engine) -> None:
        self._close_if_idle(engine)
        self._on_left(engine)

    def _close_if_idle(self, engine: Engine) -> None:
        if engine.leaving and engine.outstanding == 0 and self._leaving.pop((engine.role, engine.index), None):
            task = asyncio.create_task(engine.aclose(), name=f"close {engine.role} {engine.index}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        for engine in (*self, *self.leaving()):
            await engine.aclose()
        if self._closing:
            await asyncio.wait(self._closing)

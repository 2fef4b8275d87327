"""The engines by role. Engines can be added and removed while requests are under way.

A removed engine gets no new requests, completes those under way, and is closed after the last.
"""

import asyncio
from collections.abc import Callable, Iterator

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import ROLES, EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.engine_http import Secrets
from vllm_kvtier.proxy.engines.refusals import Wants

logger = get_logger(__name__)

_Call = Callable[[Engine], None]


class Fleet:
    """Empty until ``apply``.

    ``on_change(engine)``: its availability changed. ``on_request_end(engine)``: a request ended there.
    ``on_all_lack(role, wants)``: the last usable engine of the role was found to lack it.
    """

    def __init__(self, on_change: _Call, on_request_end: _Call, on_all_lack: Callable[[str, Wants], None]):
        self._on_change = on_change
        self._on_request_end = on_request_end
        self._on_all_lack = on_all_lack
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
        """All engines in the list, prefill engines first."""
        for role in ROLES:
            yield from self._engines[role]

    def leaving(self) -> list[Engine]:
        return list(self._leaving.values())

    def find(self, role: str, index: int) -> Engine | None:
        """An engine of the list or a leaving one."""
        for engine in self._engines[role]:
            if engine.index == index:
                return engine
        return self._leaving.get((role, index))

    def apply(self, config: ProxyConfig, *, probe_on_start: bool = True) -> None:
        """Use exactly the engines of ``config``. ``probe_on_start``: probe new engines in the background. Waiting
        requests are the caller's to serve, once all is changed: before, none may be there for them.

        Raises ConfigError if a key or certificate cannot be used, and then changes nothing.
        """
        wanted = {role: self._wanted(role, getattr(config, role), config) for role in ROLES}
        for role, engines in wanted.items():
            for engine in self._engines[role]:
                if engine not in engines:
                    self._remove(engine)
            for engine, (address, secrets) in engines.items():
                if engine in self._engines[role]:
                    engine.update(address, config, secrets)
                else:
                    self._add(engine, probe_on_start)
            self._engines[role] = list(engines)

    def _wanted(
        self, role: str, addresses: tuple[EngineAddress, ...], config: ProxyConfig
    ) -> dict[Engine, tuple[EngineAddress, Secrets]]:
        present = {engine.url: engine for engine in self._engines[role]}
        wanted = {}
        for address in addresses:
            secrets = Secrets.read(address)
            if (engine := present.get(address.url)) is None:
                engine = Engine(role, self._next_index[role], address, config, secrets)
                self._next_index[role] += 1
            wanted[engine] = address, secrets
        return wanted

    def _add(self, engine: Engine, probe_on_start: bool) -> None:
        self._catch_up(engine)
        engine.on_change = self._changed
        engine.on_lack = self._lacks
        engine.on_request_end = self._request_ended
        if probe_on_start:
            engine.probe_in_background()
        logger.info("kvtier: proxy: %s engine %s added", engine.role, engine.url)

    def _remove(self, engine: Engine) -> None:
        engine.leaving = True
        self._leaving[engine.role, engine.index] = engine
        logger.info(
            "kvtier: proxy: %s engine %s removed from the list; requests_under_way=%d",
            engine.role, engine.url, engine.outstanding,
        )  # fmt: skip
        self._close_if_idle(engine)

    def _changed(self, engine: Engine) -> None:
        if engine.usable:
            self._catch_up(engine)
        self._on_change(engine)

    def _lacks(self, engine: Engine, wants: Wants) -> None:
        if all(wants in other.lacking for other in self._engines[engine.role] if other.usable):
            self._on_all_lack(engine.role, wants)

    def _catch_up(self, engine: Engine) -> None:
        """A new or recovered engine does not make up for the requests that the others got before."""
        others = [other.weighted_picks for other in self._engines[engine.role] if other is not engine and other.usable]
        engine.weighted_picks = max(engine.weighted_picks, min(others, default=0.0))

    def _request_ended(self, engine: Engine) -> None:
        self._close_if_idle(engine)
        self._on_request_end(engine)

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

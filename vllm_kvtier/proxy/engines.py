"""One engine as the proxy sees it: whether it is well, what it has to do, and whether it is leaving.

An engine that fails is set aside: for a time that doubles with each failure, then until a health probe succeeds.
Failures are counted until a real request succeeds, so that an engine whose health page works while its requests fail
is used less and less. Nothing polls engines that are well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engine_http import EngineFailure, EngineHttp, Reply, certificates, read_key
from vllm_kvtier.proxy.params import Source, TransferParams

logger = get_logger(__name__)

__all__ = ["Engine", "EngineFailure", "Place", "Reply"]


class Engine:
    """One engine in one role.

    ``index``: its number in its role, never used again for another. ``outstanding``: requests under way; ``tokens``:
    their prompt tokens that it has yet to compute, as far as the proxy can tell. ``turns``: how often it was chosen,
    by weight. ``life``: counts the times its connections failed, after each of which another process, with an empty
    cache, may answer. ``confirmed``: it has answered at all. ``drained``: the operator wants no new requests to go
    there; ``leaving``: it is no longer in the list of engines. ``source``: its connector's endpoint, if known.
    """

    def __init__(self, role: str, index: int, address: EngineAddress, config: ProxyConfig):
        """Raises ConfigError if its key or certificates cannot be read."""
        self.role = role
        self.index = index
        self.url = address.url
        self.outstanding = 0
        self.tokens = 0
        self.turns = 0.0
        self.life = 0
        self.well = True
        self.confirmed = False
        self.drained = False
        self.leaving = False
        self.failures = 0
        #: Called when it becomes well or is set aside, so that who waits may have to wait no longer.
        self.on_change: Callable[[Engine], None] = lambda engine: None
        #: Called when a request is over here.
        self.on_left: Callable[[Engine], None] = lambda engine: None
        self.certificates = certificates(address)
        self._http = EngineHttp(self, address, config.connect_timeout)
        self._engine_id: str | None = None
        self._endpoint: tuple[str, int] | None = None
        self._prober: asyncio.Task[None] | None = None
        self.update(address, config)

    def update(self, address: EngineAddress, config: ProxyConfig) -> None:
        """Take other options of the same engine. Raises ConfigError, and changes nothing, if its key cannot be read."""
        what = f"The API key for {address.url}"
        key = None if address.api_key_file is None else read_key(address.api_key_file, what)
        self.address = address
        self.weight = address.weight
        self.limit = config.engine_requests if address.max_requests is None else address.max_requests
        self._authorization = None if key is None else f"Bearer {key}"
        # Keys that the proxy has checked are the proxy's: engines do not get to see them.
        self._forwards_keys = config.api_keys_file is None
        self._config = config

    def __str__(self) -> str:
        return f"The {self.role} engine {self.url}"

    @property
    def open(self) -> bool:
        """Whether new requests may go there, be it well or not."""
        return not (self.drained or self.leaving) and self.weight > 0

    @property
    def usable(self) -> bool:
        return self.well and self.open

    @property
    def full(self) -> bool:
        return 0 < self.limit <= self.outstanding

    @property
    def load(self) -> float:
        """Requests under way, by weight."""
        return self.outstanding / (self.weight or 1.0)

    @property
    def source(self) -> Source | None:
        """Where other engines can ask this one for KV; the operator's word goes before the engine's."""
        if self.address.kv_host is not None and self.address.kv_port is not None:
            return Source(self._engine_id or "", self.address.kv_host, self.address.kv_port)
        if self._engine_id is None or self._endpoint is None:
            return None
        return Source(self._engine_id, *self._endpoint)

    def learn(self, params: TransferParams) -> None:
        """Take the endpoint from an answer of this engine."""
        if (source := params.source) is not None:
            self._engine_id = source.engine_id
            self._endpoint = (source.host, source.port)

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        timeout: float,
        *,
        repeatable: bool = True,
    ) -> Reply:
        """Send a request (see ``EngineHttp.ask``), with this engine's key in place of the client's if it has one."""
        headers = dict(headers)
        if self._authorization is not None:
            headers["authorization"] = self._authorization
        elif not self._forwards_keys:
            headers.pop("authorization", None)
        if body is not None:
            headers.setdefault("content-type", "application/json")
        return await self._http.ask(method, path, body, headers, timeout, repeatable)

    def succeeded(self) -> None:
        """A real request succeeded."""
        self.failures = 0
        self.confirmed = True
        if not self.well:
            self._reinstate()

    def set_aside(self, reason: str, *, perhaps_restarted: bool = True) -> None:
        """Use this engine no more until a probe succeeds. ``perhaps_restarted``: its cache may be gone."""
        if perhaps_restarted:
            self.life += 1
            self._engine_id = None
            self._endpoint = None
        # Many requests may break at once; that is one failure. Whether one that leaves is well does not matter.
        if self.well and not self.leaving:
            self.well = False
            self.failures += 1
            logger.warning("%s Set aside until it answers a health probe.", reason)
            self._end_probing()
            self._prober = asyncio.create_task(self._probe_until_well(), name=f"probe {self.role} {self.index}")
            # Who waits for a place here alone need not wait any longer.
            self.on_change(self)

    def greet(self) -> None:
        """Find out in the background whether it is there; until that is known it is used but not counted on."""
        self._prober = asyncio.create_task(self._greet(), name=f"greet {self.role} {self.index}")

    async def _greet(self) -> None:
        reason = await self._probe()
        self._prober = None
        if reason is None:
            self.confirmed = True
        elif not self.confirmed:
            self.set_aside(reason)

    async def _probe_until_well(self) -> None:
        while True:
            doublings = min(self.failures - 1, 30)
            await asyncio.sleep(min(self._config.backoff_first * 2**doublings, self._config.backoff_most))
            reason = await self._probe()
            if reason is None:
                break
            logger.debug("Probe: %s", reason)
            self.failures += 1
        self._prober = None
        self.confirmed = True
        self._reinstate()

    async def _probe(self) -> str | None:
        """None if it is well, else why not."""
        try:
            reply = await self.ask("GET", "/health", None, {}, self._config.probe_timeout)
            reply.close()
        except EngineFailure as failure:
            return str(failure)
        return None if reply.status == 200 else f"{self} answered {reply.status} to a health probe."

    def _reinstate(self) -> None:
        self.well = True
        self._end_probing()
        logger.warning("%s answers again and is used again.", self)
        self.on_change(self)

    def _end_probing(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None

    async def aclose(self) -> None:
        if (prober := self._prober) is not None:
            self._end_probing()
            await asyncio.wait([prober])
        await self._http.aclose()

    def state(self) -> dict[str, object]:
        """For /kvtier/state."""
        source = self.source
        return {
            "url": self.url,
            "well": self.well,
            "confirmed": self.confirmed,
            "drained": self.drained,
            "leaving": self.leaving,
            "weight": self.weight,
            "outstanding": self.outstanding,
            "tokens": self.tokens,
            "failures": self.failures,
            "kv_endpoint": None if source is None else f"{source.host}:{source.port}",
            "engine_id": self._engine_id,
        }


class Place:
    """A request's place at an engine, counted until ``leave`` (idempotent). ``tokens``: those to compute there."""

    def __init__(self, engine: Engine, tokens: int = 0):
        self.engine = engine
        self.tokens = tokens
        self._held = True
        engine.outstanding += 1
        engine.tokens += tokens
        engine.turns += 1 / (engine.weight or 1.0)

    def move(self, engine: Engine, tokens: int) -> None:
        """Go to another engine, whether it has room or not."""
        if engine is not self.engine:
            self.leave()
            self.__init__(engine, tokens)

    def leave(self) -> None:
        if self._held:
            self._held = False
            self.engine.outstanding -= 1
            self.engine.tokens -= self.tokens
            self.engine.on_left(self.engine)

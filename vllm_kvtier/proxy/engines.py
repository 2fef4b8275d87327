"""One engine as the proxy sees it: asking it over HTTP with deadlines, and whether it is well.

An engine that fails is set aside: for a time that doubles with each failure, then until a health probe
succeeds. Failures are counted until a real request succeeds, so that an engine whose health page works
while its requests fail is used less and less. Nothing polls engines that are well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
import time
from collections.abc import AsyncIterator

import httpx

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.params import Source, TransferParams

logger = logging.getLogger(__name__)

# uvicorn, hence vLLM, closes idle connections after 5 s; closing them earlier here avoids most requests
# that meet a connection just closed by the other side.
_KEEPALIVE_SECONDS = 2.0

# Broken before an answer began: perhaps a kept connection that the engine had closed, perhaps a dead engine.
_BROKEN = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """One for all engines: reading them takes 30 ms."""
    return httpx.create_ssl_context(trust_env=False)


class EngineFailure(KVTierError):
    """An engine could not be reached, broke off, or did not answer in time."""


class Reply:
    """An engine's answer whose headers and first bytes are there.

    ``first`` is b"" if the body is empty. ``aclose`` must be called (idempotent); it drops the connection
    if the body was not read to its end, which makes the engine abort the request.
    """

    def __init__(self, engine: Engine, response: httpx.Response, first: bytes, rest: AsyncIterator[bytes]):
        self.engine = engine
        self.status = response.status_code
        self.headers = response.headers
        self.first = first
        self._response = response
        self._rest = rest
        self._open = True

    async def chunks(self, idle_timeout: float) -> AsyncIterator[bytes]:
        """The bytes after ``first``, as they arrive; raises EngineFailure if they stop before the end."""
        while True:
            with self.engine.failing_as(f"sent nothing for {idle_timeout:g} s within an answer"):
                async with time_limit(idle_timeout):
                    data = await anext(self._rest, None)
            if data is None:
                return
            yield data

    async def read(self, limit: int, timeout: float) -> bytes:
        """The whole body; raises EngineFailure if it breaks off, is late or exceeds ``limit`` bytes."""
        body = bytearray(self.first)
        with self.engine.failing_as(f"did not complete its answer within {timeout:g} s"):
            async with time_limit(timeout):
                async for data in self._rest:
                    body += data
                    if len(body) > limit:
                        raise EngineFailure(f"{self.engine} answered more than {limit} bytes.")
        return bytes(body)

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self.engine.outstanding -= 1
            await self._response.aclose()


class Engine:
    """One prefill or decode engine.

    ``outstanding``: requests under way; ``last_asked``: when the latest began (monotonic). ``life``: counts
    the times its connections failed, after each of which another process, with an empty cache, may answer.
    ``source``: its connector's endpoint, if known.
    """

    def __init__(self, role: str, index: int, address: EngineAddress, config: ProxyConfig):
        self.role = role
        self.index = index
        self.url = address.url
        self.outstanding = 0
        self.last_asked = 0.0
        self.life = 0
        self.well = True
        self.failures = 0
        self._address = address
        self._config = config
        self._engine_id: str | None = None
        self._endpoint: tuple[str, int] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._client = httpx.AsyncClient(
            base_url=address.url,
            # Engines are named by the operator; an HTTP_PROXY of the environment is not meant for them.
            trust_env=False,
            verify=_certificates(),
            # Reads have deadlines of their own below, which cover several reads.
            timeout=httpx.Timeout(None, connect=config.connect_timeout, write=config.client_timeout),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEPALIVE_SECONDS
            ),
        )

    def __str__(self) -> str:
        return f"The {self.role} engine {self.url}"

    @property
    def source(self) -> Source | None:
        """Where other engines can ask this one for KV; the operator's word goes before the engine's."""
        if self._address.kv_host is not None and self._address.kv_port is not None:
            return Source(self._engine_id or "", self._address.kv_host, self._address.kv_port)
        if self._engine_id is None or self._endpoint is None:
            return None
        return Source(self._engine_id, *self._endpoint)

    def learn(self, params: TransferParams) -> None:
        """Take the endpoint from an answer of this engine."""
        if (source := params.source) is not None:
            self._engine_id = source.engine_id
            self._endpoint = (source.host, source.port)

    async def ask(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> Reply:
        """Send a request; return when the answer's first bytes are there.

        Raises EngineFailure; cancelling it, like closing the reply, makes the engine abort the request.
        """
        self.outstanding += 1
        self.last_asked = time.monotonic()
        try:
            with self.failing_as(f"did not begin to answer within {timeout:g} s"):
                async with time_limit(timeout):
                    try:
                        return await self._ask_once(method, path, body, headers)
                    except _BROKEN:
                        # Once more, on a fresh connection. If the engine is gone, that is refused at once.
                        return await self._ask_once(method, path, body, headers)
        except BaseException:
            self.outstanding -= 1
            raise

    async def _ask_once(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        # Uncompressed, so that the bytes can be passed on as they come.
        headers = {**headers, "accept-encoding": "identity"}
        if body is not None:
            headers["content-type"] = "application/json"
        request = self._client.build_request(method, path, content=body, headers=headers)
        response = await self._client.send(request, stream=True)
        try:
            rest = response.aiter_raw()
            first = await anext(rest, b"")
        except BaseException:
            await response.aclose()
            raise
        return Reply(self, response, first, rest)

    def failing_as(self, when_late: str) -> _Failing:
        """A context that turns HTTP errors and time-outs into EngineFailure."""
        return _Failing(self, when_late)

    def succeeded(self) -> None:
        """A real request succeeded."""
        self.failures = 0
        if not self.well:
            self._reinstate()

    def set_aside(self, reason: str, *, perhaps_restarted: bool = True) -> None:
        """Use this engine no more until a probe succeeds. ``perhaps_restarted``: its cache may be gone."""
        if perhaps_restarted:
            self.life += 1
            self._engine_id = None
            self._endpoint = None
        # Many requests may break at once; that is one failure.
        if self.well:
            self.well = False
            self.failures += 1
            logger.warning("%s Set aside until it answers a health probe.", reason)
            self._prober = asyncio.create_task(
                self._probe_until_well(), name=f"probe {self.role} {self.index}"
            )

    async def _probe_until_well(self) -> None:
        while True:
            doublings = min(self.failures - 1, 30)
            await asyncio.sleep(min(self._config.backoff_first * 2**doublings, self._config.backoff_most))
            try:
                reply = await self.ask("GET", "/health", None, {}, self._config.probe_timeout)
                await reply.aclose()
                if reply.status == 200:
                    break
            except EngineFailure as failure:
                logger.debug("Probe: %s", failure)
            self.failures += 1
        self._prober = None
        self._reinstate()

    def _reinstate(self) -> None:
        self.well = True
        if self._prober is not None:
            self._prober.cancel()
            self._prober = None
        logger.warning("%s answers again and is used again.", self)

    async def aclose(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.wait([self._prober])
        await self._client.aclose()

    def state(self) -> dict[str, object]:
        """For /kvtier/state."""
        source = self.source
        return {
            "url": self.url,
            "well": self.well,
            "outstanding": self.outstanding,
            "failures": self.failures,
            "kv_endpoint": None if source is None else f"{source.host}:{source.port}",
            "engine_id": self._engine_id,
        }


class _Failing:
    """Turns what HTTP can raise into EngineFailure, in words."""

    def __init__(self, engine: Engine, when_late: str):
        self._engine = engine
        self._when_late = when_late

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise EngineFailure(f"{self._engine} {self._when_late}.") from error
        if isinstance(error, httpx.ConnectTimeout):
            raise EngineFailure(f"{self._engine} could not be reached in time.") from error
        if isinstance(error, httpx.ConnectError):
            raise EngineFailure(f"{self._engine} refused the connection ({error}).") from error
        if isinstance(error, httpx.HTTPError):
            raise EngineFailure(f"{self._engine} broke off ({type(error).__name__}: {error}).") from error

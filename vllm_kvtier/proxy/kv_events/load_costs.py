"""What loading a token from each tier costs, as a share of computing it: measured by the engines themselves.

From each engine's ``/metrics``: seconds of prefill per computed token (vLLM's), of loads per token loaded from the
store's memory, and of waits per token promoted to it (the connector's). Without them the shares are ``DEFAULT``.
"""

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.engines.engine import Engine, EngineFailure
from vllm_kvtier.proxy.kv_events.messages import Tier

logger = get_logger(__name__)

Shares = tuple[float, ...]  # by tier

# Before anything is measured: from the store's memory an order of magnitude faster, from behind it slower.
DEFAULT: Shares = (0.0, 0.1, 0.3, 0.3, 0.5)
assert len(DEFAULT) == len(Tier)

_INTERVAL, _TIMEOUT, _MAX_BYTES = 15.0, 5.0, 16 << 20
_MIN_TOKENS = 1000  # fewer say nothing
_SAMPLE = re.compile(rb"^(vllm:[a-z_]+)(?:\{[^\n]*\})? ([0-9.e+-]+)$", re.MULTILINE)
_COMPUTE = b"vllm:request_prefill_time_seconds_sum", b"vllm:request_prefill_kv_computed_tokens_sum"
_LOAD = b"vllm:kvtier_load_seconds_sum", b"vllm:kvtier_loaded_tokens_total"
_PROMOTE = b"vllm:kvtier_promotion_wait_seconds_sum", b"vllm:kvtier_promotion_wait_tokens_total"


class LoadCosts:
    """The latest shares of each engine."""

    def __init__(self) -> None:
        self._shares: dict[str, Shares] = {}

    def of(self, engine: Engine) -> Shares:
        return self._shares.get(engine.url, DEFAULT)

    async def measure(self, engines: Iterable[Engine]) -> None:
        """Read the engines' metrics every ``_INTERVAL`` seconds, until cancelled."""
        while True:
            # By URL: an engine may have two roles.
            present = {each.url: each for each in engines}
            self._shares = {url: found for url, found in self._shares.items() if url in present}
            for engine in [each for each in present.values() if each.usable]:
                try:
                    page = await _page(engine)
                except EngineFailure as failure:  # its requests decide whether it is available
                    logger.debug("kvtier: proxy: metrics of an engine could not be read (%s)", failure)
                    continue
                self._shares[engine.url] = shares(page)
            await asyncio.sleep(_INTERVAL)


def shares(page: bytes) -> Shares:
    """From an engine's page of metrics. A load never counts for more than computing, as the engine would compute."""
    totals: defaultdict[bytes, float] = defaultdict(float)
    for name, value in _SAMPLE.findall(page):
        with contextlib.suppress(ValueError):
            totals[name] += float(value)

    def seconds(of: tuple[bytes, bytes]) -> float | None:
        time, tokens = totals[of[0]], totals[of[1]]
        return time / tokens if tokens >= _MIN_TOKENS and time > 0 else None

    compute, load, promote = seconds(_COMPUTE), seconds(_LOAD), seconds(_PROMOTE)
    host, behind = DEFAULT[Tier.HOST], DEFAULT[Tier.DISK :]
    if compute is not None and load is not None:
        host = min(1.0, load / compute)
    if compute is not None and promote is not None:
        behind = (min(1.0, host + promote / compute),) * len(behind)
    return (0.0, host, *(max(host, share) for share in behind))


async def _page(engine: Engine) -> bytes:
    reply = await engine.ask("GET", "/metrics", None, {}, _TIMEOUT)
    try:
        return await reply.read(_MAX_BYTES, _TIMEOUT) if reply.status == 200 else b""
    finally:
        reply.close()

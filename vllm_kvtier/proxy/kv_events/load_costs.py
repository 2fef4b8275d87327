"""What loading a token from each tier costs, as a share of computing it: measured by the engines themselves.

From each engine's ``/metrics``: seconds of prefill per computed token (vLLM's), of loads that ended well per token
loaded from the store's memory, and of waits per token promoted to it (the connector's). Each is of what came since it
was last measured. Without them the shares are ``DEFAULT``.
"""

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.engines.engine import Engine, EngineFailure
from vllm_kvtier.proxy.kv_events.messages import Tier

logger = get_logger(__name__)

Shares = tuple[float, ...]  # by tier

# Before anything is measured: from the store's memory an order of magnitude faster, from behind it slower.
DEFAULT: Shares = (0.0, 0.1, 0.3, 0.3, 0.5)
assert len(DEFAULT) == len(Tier)

_INTERVAL, _TIMEOUT, _MAX_BYTES = 15.0, 5.0, 16 << 20
_MIN_TOKENS = 10_000  # one request is not like the next
_SAMPLE = re.compile(rb"^(vllm:[a-z_]+)(\{[^\n]*\})? ([0-9.e+-]+)$", re.MULTILINE)
_COMPUTE = b"vllm:request_prefill_time_seconds_sum", b"vllm:request_prefill_kv_computed_tokens_sum"
_LOAD = b"vllm:kvtier_load_seconds_sum", b"vllm:kvtier_loaded_tokens_total"
_PROMOTE = b"vllm:kvtier_promotion_wait_seconds_sum", b"vllm:kvtier_promotion_wait_tokens_total"


class LoadCosts:
    """The latest shares of each engine."""

    def __init__(self) -> None:
        self._measured: dict[str, Measured] = {}

    def of(self, engine: Engine) -> Shares:
        measured = self._measured.get(engine.url)
        return DEFAULT if measured is None else measured.shares

    async def measure(self, engines: Iterable[Engine]) -> None:
        """Read the engines' metrics every ``_INTERVAL`` seconds, until cancelled."""
        while True:
            # By URL: an engine may have two roles.
            present = {each.url: each for each in engines}
            self._measured = {url: found for url, found in self._measured.items() if url in present}
            for engine in [each for each in present.values() if each.usable]:
                try:
                    page = await _page(engine)
                except EngineFailure as failure:  # its requests decide whether it is available
                    logger.debug("kvtier: proxy: metrics of an engine could not be read (%s)", failure)
                    continue
                self._measured.setdefault(engine.url, Measured()).read(page)
            await asyncio.sleep(_INTERVAL)


class Measured:
    """Of one engine: ``shares``, from its pages of metrics."""

    def __init__(self) -> None:
        self.shares = DEFAULT
        self._compute, self._load, self._promote = (SecondsPerToken(*of) for of in (_COMPUTE, _LOAD, _PROMOTE))

    def read(self, page: bytes) -> None:
        """A load never counts for more than computing, as the engine would compute."""
        totals: defaultdict[bytes, float] = defaultdict(float)
        for name, labels, value in _SAMPLE.findall(page):
            if name != _LOAD[0] or b'kind="ok"' in labels:
                with contextlib.suppress(ValueError):
                    totals[name] += float(value)
        compute, load, promote = (each.read(totals) for each in (self._compute, self._load, self._promote))
        host, behind = DEFAULT[Tier.HOST], DEFAULT[Tier.DISK :]
        if compute is not None and load is not None:
            host = min(1.0, load / compute)
        if compute is not None and promote is not None:
            behind = (min(1.0, host + promote / compute),) * len(behind)
        self.shares = (0.0, host, *(max(host, share) for share in behind))


class SecondsPerToken:
    """The quotient of what two totals grew by, over ``_MIN_TOKENS`` or more: the engine of an hour ago is another one.
    At first of the totals."""

    def __init__(self, seconds: bytes, tokens: bytes):
        self._names = seconds, tokens
        self._before = 0.0, 0.0
        self._last: float | None = None

    def read(self, totals: Mapping[bytes, float]) -> float | None:
        """None before there were so many tokens."""
        seconds, tokens = (totals[name] for name in self._names)
        if 0 < tokens < self._before[1]:  # the engine has restarted
            self._before = 0.0, 0.0
        took, of = seconds - self._before[0], tokens - self._before[1]
        if of >= _MIN_TOKENS:
            self._before = seconds, tokens
            self._last = took / of if took > 0 else self._last
        return self._last


async def _page(engine: Engine) -> bytes:
    reply = await engine.ask("GET", "/metrics", None, {}, _TIMEOUT)
    try:
        return await reply.read(_MAX_BYTES, _TIMEOUT) if reply.status == 200 else b""
    finally:
        reply.close()

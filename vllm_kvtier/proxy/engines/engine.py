"""One engine as the proxy sees it: its health, its load, and whether it accepts requests.

An engine that fails is unavailable for a backoff time, which doubles with each failure, and then until a health probe
succeeds. Only a successful request resets the failure count, so that an engine whose probes succeed while its requests
fail is used less and less. Healthy engines are not probed, but after an answer of 5xx or one that ends early, and when
a client leaves that has waited for longer than ``probe_timeout``.
"""

import asyncio
import re
import time
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine_http import (
    AnswersFull,
    AnswerTooLarge,
    EngineFailure,
    EngineHttp,
    Reply,
    Secrets,
)
from vllm_kvtier.proxy.engines.refusals import FULL, LACKS, LACKS_AT_ONCE, Lacking, Wants
from vllm_kvtier.proxy.messages.transfer_params import Source, TransferParams

logger = get_logger(__name__)

__all__ = ["AnswerTooLarge", "AnswersFull", "Engine", "EngineFailure", "EngineSlot", "Reply"]


_HEALTH = "/health"
_RANK = re.compile(r"_dp\d+$")  # which vLLM adds to the id of each data-parallel rank

# So many late answers, or of 5xx to what others served, in a row, over so many seconds, are the engine's and not the
# requests' fault.
# The seconds let others' requests succeed there: one client can send any number of requests that fail at once.
_ERRORS, _ERROR_SECONDS = 3, 10.0


class Engine:
    """One engine in one role.

    * ``index``: its number in its role, never reused.
    * ``outstanding``: requests under way; ``tokens``: their prompt tokens still to be computed, as estimated.
    * ``weighted_picks``: how often it was chosen, divided by its weight.
    * ``instance``: counts failed connections and probes; after each, a new process with an empty cache may answer.
    * ``confirmed``: it has answered at least once.
    * ``drained``: the operator wants no new requests there; ``leaving``: it is no longer in the list of engines.
    * ``source``: its connector's endpoint, if known; ``last_named``: the one that its last answer named.
    """

    def __init__(self, role: str, index: int, address: EngineAddress, config: ProxyConfig, secrets: Secrets):
        self.role = role
        self.index = index
        self.url = address.url
        self.outstanding = 0
        self.tokens = 0
        self.weighted_picks = 0.0
        self.instance = 0
        self.healthy = True
        self.confirmed = False
        self.drained = False
        self.leaving = False
        self.failures = 0
        self._errors = 0  # since its last success: late answers, and of 5xx to requests that another engine served
        self._first_error = 0.0  # monotonic seconds
        self._lacks_something = False  # it answered 4xx to what another engine served, and that was logged
        self.lacking = Lacking()
        #: Requests here whose prefill has not ended; and whether an engine can pull from here while it prefills.
        self.followed_prefills = 0
        self.can_be_followed = False
        #: Called when its health changes, to serve waiting requests or tell them that none can be served.
        self.on_change: Callable[[Engine], None] = lambda engine: None
        #: Called when it is found to lack something.
        self.on_lack: Callable[[Engine, Wants], None] = lambda engine, wants: None
        #: Called when a request has ended here.
        self.on_request_end: Callable[[Engine], None] = lambda engine: None
        self._certificates = secrets.files
        self._http = EngineHttp(self, address.url, config.connect_timeout, secrets.tls)
        self.last_named: Source | None = None
        self._named: dict[tuple[str, int], Source] = {}  # all since its last failure, by endpoint
        self._has_several = False  # endpoints: data-parallel ranks behind one URL
        self._prober: asyncio.Task[None] | None = None
        self.update(address, config, secrets)

    def update(self, address: EngineAddress, config: ProxyConfig, secrets: Secrets) -> None:
        """Take new options."""
        if secrets.files != self._certificates:
            self._http.tls = secrets.tls
            self._certificates = secrets.files
            if not self.healthy and not self.leaving:  # it lacked these, perhaps
                self.failures = 1
                self._probe_soon()
        self.address = address
        self.weight = address.weight
        self.limit = config.engine_requests if address.max_requests is None else address.max_requests
        self._authorization = None if secrets.key is None else f"Bearer {secrets.key}"
        # Keys that the proxy checks are not forwarded to engines.
        self._forwards_keys = config.api_keys_file is None
        self._config = config
        self._http.connect_timeout = config.connect_timeout

    def __str__(self) -> str:
        return f"The {self.role} engine {self.url}"

    @property
    def open(self) -> bool:
        """Whether it accepts new requests, healthy or not."""
        return not (self.drained or self.leaving) and self.weight > 0

    @property
    def usable(self) -> bool:
        return self.healthy and self.open

    @property
    def full(self) -> bool:
        return 0 < self.limit <= self.outstanding

    @property
    def load(self) -> float:
        """Requests under way, divided by its weight."""
        return self.outstanding / (self.weight or 1.0)

    @property
    def source(self) -> Source | None:
        """The endpoint for other engines, of any rank."""
        return self._by_operator() or self.last_named

    def source_of(self, named: Source | None) -> Source | None:
        """The endpoint that has the KV of an answer which named ``named``; None if it named none of several ranks."""
        return self._by_operator() or named or (None if self._has_several else self.last_named)

    def _by_operator(self) -> Source | None:
        """The operator's address, which takes precedence over the engine's."""
        if self.address.kv_host is None or self.address.kv_port is None:
            return None
        named = None if self._has_several else self.last_named
        return Source("" if named is None else named.engine_id, self.address.kv_host, self.address.kv_port)

    def learn(self, params: TransferParams) -> Source | None:
        """Take the endpoint from an answer of this engine, and return it; one object each, as many routes have it."""
        if (source := params.source) is None:
            return None
        endpoint, before = (source.host, source.port), self.last_named
        if before is not None and endpoint != (before.host, before.port):
            # A restarted engine has another id and endpoint, for good. Ranks share an id, on each node another one.
            same = _without_rank(source.engine_id) == _without_rank(before.engine_id)
            self._has_several |= same or endpoint in self._named
        if self._named.get(endpoint) != source:
            self._named[endpoint] = source
        self.last_named = self._named[endpoint]
        self.can_be_followed = params.own.get("can_follow") is True and not self._has_several
        return self.last_named

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
        """Send a request (see ``EngineHttp.ask``), with this engine's key in place of the client's if it has one.

        An engine that refuses the proxy's key has failed; but ``extra_routes`` may want another one. An engine that a
        client has given up is probed, because clients may be less patient than the time limits, and one whose server
        hangs would get requests for ever."""
        headers = dict(headers)
        if self._authorization is not None:
            headers["authorization"] = self._authorization
        elif not self._forwards_keys:
            headers.pop("authorization", None)
        began = time.monotonic()
        try:
            reply = await self._http.ask(method, path, body, headers, timeout, repeatable)
        except asyncio.CancelledError:
            if path != _HEALTH and time.monotonic() - began > self._config.probe_timeout:
                self.check()
            raise
        checked = self._authorization is not None or not self._forwards_keys
        if reply.status == 401 and checked and path.partition("?")[0] not in self._config.extra_routes:
            reply.close()
            message = f"{self} refuses the proxy's key; its api_key_file may be wrong."
            raise EngineFailure(message, unreached=True, lives=True)
        return reply

    def succeeded(self) -> None:
        self.failures = self._errors = 0
        self.confirmed = True
        if self.healthy:
            self._end_probing()  # its API server may be too busy for a probe
        else:
            self._reinstate()

    def failed(self, failure: EngineFailure) -> None:
        """A request failed here. An answer that ends early may be the request's fault (vLLM breaks off streams of
        /v1/responses that ask for what it does not have), so a probe decides: a process that has died refuses it. One
        that is late may be long, or the engine has more to do than it can; several in a row are its fault, and so is
        one more since it was unavailable for that. Of an engine that is unavailable already, a failure tells that it
        may have restarted since."""
        if failure.late and self.healthy:
            self._count_error("was late", again=self.failures > 0)
        elif failure.began and self.healthy:
            self.check()
        else:
            self.mark_unavailable(str(failure), may_have_restarted=not failure.lives)

    def mark_unavailable(self, reason: str, *, may_have_restarted: bool = True) -> None:
        """Do not use this engine until a probe succeeds. ``may_have_restarted``: its cache may be gone."""
        if may_have_restarted:
            self._begin_anew()
        # Many requests may fail at once; that is one failure. A leaving engine is not probed.
        if self.healthy and not self.leaving:
            self.healthy = False
            self.failures += 1
            logger.warning(
                "kvtier: proxy: engine unavailable (%s); it gets no requests until a health probe succeeds",
                reason.rstrip("."),
            )
            self._probe_soon()
            self.on_change(self)

    def _probe_soon(self) -> None:
        self._end_probing()
        self._prober = asyncio.create_task(self._probe_until_healthy(), name=f"probe {self.role} {self.index}")

    def _begin_anew(self) -> None:
        """Another process may answer from now on."""
        self.instance += 1
        self.last_named = None
        self._named.clear()
        self._lacks_something = False
        self.can_be_followed = self._has_several = False
        self.lacking.clear()

    def probe_in_background(self) -> None:
        """Send a health probe. Until it ends, the engine is used, but does not make the proxy ready."""
        self._prober = asyncio.create_task(self._first_probe(), name=f"probe {self.role} {self.index}")

    def serves(self, wants: Wants) -> None:
        if self.lacking.remove(wants):
            self.on_change(self)  # requests may wait for another engine

    def lacks(self, wants: Wants) -> None:
        if self.lacking.add(wants):
            self.on_lack(self, wants)

    def refused(self, status: int, wants: Wants) -> None:
        """It answered 4xx or 5xx to a request that another engine served. That, too, may be by the request: a media
        host may refuse one engine and not the other. So after 5xx a probe decides, unless it has served nothing for a
        while."""
        if status in LACKS and status not in LACKS_AT_ONCE:
            self.lacks(wants)
        if status in FULL:
            if status >= 500:
                self.check()
            return
        if status < 500:
            if not self._lacks_something:
                self._lacks_something = True
                logger.warning(
                    "kvtier: proxy: %s engine %s answered %d to a request that another engine served; compare their "
                    "models, adapters, parsers and lengths (later refusals of this engine are not logged)",
                    self.role, self.url, status,
                )  # fmt: skip
            return
        self._count_error("answered 5xx to requests that others served, or was late,")

    def _count_error(self, what: str, again: bool = False) -> None:
        """Probe it; after some errors without a success between them it is unavailable, even if it answers probes, as
        an engine does whose GPU hangs. ``again``: after this one."""
        now = time.monotonic()
        self._first_error = self._first_error if self._errors else now
        self._errors += 1
        if not again and (self._errors < _ERRORS or now - self._first_error < _ERROR_SECONDS):
            self.check()
            return
        times = f"{self._errors} times in a row" if self._errors > 1 else "again"
        self.mark_unavailable(f"{self} {what} {times}", may_have_restarted=False)

    def check(self) -> None:
        """Probe it: its last answer was an error or ended early, by its own fault or the request's."""
        if self.healthy and not self.leaving and self._prober is None:
            self._prober = asyncio.create_task(self._check(), name=f"probe {self.role} {self.index}")

    async def _check(self) -> None:
        reason = await self._probe()
        self._prober = None
        if reason is not None:
            self.mark_unavailable(reason)

    async def _first_probe(self) -> None:
        reason = await self._probe()
        self._prober = None
        if reason is None:
            self.confirmed = True
        elif not self.confirmed:
            self.mark_unavailable(reason)

    async def _probe_until_healthy(self) -> None:
        while True:
            doublings = min(self.failures - 1, 30)
            await asyncio.sleep(min(self._config.backoff_initial * 2**doublings, self._config.backoff_max))
            reason = await self._probe()
            if reason is None:
                break
            logger.debug("kvtier: proxy: health probe failed (%s)", reason)
            self.failures += 1
            self._begin_anew()
        self._prober = None
        self.confirmed = True
        self._reinstate()

    async def _probe(self) -> str | None:
        """None if it is healthy, else the reason. While this process has no descriptor for a probe, it is repeated."""
        while True:
            try:
                reply = await self.ask("GET", _HEALTH, None, {}, self._config.probe_timeout)
            except AnswersFull:
                await asyncio.sleep(self._config.backoff_initial)
                continue
            except EngineFailure as failure:
                return str(failure)
            reply.close()
            return None if reply.status == 200 else f"{self} answered {reply.status} to a health probe."

    def _reinstate(self) -> None:
        self.healthy = True
        self._errors = 0
        self._end_probing()
        logger.warning("kvtier: proxy: %s engine %s is available again", self.role, self.url)
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
        source = self.source
        return {
            "url": self.url,
            "healthy": self.healthy,
            "confirmed": self.confirmed,
            "drained": self.drained,
            "leaving": self.leaving,
            "weight": self.weight,
            "outstanding": self.outstanding,
            "tokens": self.tokens,
            "failures": self.failures,
            "kv_endpoint": None if source is None else f"{source.host}:{source.port}",
            "engine_id": None if self.last_named is None else self.last_named.engine_id,
        }


def _without_rank(engine_id: str) -> str:
    return _RANK.sub("", engine_id)


class EngineSlot:
    """A request's slot at an engine, counted until ``release`` (idempotent). ``tokens``: to compute there."""

    def __init__(self, engine: Engine, tokens: int = 0):
        self.engine = engine
        self.tokens = tokens
        self._held = True
        engine.outstanding += 1
        engine.tokens += tokens
        engine.weighted_picks += 1 / (engine.weight or 1.0)

    def move(self, engine: Engine, tokens: int) -> None:
        """Change to another engine, even if that is full, or to another number of tokens."""
        if engine is not self.engine:
            self.release()
            self.__init__(engine, tokens)
        elif self._held:
            engine.tokens += tokens - self.tokens
            self.tokens = tokens

    def take(self, other: "EngineSlot") -> None:
        """Be the other slot, which its holder has no more."""
        self.release()
        self.engine, self.tokens, self._held = other.engine, other.tokens, other._held
        other._held = False

    def prompt_computed(self) -> None:
        """Its answer has begun: it has no prompt tokens left to compute."""
        self.move(self.engine, 0)

    def release(self) -> None:
        if self._held:
            self._held = False
            self.engine.outstanding -= 1
            self.engine.tokens -= self.tokens
            self.engine.on_request_end(self.engine)

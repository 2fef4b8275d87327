"""The proxy as an ASGI application: who may do what, and which route does it.

POST /v1/chat/completions, /v1/completions and /inference/v1/generate generate, with P and D. Further routes of OpenAI's
API and of vLLM's are passed on to one engine (``vllm_kvtier.proxy.passing``). The proxy's own: GET /health (200 while
it lives), /ready (200 while requests are wanted and a decode engine is there), /metrics, /kvtier/state; POST
/kvtier/query (what the engines hold for a prompt) and what operators need (``vllm_kvtier.proxy.admin``). Errors have
OpenAI's form.

Plain ASGI: a web framework would cost a third of a millisecond a request, and there is little it could do here.
"""

from __future__ import annotations

from functools import partial

import msgspec

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy import admin, metrics
from vllm_kvtier.proxy.bodies import ClientRequest, Route
from vllm_kvtier.proxy.client_answer import JSON, Answer, refusal
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.exchange import Exchange
from vllm_kvtier.proxy.incoming import Incoming
from vllm_kvtier.proxy.logs import request_id
from vllm_kvtier.proxy.passing import Passing, find_passed
from vllm_kvtier.proxy.query import Query, read_query
from vllm_kvtier.proxy.release import ReleaseCall
from vllm_kvtier.proxy.serving import CLOSING, QUIET_ROUTES, Receive, Send, Serving, Work

logger = get_logger(__name__)

_GENERATING = {route.value: route for route in Route}
_ADMIN = ("/kvtier/drain", "/kvtier/resume", "/kvtier/reload")


def create_app(config: ProxyConfig, *, release: ReleaseCall | None = None, greet: bool = True) -> ProxyApp:
    """The proxy as an ASGI application, which needs its lifespan run.

    ``release`` replaces the call that releases exports (for tests). ``greet``: ask the engines how they are at the
    start. It fails to start, in words, if a key, a certificate or a secret cannot be used.
    """
    return ProxyApp(config, release, greet)


class ProxyApp:
    """``core``: there while the application runs. ``reload``: what POST /kvtier/reload does; None: nothing can be."""

    def __init__(self, config: ProxyConfig, release: ReleaseCall | None, greet: bool):
        self._config = config
        self._release = release
        self._greet = greet
        self.core: ProxyCore | None = None
        self.reload: admin.Reload | None = None

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._http(Incoming(scope), receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003, "reason": "not served here"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            self.core = ProxyCore(self._config, self._release, greet=self._greet)
        except ConfigError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.core.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, incoming: Incoming, receive: Receive, send: Send) -> None:
        assert self.core is not None, "the application's lifespan has not been run"
        token = request_id.set(incoming.id)
        try:
            name, work = self._route(incoming)
            serving = Serving(self.core, incoming, name, work if not isinstance(work, Answer) else _never)
            if isinstance(work, Answer):
                await serving.refuse(receive, send, work)
            else:
                await serving.run(receive, send)
        finally:
            request_id.reset(token)

    def _route(self, incoming: Incoming) -> tuple[str, Work | Answer]:
        """(the route's name in the metrics, what does the work or why nothing does)."""
        core, path, method = self.core, incoming.path, incoming.method
        if path in _ADMIN:
            return path, self._operate(incoming)
        if path in QUIET_ROUTES:
            return path, _only(incoming, ("GET", "HEAD")) or self._page(path)
        # Every other path needs a key where there are keys, also one that does not exist.
        owner = None
        if core.keys is not None and (owner := core.keys.owner(incoming.headers)) is None:
            if not (path == "/kvtier/state" and admin.may_steer(core, incoming)):
                return "unauthorized", _no_key()
        if path == "/kvtier/state":
            return path, _only(incoming, ("GET",)) or _json(core.state)
        tenant = core.tenants.identify(incoming.headers, owner)
        if (route := _GENERATING.get(path)) is not None:
            return path, _only(incoming, ("POST",)) or partial(self._generate, incoming, route, tenant, owner)
        if path == "/kvtier/query":
            return path, _only(incoming, ("POST",)) or partial(self._query, incoming, tenant)
        if (passed := find_passed(path, core.config.extra_routes)) is not None:
            name = "/v1/responses/{id}" if path.startswith("/v1/responses/resp_") else path
            return name, _only(incoming, passed.methods) or partial(self._pass, incoming, passed, tenant, owner)
        return "unknown", refusal(404, f"{method} {path}: Not Found.", "invalid_request_error", CLOSING)

    async def _generate(self, incoming: Incoming, route: Route, tenant: bytes, owner, body: bytes, trace) -> Answer:
        if owner is not None:
            trace["key"] = owner
        headers = incoming.headers
        request = ClientRequest(route, body, header_conversation_id=headers.get("x-conversation-id") or None)
        report = self.core.config.allow_report and headers.get("x-kvtier-report") == "1"
        exchange = Exchange(self.core, request, tenant, incoming.for_engines(), wants_report=report, trace=trace)
        return await exchange.answer()

    async def _query(self, incoming: Incoming, tenant: bytes, body: bytes, trace) -> Answer:
        return await Query(self.core, read_query(body), tenant, incoming.for_engines()).answer()

    async def _pass(self, incoming: Incoming, passed, tenant: bytes, owner, body: bytes, trace) -> Answer:
        if owner is not None:
            trace["key"] = owner
        headers = incoming.for_engines("content-type", "accept", "anthropic-version", "anthropic-beta")
        passing = Passing(self.core, passed, incoming.method, incoming.path, incoming.query, tenant, headers, trace)
        return await passing.answer(body)

    def _operate(self, incoming: Incoming) -> Work | Answer:
        if (wrong := _only(incoming, ("POST",))) is not None:
            return wrong
        if not admin.may_steer(self.core, incoming):
            return admin.forbidden()

        async def work(body: bytes, trace: dict) -> Answer:
            if incoming.path == "/kvtier/reload":
                return await admin.reload(self.reload)
            return await admin.drain(self.core, body, drained=incoming.path == "/kvtier/drain")

        return work

    def _page(self, path: str) -> Work:
        async def work(body: bytes, trace: dict) -> Answer:
            if path == "/metrics":
                return Answer(200, {"content-type": metrics.CONTENT_TYPE}, self.core.metrics.page())
            well = {role: sum(e.usable for e in getattr(self.core, role)) for role in ("prefill", "decode")}
            bad = path == "/ready" and not self.core.ready
            return Answer(503 if bad else 200, JSON, msgspec.json.encode(well | {"ready": self.core.ready}))

        return work


def _json(make) -> Work:
    async def work(body: bytes, trace: dict) -> Answer:
        return Answer(200, JSON, msgspec.json.encode(make()))

    return work


def _only(incoming: Incoming, methods: tuple[str, ...]) -> Answer | None:
    """Why not, if the method is another."""
    if incoming.method in methods:
        return None
    message = f"{incoming.method} {incoming.path}: Method Not Allowed."
    return refusal(405, message, "invalid_request_error", {"allow": ", ".join(methods), **CLOSING})


def _no_key() -> Answer:
    message = "This needs an API key: send Authorization: Bearer KEY."
    return refusal(401, message, "authentication_error", {"www-authenticate": "Bearer", **CLOSING})


async def _never(body: bytes, trace: dict) -> Answer:
    raise AssertionError("a refused request is not worked on")

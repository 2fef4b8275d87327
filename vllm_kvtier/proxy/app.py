"""The proxy as an ASGI application: checks keys and dispatches requests to routes.

* POST /v1/chat/completions, /v1/completions, /inference/v1/generate: a prefill engine, then a decode engine.
* Further routes of OpenAI and vLLM: forwarded to one engine (``routes.passthrough``).
* GET /health (200 while the proxy runs), /ready (200 while it accepts requests and a decode engine answers), /metrics,
  /kvtier/state.
* POST /kvtier/query (what the engines hold for a prompt) and operator commands (``routes.admin``).

Errors have OpenAI's form. Plain ASGI, because a web framework would add a third of a millisecond to each request.
"""

from functools import partial

import msgspec

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy import metrics
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.engines.export_release import ReleaseCall
from vllm_kvtier.proxy.logs import request_id
from vllm_kvtier.proxy.messages.buffers import Held
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest, Route
from vllm_kvtier.proxy.routes import admin
from vllm_kvtier.proxy.routes.client_answer import JSON, Answer, refusal
from vllm_kvtier.proxy.routes.following import FollowingGeneration
from vllm_kvtier.proxy.routes.passthrough import Passthrough, find_passthrough, takes_json
from vllm_kvtier.proxy.routes.query import answer_query
from vllm_kvtier.proxy.routes.serving import CLOSING, QUIET_ROUTES, Receive, Send, Serving, Work

_GENERATING = {route.value: route for route in Route}
_ADMIN = ("/kvtier/drain", "/kvtier/resume", "/kvtier/reload")


def create_app(config: ProxyConfig, *, release: ReleaseCall | None = None, probe_on_start: bool = True) -> "ProxyApp":
    """The proxy as an ASGI application. Its lifespan must be run; startup fails if a key, certificate or secret is bad.

    ``release`` replaces the call that releases exports (for tests). ``probe_on_start``: send each engine a health
    probe.
    """
    return ProxyApp(config, release, probe_on_start)


class ProxyApp:
    """``core``: set while the application runs. ``reload``: what POST /kvtier/reload calls; None without a file."""

    def __init__(self, config: ProxyConfig, release: ReleaseCall | None, probe_on_start: bool):
        self._config = config
        self._release = release
        self._probe_on_start = probe_on_start
        self.core: ProxyCore | None = None
        self.reload: admin.Reload | None = None

    async def __call__(self, scope: dict, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003, "reason": "not served here"})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            self.core = ProxyCore(self._config, self._release, probe_on_start=self._probe_on_start)
        except ConfigError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.core.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: dict, receive: Receive, send: Send) -> None:
        assert self.core is not None, "the application's lifespan has not been run"
        incoming = Incoming(scope, Held(self.core.bodies), Held(self.core.answers))
        token = request_id.set(incoming.id)
        try:
            with incoming.body_held, incoming.answer_held:
                await Serving(self.core, incoming, *self._route(incoming)).run(receive, send)
        finally:
            request_id.reset(token)

    def _route(self, incoming: Incoming) -> tuple[str, Work | Answer]:
        """(the route's name in the metrics, the handler or the refusal)."""
        core, path, method = self.core, incoming.path, incoming.method
        if path in _ADMIN:
            refused = None if admin.is_operator(core, incoming) else admin.forbidden()
            return path, _only(incoming, ("POST",)) or refused or partial(self._operate, path)
        if path in QUIET_ROUTES:
            return path, _only(incoming, ("GET", "HEAD")) or _without_body(incoming) or partial(self._page, path)
        # If keys are configured, every other path needs one, including paths that do not exist.
        owner = None
        if core.keys is not None and (owner := core.keys.owner(incoming.headers)) is None:
            if not (path == "/kvtier/state" and admin.is_operator(core, incoming)):
                message = "The API key is missing or unknown: send Authorization: Bearer KEY."
                headers = {"www-authenticate": "Bearer", **CLOSING}
                return "unauthorized", refusal(401, message, "authentication_error", headers)
        if path == "/kvtier/state":
            return path, _only(incoming, ("GET",)) or self._state
        if core.tenants.trust_header and "x-tenant" in incoming.repeated:
            # A gateway that adds its own behind the client's would leave the choice to the client.
            message = "The header X-Tenant is given more than once."
            return "unauthorized", refusal(400, message, "invalid_request_error", CLOSING)
        tenant = core.tenants.identify(incoming.headers, owner)
        if owner is not None or core.tenants.trust_header:  # else a client can invent tenants
            incoming.body_held.tenant = incoming.answer_held.tenant = tenant
        if (route := _GENERATING.get(path)) is not None:
            refused = _only(incoming, ("POST",)) or _only_json(incoming)
            return path, refused or partial(self._generate, incoming, route, tenant, owner)
        if path == "/kvtier/query":
            return path, _only(incoming, ("POST",)) or partial(self._query, incoming, tenant)
        if (rule := find_passthrough(path, core.config.extra_routes)) is not None:
            name = "/v1/responses/{id}" if path.startswith("/v1/responses/resp_") else path
            refused = _only(incoming, rule.methods) or (_only_json(incoming) if takes_json(path) else None)
            return name, refused or partial(self._forward, incoming, rule, tenant, owner)
        return "unknown", refusal(404, f"{method} {path}: Not Found.", "invalid_request_error", CLOSING)

    async def _generate(self, incoming: Incoming, route: Route, tenant: bytes, owner, body: bytes, trace) -> Answer:
        if owner is not None:
            trace["key"] = owner
        conversation_id = incoming.headers.get("x-conversation-id") or None
        request = ClientRequest(route, body, header_conversation_id=conversation_id)
        return await FollowingGeneration(self.core, incoming, request, tenant, trace).answer()

    async def _query(self, incoming: Incoming, tenant: bytes, body: bytes, trace) -> Answer:
        return await answer_query(self.core, body, tenant, incoming)

    async def _forward(self, incoming: Incoming, rule, tenant: bytes, owner, body: bytes, trace) -> Answer:
        if owner is not None:
            trace["key"] = owner
        return await Passthrough(self.core, incoming, rule, tenant, trace).answer(body)

    async def _operate(self, path: str, body: bytes, trace) -> Answer:
        if path == "/kvtier/reload":
            return await admin.reload(self.reload)
        return await admin.drain(self.core, body, drained=path == "/kvtier/drain")

    async def _page(self, path: str, body: bytes, trace) -> Answer:
        if path == "/metrics":
            return Answer(200, {"content-type": metrics.CONTENT_TYPE}, self.core.metrics.page())
        usable = {role: sum(e.usable for e in getattr(self.core, role)) for role in ("prefill", "decode")}
        bad = path == "/ready" and not self.core.ready
        return Answer(503 if bad else 200, JSON, msgspec.json.encode(usable | {"ready": self.core.ready}))

    async def _state(self, body: bytes, trace) -> Answer:
        return Answer(200, JSON, msgspec.json.encode(self.core.state()))


def _only(incoming: Incoming, methods: tuple[str, ...]) -> Answer | None:
    """The refusal of another method; None if the method is allowed."""
    if incoming.method in methods:
        return None
    message = f"{incoming.method} {incoming.path}: Method Not Allowed."
    return refusal(405, message, "invalid_request_error", {"allow": ", ".join(methods), **CLOSING})


def _without_body(incoming: Incoming) -> Answer | None:
    """No key is looked at before a page: its body would be held for any client."""
    if incoming.headers.get("content-length", "0") == "0" and "transfer-encoding" not in incoming.headers:
        return None
    return refusal(400, f"{incoming.path} takes no body.", "invalid_request_error", CLOSING)


def _only_json(incoming: Incoming) -> Answer | None:
    """As vLLM: a browser lets any page send what it calls plain text or a form, and asks first what it calls JSON."""
    if incoming.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return None
    message = "Unsupported Media Type: Only 'application/json' is allowed"
    return refusal(400, message, "invalid_request_error", CLOSING)

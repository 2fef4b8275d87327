"""``POST /kvtier/drain``, ``/kvtier/resume`` and ``/kvtier/reload``: for operators.

If there is an admin key (``admin_key_file``), every request must send it as a bearer token. Otherwise only requests
from this machine are accepted, and none that a reverse proxy forwarded or a web page made.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import ROLES
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.messages.incoming_request import Incoming
from vllm_kvtier.proxy.messages.request_bodies import BadRequest
from vllm_kvtier.proxy.messages.transfer_params import UNREADABLE
from vllm_kvtier.proxy.routes.client_answer import JSON, Answer, refusal
from vllm_kvtier.wire.auth import is_loopback

#: Reloads the configuration. Raises ConfigError.
Reload = Callable[[], Awaitable[None]]

_FORWARDED_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin", "sec-fetch-site")


class _Target(msgspec.Struct, forbid_unknown_fields=True):
    """An engine, in one role or all roles; without an engine, the proxy itself."""

    engine: str | None = None
    role: str | None = None


def is_operator(core: ProxyCore, incoming: Incoming) -> bool:
    if core.admin_key is not None:
        return core.admin_key.owner(incoming.headers) is not None
    return is_loopback(incoming.client) and not any(name in incoming.headers for name in _FORWARDED_HEADERS)


def forbidden() -> Answer:
    message = "This route is for operators: send the admin key as a bearer token, or call it from the proxy's machine."
    return refusal(403, message, "permission_error")


async def drain(core: ProxyCore, body: bytes, drained: bool) -> Answer:
    """Drain or resume an engine, or the proxy itself (/ready then answers 503). Raises BadRequest."""
    target = _read(body)
    if target.engine is None:
        core.draining = drained
    else:
        url = target.engine.rstrip("/")
        found = [engine for engine in core.fleet if engine.url == url and target.role in (None, engine.role)]
        if not found:
            raise BadRequest(f"There is no engine {target.engine}; see /kvtier/state.", status=404, param="engine")
        for engine in found:
            engine.drained = drained
            engine.on_change(engine)
    return Answer(200, JSON, msgspec.json.encode(core.state()))


async def reload(reload_config: Reload | None) -> Answer:
    if reload_config is None:
        return refusal(409, "The proxy was started without a configuration file.", "invalid_request_error")
    try:
        await reload_config()
    except ConfigError as error:
        return refusal(422, str(error), "invalid_request_error")
    return Answer(200, JSON, b'{"reloaded":true}')


def _read(body: bytes) -> _Target:
    if not body.strip():
        return _Target()
    try:
        target: Any = msgspec.json.decode(body, type=_Target)
    except (msgspec.ValidationError, *UNREADABLE) as error:
        raise BadRequest(f'Send {{"engine": URL}}, or an empty body for the proxy itself: {error}.') from error
    if target.role is not None and target.role not in ROLES:
        raise BadRequest(f"The role is {target.role!r}; it must be one of {', '.join(ROLES)}.", param="role")
    return target

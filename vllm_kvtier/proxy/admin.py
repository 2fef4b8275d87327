"""``POST /kvtier/drain``, ``/kvtier/resume`` and ``/kvtier/reload``: for operators.

With an admin key (``admin_key_file``) it must be sent as a bearer token, wherever the request comes from. Without one,
only requests from this machine are taken, and none that a reverse proxy has passed on or a web page has made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.bodies import BadRequest
from vllm_kvtier.proxy.client_answer import JSON, Answer, refusal
from vllm_kvtier.proxy.config import ROLES
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.incoming import Incoming
from vllm_kvtier.proxy.params import UNREADABLE
from vllm_kvtier.wire.auth import is_loopback

#: Reads the configuration again and applies it. Raises ConfigError.
Reload = Callable[[], Awaitable[None]]

_FROM_ELSEWHERE = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin", "sec-fetch-site")


class _Which(msgspec.Struct, forbid_unknown_fields=True):
    """An engine, in one role or all; or, without any, the proxy itself."""

    engine: str | None = None
    role: str | None = None


def may_steer(core: ProxyCore, incoming: Incoming) -> bool:
    if core.admin_key is not None:
        return core.admin_key.owner(incoming.headers) is not None
    return is_loopback(incoming.client) and not any(name in incoming.headers for name in _FROM_ELSEWHERE)


def forbidden() -> Answer:
    message = "This is for operators: send the admin key as a bearer token, or ask from the proxy's own machine."
    return refusal(403, message, "permission_error")


async def drain(core: ProxyCore, body: bytes, drained: bool) -> Answer:
    """Give an engine no new requests, or say on /ready that the proxy wants none; or the reverse. Raises BadRequest."""
    which = _read(body)
    if which.engine is None:
        core.draining = drained
    else:
        url = which.engine.rstrip("/")
        found = [engine for engine in core.fleet if engine.url == url and which.role in (None, engine.role)]
        if not found:
            raise BadRequest(f"There is no engine {which.engine}; see /kvtier/state.", status=404, param="engine")
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


def _read(body: bytes) -> _Which:
    if not body.strip():
        return _Which()
    try:
        which: Any = msgspec.json.decode(body, type=_Which)
    except (msgspec.ValidationError, *UNREADABLE) as error:
        raise BadRequest(f'Send {{"engine": URL}}, or nothing to mean the proxy itself: {error}.') from error
    if which.role is not None and which.role not in ROLES:
        raise BadRequest(f"A role is one of {', '.join(ROLES)}.", param="role")
    return which

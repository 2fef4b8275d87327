"""What the proxy's requests share: engines, places, routes, tenants, keys and counters."""

from __future__ import annotations

from collections import Counter

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.admission import Admission
from vllm_kvtier.proxy.config import ROLES, ProxyConfig
from vllm_kvtier.proxy.conversations import RouteTable
from vllm_kvtier.proxy.endpoints import Endpoints
from vllm_kvtier.proxy.engine_http import read_key
from vllm_kvtier.proxy.engines import Engine
from vllm_kvtier.proxy.fleet import Fleet
from vllm_kvtier.proxy.keys import ApiKeys
from vllm_kvtier.proxy.metrics import Gauges, Metrics
from vllm_kvtier.proxy.prefixes import PrefixMemory
from vllm_kvtier.proxy.release import ExportReleaser, ReleaseCall
from vllm_kvtier.proxy.routing import Router
from vllm_kvtier.proxy.tenants import Tenants
from vllm_kvtier.wire.auth import ClusterKey

logger = get_logger(__name__)

# What is made once, of these options; other values need a restart.
_FIXED = ("salt_secret_file", "trust_tenant_header", "cluster_key_file", "query_timeout")


class ProxyCore:
    """Made and closed within the event loop that serves. Raises ConfigError if a secret is no use.

    ``draining``: not ready any more, though everything is served.
    """

    def __init__(self, config: ProxyConfig, release: ReleaseCall | None = None, *, greet: bool = True):
        self.config = config
        self.draining = False
        self.tenants = Tenants.from_file(config.salt_secret_file, trust_header=config.trust_tenant_header)
        self.endpoints = Endpoints(config.cluster_key_file, config.query_timeout)
        self.routes = RouteTable(config.conversations_kept, config.conversation_ttl)
        self.prefixes = PrefixMemory(config.prefixes_kept)
        self.admission = Admission(config, ROLES)
        self.fleet = Fleet(lambda engine: self.admission.turn(engine.role), self._left)
        self.router = Router(self.fleet, self.prefixes, config)
        self.releaser = ExportReleaser(release or self.endpoints.release)
        self.keys, self.admin_key = _read_keys(config)
        self._counts: Counter[str] = Counter()
        gauges = Gauges(self.fleet, self.admission, self.routes, self.prefixes, lambda: self.ready)
        self.metrics = Metrics(gauges)
        self.fleet.apply(config, greet=greet)

    @property
    def prefill(self) -> list[Engine]:
        return self.fleet.prefill

    @property
    def decode(self) -> list[Engine]:
        return self.fleet.decode

    @property
    def ready(self) -> bool:
        """Whether a request sent now would find a decode engine that is known to be there."""
        return not self.draining and any(engine.usable and engine.confirmed for engine in self.decode)

    def apply(self, config: ProxyConfig) -> None:
        """Go on with other options. Raises ConfigError; then all is as before."""
        keys, admin_key = _read_keys(config)
        self.fleet.apply(config)
        self.keys, self.admin_key = keys, admin_key
        for name in _FIXED:
            if getattr(config, name) != getattr(self.config, name):
                logger.warning("%s has changed; that takes a restart of the proxy.", name)
        self.config = self.admission.config = self.router.config = config
        self.routes.capacity, self.routes.ttl = config.conversations_kept, config.conversation_ttl
        self.prefixes.capacity = config.prefixes_kept
        for role in ROLES:
            self.admission.turn(role)

    def count(self, event: str) -> None:
        self._counts[event] += 1
        self.metrics.event(event)

    def state(self) -> dict[str, object]:
        """What the proxy knows, without tenants, texts, keys, salts or export ids."""
        return {
            "prefill": [engine.state() for engine in self.prefill],
            "decode": [engine.state() for engine in self.decode],
            "pooling": [engine.state() for engine in self.fleet.pooling],
            "leaving": [engine.state() for engine in self.fleet.leaving()],
            "waiting": {role: self.admission.waiting(role) for role in ROLES},
            "ready": self.ready,
            "draining": self.draining,
            "conversations": len(self.routes),
            "counts": {**self._counts, "released": self.releaser.released},
        }

    async def aclose(self) -> None:
        await self.releaser.aclose()
        self.endpoints.close()
        await self.fleet.aclose()

    def _left(self, engine: Engine) -> None:
        self.admission.left(engine.role)


def _read_keys(config: ProxyConfig) -> tuple[ApiKeys | None, ApiKeys | None]:
    """(clients' keys, the admin's key). Raises ConfigError."""
    admin = config.admin_key_file
    return (
        None if config.api_keys_file is None else ApiKeys.load(config.api_keys_file),
        None if admin is None else ApiKeys({read_key(admin, "The admin key"): "admin"}),
    )


def check_secrets(config: ProxyConfig) -> None:
    """Raise ConfigError for what would keep a core from being made, before anything listens."""
    _read_keys(config)
    Tenants.from_file(config.salt_secret_file, trust_header=config.trust_tenant_header)
    if config.cluster_key_file is not None:
        ClusterKey.load(config.cluster_key_file)
    for role in ROLES:
        for address in getattr(config, role):
            Engine(role, 0, address, config)

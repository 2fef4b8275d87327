"""What all requests of the proxy share: engines, engine slots, routes, tenants, keys and counters."""

import asyncio
from collections import Counter

from vllm_kvtier.logs import get_logger
from vllm_kvtier.proxy.config import ROLES, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.engine_http import Secrets, read_key
from vllm_kvtier.proxy.engines.export_release import ExportReleaser, ReleaseCall
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.keys import ApiKeys
from vllm_kvtier.proxy.kv_events.feeds import KVEvents
from vllm_kvtier.proxy.kv_events.prompt_tokens import PromptTokenizer
from vllm_kvtier.proxy.messages.buffers import Buffers
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest
from vllm_kvtier.proxy.messages.transfer_params import Export
from vllm_kvtier.proxy.metrics import Gauges, Metrics
from vllm_kvtier.proxy.routing.admission import Admission
from vllm_kvtier.proxy.routing.conversations import CHARS_PER_TOKEN, Name, RouteTable
from vllm_kvtier.proxy.routing.policies import POLICIES
from vllm_kvtier.proxy.routing.policies.base import RoutingPolicy
from vllm_kvtier.proxy.routing.prefixes import PrefixMemory
from vllm_kvtier.proxy.routing.prompt import Prompt
from vllm_kvtier.proxy.routing.router import Router
from vllm_kvtier.proxy.tenants import Tenants
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.client import AsyncEndpointClient

logger = get_logger(__name__)

MAX_QUERIES = 4  # at once: token ids take ten times the memory of their body

# Options that are read once; a change needs a restart.
_FIXED = ("salt_secret_file", "trust_tenant_header", "cluster_key_file", "query_timeout")


class ProxyCore:
    """Created and closed within the serving event loop. Raises ConfigError if a secret cannot be used.

    ``draining``: /ready answers 503; requests are still served.
    """

    def __init__(self, config: ProxyConfig, release: ReleaseCall | None = None, *, probe_on_start: bool = True):
        self.config = config
        self.draining = False
        cluster_key = _cluster_key(config)
        self.tenants = _tenants(config)
        if config.salt_secret_file is None and config.cluster_key_file is None:
            logger.info(
                "kvtier: proxy: no salt_secret_file: salts are random, and after a restart of the proxy KV of earlier "
                "requests is not found"
            )
        self.bodies, self.answers = Buffers(config.max_buffered_bytes), Buffers(config.max_buffered_bytes)
        self.routes = RouteTable(config.max_conversations, config.conversation_ttl)
        self.prefixes = PrefixMemory(config.max_prefixes)
        self.admission = Admission(config, ROLES)
        self.fleet = Fleet(
            on_change=lambda engine: self.admission.serve_waiting(engine.role, anew=True),
            on_request_end=lambda engine: self.admission.request_ended(engine.role),
            on_all_lack=lambda role, wants: self.admission.serve_waiting(role, anew=True, wants=wants),
        )
        self.events = KVEvents(self.fleet)
        self.tokenizer = PromptTokenizer(self.fleet, config, self.answers, self.count)
        self.router = Router(self.fleet, self._policy(config), config)
        self.querying = asyncio.Semaphore(MAX_QUERIES)
        self.releaser = ExportReleaser(release or self._release)
        self.keys, self.admin_key = _read_keys(config)
        self._counts: Counter[str] = Counter()
        tables = {"conversations": self.routes, "prefixes": self.prefixes}
        gauges = Gauges(self.fleet, self.admission, tables, self.events, self._buffered, lambda: self.ready)
        self.metrics = Metrics(gauges)
        self.fleet.apply(config, probe_on_start=probe_on_start)
        self.events.apply(config)
        # Last, because it must be closed.
        self.endpoints = AsyncEndpointClient(cluster_key, config.query_timeout)

    @property
    def prefill(self) -> list[Engine]:
        return self.fleet.prefill

    @property
    def decode(self) -> list[Engine]:
        return self.fleet.decode

    @property
    def ready(self) -> bool:
        """Whether the proxy accepts requests and a usable decode engine has answered."""
        return not self.draining and any(engine.usable and engine.confirmed for engine in self.decode)

    def apply(self, config: ProxyConfig) -> None:
        """Take other options. Raises ConfigError, and then changes nothing."""
        keys, admin_key = _read_keys(config)
        self.fleet.apply(config)
        self.keys, self.admin_key = keys, admin_key
        for name in _FIXED:
            if getattr(config, name) != getattr(self.config, name):
                logger.warning("kvtier: proxy: option %s changed; restart the proxy to apply it", name)
        self.events.apply(config)
        self.config = self.admission.config = self.router.config = self.tokenizer.config = config
        self.router.policy = self._policy(config)
        self.routes.capacity, self.routes.ttl = config.max_conversations, config.conversation_ttl
        self.prefixes.capacity = config.max_prefixes
        self.bodies.limit = self.answers.limit = config.max_buffered_bytes
        for role in ROLES:
            self.admission.serve_waiting(role, anew=True)

    def count(self, event: str) -> None:
        self._counts[event] += 1
        self.metrics.event(event)

    async def prompt(self, request: ClientRequest, name: Name, salt: str, headers: dict[str, str]) -> Prompt:
        """What the router knows of a request's prompt; with token ids if its policy reads them."""
        if self.router.policy.reads_tokens:
            return await self.tokenizer.prompt(request, name, salt, headers)
        return Prompt(name, request.prompt_chars // CHARS_PER_TOKEN)

    def _policy(self, config: ProxyConfig) -> RoutingPolicy:
        return POLICIES[config.routing_policy](self.prefixes, self.events)

    def _buffered(self) -> dict[str, int]:
        return {"bodies": self.bodies.held, "answers": self.answers.held}

    async def _release(self, export: Export) -> None:
        await self.endpoints.release(export.host, export.port, export.export)

    def state(self) -> dict[str, object]:
        """The state of engines and queues, without tenants, texts, keys, salts or export ids."""
        return {
            **{role: [engine.state() for engine in getattr(self.fleet, role)] for role in ROLES},
            "leaving": [engine.state() for engine in self.fleet.leaving()],
            "waiting": {role: self.admission.waiting(role) for role in ROLES},
            "ready": self.ready,
            "draining": self.draining,
            "conversations": len(self.routes),
            "buffered_bytes": self._buffered(),
            "counts": {**self._counts, "released": self.releaser.released},
        }

    async def aclose(self) -> None:
        await self.releaser.aclose()
        await self.events.aclose()
        self.endpoints.close()
        await self.fleet.aclose()


def _cluster_key(config: ProxyConfig) -> ClusterKey | None:
    return None if config.cluster_key_file is None else ClusterKey.load(config.cluster_key_file)


def _tenants(config: ProxyConfig) -> Tenants:
    secret = config.salt_secret_file or config.cluster_key_file
    return Tenants.from_file(secret, trust_header=config.trust_tenant_header)


def _read_keys(config: ProxyConfig) -> tuple[ApiKeys | None, ApiKeys | None]:
    """(keys of clients, key of the operator). Raises ConfigError."""
    admin = config.admin_key_file
    return (
        None if config.api_keys_file is None else ApiKeys.load(config.api_keys_file),
        None if admin is None else ApiKeys({read_key(admin, "The admin key"): "admin"}),
    )


def check_secrets(config: ProxyConfig) -> None:
    """Raise ConfigError if ``ProxyCore`` would; called before the server listens."""
    _read_keys(config)
    _cluster_key(config)
    _tenants(config)
    for role in ROLES:
        for address in getattr(config, role):
            Secrets.read(address)

"""What the proxy's requests share: engines, routes, tenants and counters."""

from __future__ import annotations

from collections import Counter

from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.conversations import RouteTable
from vllm_kvtier.proxy.endpoints import Endpoints
from vllm_kvtier.proxy.engines import Engine
from vllm_kvtier.proxy.release import ExportReleaser, ReleaseCall
from vllm_kvtier.proxy.routing import Router
from vllm_kvtier.proxy.tenants import Tenants


class ProxyCore:
    """Made and closed within the event loop that serves. Raises ConfigError if a secret is no use."""

    def __init__(self, config: ProxyConfig, release: ReleaseCall | None = None):
        self.config = config
        self.tenants = Tenants.from_file(config.salt_secret_file, trust_header=config.trust_tenant_header)
        self.prefill = [Engine("prefill", i, address, config) for i, address in enumerate(config.prefill)]
        self.decode = [Engine("decode", i, address, config) for i, address in enumerate(config.decode)]
        self.router = Router(self.prefill, self.decode, config.affinity_slack)
        self.endpoints = Endpoints(config.cluster_key_file, config.query_timeout)
        self.routes = RouteTable(config.conversations_kept, config.conversation_ttl)
        self.releaser = ExportReleaser(release or self.endpoints.release)
        self._counts: Counter[str] = Counter()

    def count(self, event: str) -> None:
        self._counts[event] += 1

    def state(self) -> dict[str, object]:
        """What the proxy knows, without tenants, texts, salts or export ids."""
        return {
            "prefill": [engine.state() for engine in self.prefill],
            "decode": [engine.state() for engine in self.decode],
            "conversations": len(self.routes),
            "counts": {**self._counts, "released": self.releaser.released},
        }

    async def aclose(self) -> None:
        await self.releaser.aclose()
        self.endpoints.close()
        for engine in (*self.prefill, *self.decode):
            await engine.aclose()

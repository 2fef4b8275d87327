"""What the proxy says to the engines' connectors: releases of exports, and queries."""

from __future__ import annotations

from vllm_kvtier.proxy.params import Export, Source
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.client import AsyncEndpointClient
from vllm_kvtier.wire.messages import Holding


class Endpoints:
    """The client of all endpoints, made on first use: a proxy that never needs one opens no sockets.

    To be used and closed on one event loop. The ZMQ connections reconnect by themselves when an engine
    restarts under its address.
    """

    def __init__(self, cluster_key_file: str | None, query_timeout: float):
        """Raises ConfigError if there is a cluster key file and it cannot be used."""
        self._key = ClusterKey.load(cluster_key_file) if cluster_key_file else None
        self._query_timeout = query_timeout
        self._client: AsyncEndpointClient | None = None

    async def release(self, export: Export) -> None:
        """Give up an export. Raises TimeoutError if the message could not even be handed to a connection."""
        await self._made().release(export.host, export.port, export.export)

    async def query(self, source: Source, tokens: list[int], cache_salt: str) -> Holding:
        """What an engine holds for a prompt; it computes nothing. Raises PeerRefused or TimeoutError.

        Questions to one engine wait for each other, so the caller needs a deadline of its own.
        """
        return await self._made().query(source.host, source.port, tokens, cache_salt)

    def close(self) -> None:
        """Releases that were sent still have a moment to leave."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _made(self) -> AsyncEndpointClient:
        if self._client is None:
            self._client = AsyncEndpointClient(self._key, self._query_timeout)
        return self._client

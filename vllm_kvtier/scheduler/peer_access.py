"""Opens this engine to other engines and to the store, and closes it, by the messages of its workers.

On the reactor's thread; any thread may call ``refuse`` and ``hello``.
"""

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.sources.node_store import NodeStore
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)

WORKERS_SECONDS = 120.0  # after the start; all workers report as soon as this side listens


class PeerAccess:
    """Open: the namespace and all ranks are known. Closed: the engine starts or sleeps, or its caches cannot be read.
    Refused, for good: the namespace does not name this engine's KV; its requests go on."""

    def __init__(
        self,
        engine: EngineContext,
        server: LeaseServer,
        store: NodeStore | None,
        offloader: Offloader | None,
        sharing: PeerDirectoryClient | None,
        clearing: ChecksumClearing,
    ):
        self._info, self._identity, self._reactor = engine.info, engine.identity, engine.reactor
        self._server, self._store, self._offloader, self._sharing = server, store, offloader, sharing
        self._clearing = clearing
        self._checksums_ready: dict[int, int] = {}  # by rank: the last step
        self._present: set[int] = set()  # ranks
        self.refused: str | None = None  # the reason

    @property
    def closed(self) -> bool:
        return bool(self.refused or self._server.unusable)

    def hello(self) -> m.Hello | None:
        return None if self.closed else self._identity.hello()

    def refuse(self, reason: str) -> None:
        self.refused = reason  # nothing opens from now on
        self._reactor.call_soon(self.close)

    def close(self, reason: str = "") -> None:
        reason = self.refused or reason
        self._server.close(reason)
        if self._sharing is not None:
            self._sharing.leave()
        logger.warning("kvtier: this engine serves without pulls: %s", reason)

    def look_for_workers(self) -> None:
        """After WORKERS_SECONDS: those that cannot reach this side's socket send nothing."""
        missing = self._info.world_size - len(self._present)
        if missing and not self.refused:
            self.close(
                f"{missing} of its {self._info.world_size} workers have not reported, and until then it neither stores "
                "nor loads KV: all processes of an engine need the same XDG_RUNTIME_DIR, and an engine over several "
                "nodes its first rank on this one, a cluster_key_file and an endpoint_host that the others reach"
            )

    def on_message(self, message: lm.LinkMessage) -> None:
        """Of a worker."""
        identity = self._identity
        match message:
            case lm.Described():
                self._report(message.rank)
                identity.described[message.rank] = message
                self.open_if_ready()
            case lm.PoolReady() if self._store is not None:
                self._store.reached(message)
            case lm.StoreFrame() if self._store is not None:
                self._store.tunnelled(message)
            case lm.LinkRenewed() if self._store is not None and self._offloader is not None:
                self._store.link_renewed(message.rank)
                self._offloader.jobs.lost()
            case lm.Stored() if self._offloader is not None:
                self._offloader.jobs.stored(message)
            case lm.Register():
                identity.ranks[message.info.rank] = message.info
                identity.wire_codecs[message.info.rank] = message.wire_codec
                self._checksums_ready.setdefault(message.info.rank, -1)
                self.open_if_ready()
            case lm.Unusable():
                self._report(message.rank)
                self.close(message.reason)
            case lm.Asleep():
                if self._server.unusable is None:
                    identity.ranks.clear()  # the other ranks sleep too
                identity.ranks.pop(message.rank, None)
                identity.renew_instance()
                self._server.close(self.refused or "the engine sleeps")
                if self._sharing is not None:  # vLLM has reset the cache, because the weights may change meanwhile
                    self._sharing.leave()
            case lm.ChecksumsCleared():
                self._clearing.cleared(message)
            case lm.ChecksumsReady():
                self._checksums_ready[message.rank] = max(self._checksums_ready.get(message.rank, -1), message.step)
                if len(self._checksums_ready) == self._info.world_size:
                    self._server.checksums_ready(min(self._checksums_ready.values()))

    def _report(self, rank: int) -> None:
        self._present.add(rank)
        self._clearing.present(rank)

    def open_if_ready(self) -> None:
        identity, world_size = self._identity, self._info.world_size
        if identity.namespace is None:  # also if the engine is not supported
            return
        if self._store is not None and not self._store.opened and len(identity.described) == world_size:
            try:
                self._store.open(identity.namespace, identity.described, identity.codec)
            except ValueError as error:
                logger.warning("kvtier: serving without a store: %s", error)
                self._store = None
        if len(identity.ranks) == world_size and not self.refused:
            if any(codec != identity.wire_codec for codec in identity.wire_codecs.values()):
                # Each process resolves "auto"; a record of ``quality`` came in between. The namespace does not name
                # the codec of this worker.
                self.refuse(
                    "its workers do not agree on wire_codec auto: this model was measured while the engine started "
                    "(restart it), or not on each of the engine's nodes"
                )
                return
            ranks = [identity.ranks[r] for r in sorted(identity.ranks)]
            welcome = m.Welcome(m.PROTOCOL, identity.instance, ranks, identity.namespace.hash_block_size)
            self._server.open(identity.namespace, welcome)
            if self._sharing is not None and all(info.shared is not None for info in ranks):
                self._sharing.opened(identity.address)
            logger.info("kvtier: engine %s answers on %s:%d", self._info.engine_id, *identity.address)

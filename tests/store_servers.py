"""Node stores in this process, for tests."""

from store_support import RawClient, engine_hello
from support import eventually

from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.server import StoreServer


def make(path, on_idle=lambda: None, **options) -> StoreServer:
    """Started, with all of its memory; 1 MiB unless ``options`` give another size."""
    server = StoreServer(str(path), StoreOptions(**{"size": "1MiB", **options}), on_idle)
    server.start()
    eventually(lambda: server.memory.ready == server.memory.usable)
    return server


def assert_serves(server: StoreServer) -> None:
    with RawClient(server.path, engine_hello("check")) as client:
        assert client.stat().instance == server.instance

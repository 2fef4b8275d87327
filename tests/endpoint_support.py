"""Lease servers and clients of engines on loopback: one that exports, and one that pulls.

    python tests/endpoint_support.py PORT INSTANCE KEY_FILE

runs the former, which ``SourceProcess`` starts and kills. It prints its port, and "asked" for every lease request of
its prefix cache, which it never answers. Any client may lease its exports.
"""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import zmq
from context_fakes import engine_of
from support import eventually

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeaseClient
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.shapes.read_paths import Reach, ReadPath
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.geometry import CacheGeometry
from vllm_kvtier.wire.reactor import Reactor

HASH_BLOCK_SIZE = 4
BLOCK_HASHES = [bytes([i]) * 8 for i in range(1, 9)]
NAMESPACE = m.Namespace("model", "bf16", "sha256_cbor", "seed", HASH_BLOCK_SIZE, 1, 1)
ALL_PATHS = Reach(frozenset(ReadPath))
STOP_SECONDS = 20.0  # what a busy machine may take for what happens at once
FAST = dict(bidirectional=True, lease_seconds=0.6, lookup_timeout=1.5, handshake_timeout=1.5)


def export(name="e", tokens=8 * HASH_BLOCK_SIZE, kind=LeaseKind.HANDOFF, ready=-1, seconds=60.0, first=1) -> Export:
    ids = list(range(first, first + -(-tokens // HASH_BLOCK_SIZE)))
    block_hashes = BLOCK_HASHES[: tokens // HASH_BLOCK_SIZE]
    groups = [GroupBlocks(HASH_BLOCK_SIZE, ids)]
    return Export(
        name, kind, tokens, block_hashes, b"digest", b"", groups, list(ids), ready, time.monotonic() + seconds
    )


def ranks(agent="agent") -> list[m.RankInfo]:
    return [m.RankInfo(0, agent, b"", "DRAM", 0, 100, (), CacheGeometry((), "little"), 0)]


class Source:
    """An engine that exports: lease server, export table, and the calls to its engine's thread."""

    def __init__(
        self, instance="source/1", port=0, key=None, namespace=NAMESPACE, is_open=True, lend=None, hash_block_size=0,
        stretch=None, **options,
    ):  # fmt: skip
        self.dropped = []
        self.config = KVTierConfig(**{**FAST, "endpoint_port": port, **options})
        self.table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 1000))
        self.reactor = Reactor(instance)
        self.serving, self.queries, self.pullers, self.freed = [], [], [], []
        self.endpoint = LeaseServer(
            engine_of(self.reactor, self.config, instance), self.table, key,
            LeaseServerEvents(
                lambda: self.freed.extend(sum(self.table.take_freed(), [])),
                lambda query, answer: self.queries.append((query, answer)),
                self.serving.append, self.pullers.append, lend, stretch, self.dropped.append,
            ),
        )  # fmt: skip
        self.address = ("127.0.0.1", self.endpoint.port)
        if is_open:
            self.endpoint.open(namespace, m.Welcome(m.PROTOCOL, instance, ranks(), hash_block_size))
        self.reactor.start()

    def on_reactor(self, callback):
        """Run on the reactor's thread and wait for it."""
        done, out = threading.Event(), []
        self.reactor.call_soon(lambda: (out.append(callback()), done.set()))
        assert done.wait(10)
        return out[0]

    def leases(self) -> int:
        return self.table.counts()["leases"]

    def stop(self):
        self.reactor.stop()


class Asker:
    """An engine that pulls."""

    near = ""  # the instance that it takes for one of its own node

    def __init__(self, key=None, namespace=NAMESPACE, reach=lambda ranks: ALL_PATHS, hello=True, **options):
        self.reactor = Reactor("asker")
        self.greeting = m.Hello(m.PROTOCOL, "asker/1", namespace) if hello is True else hello
        self.peers = LeaseClient(self.reactor, KVTierConfig(**{**FAST, **options}), key, lambda: self.greeting, reach)
        self.reactor.start()

    def ask(self, address, start=0, block_hashes=BLOCK_HASHES, **fields):
        return self.peers.ask(
            address, same_node_instance=self.near, start=start, block_hashes=block_hashes, lora_fingerprint=b"",
            **fields,
        )  # fmt: skip

    def answer(self, address, seconds=10.0, **fields):
        pending = self.ask(address, **fields)
        return eventually(lambda: pending.outcome, seconds, "an answer")

    def held(self):
        return self.peers.held_leases()

    def stop(self):
        self.reactor.stop()


def making(**options):
    """For a fixture: yields a factory of sources and askers with these default options, and stops them at the end."""
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **{**options, **kwargs}))
        return made[-1]

    yield make
    for thing in made:
        begin = time.monotonic()
        thing.stop()
        assert time.monotonic() - begin < STOP_SECONDS and not thing.reactor._thread.is_alive(), "its thread hangs"


class SourceProcess:
    """A source that can be killed. Use as a context."""

    def __init__(self, port: int = 0, instance: str = "source/1", key_file: str = ""):
        command = [sys.executable, __file__, str(port), instance, key_file]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = ("127.0.0.1", int(self.process.stdout.readline()))

    def await_ask(self) -> None:
        assert self.process.stdout.readline() == "asked\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "SourceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main() -> None:
    port, instance, key_file = sys.argv[1:]
    key = ClusterKey.load(key_file) if key_file else None
    source = Source(instance, int(port), key, lend=lambda *_: print("asked", flush=True), lookup_timeout=60.0)
    source.table.add(export(kind=LeaseKind.RETAINED, seconds=600.0))
    print(source.endpoint.port, flush=True)
    sys.stdin.read()  # until the parent process has ended


@contextmanager
def raw(address, greet=True):
    """A hand-made client: (socket, send, receive)."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://{address[0]}:{address[1]}")

    def receive(seconds=5.0):
        assert socket.poll(seconds * 1000), "no answer"
        return m.decode_engine(socket.recv_multipart()[-1])

    try:
        if greet:
            socket.send(m.encode(m.Hello(m.PROTOCOL, "raw/1", NAMESPACE)))
            assert isinstance(receive(), m.Welcome)
        yield socket, lambda message: socket.send(m.encode(message)), receive
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    main()

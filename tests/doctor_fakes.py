"""Fake engines for `kvtier doctor` and related commands: a real endpoint and real HTTP, with chosen answers.

A prompt's tokens are its bytes. Block hashes depend on seed, salt and tokens as in a real engine. A real node store
answers which blocks are stored.
"""

import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
from cache_groups import cache_groups
from context_fakes import engine_of
from store_support import BLOCK_PAGES, EVERYTHING, RawClient, items_of

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.proxy.metrics import PREFIX
from vllm_kvtier.scheduler.admin.explain import spans_in_tokens, tier_source
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import CacheGeometry, GroupGeometry, RegionGeometry
from vllm_kvtier.wire.reactor import Reactor

HASH_BLOCK_SIZE = 16
NAMESPACE = m.Namespace("model-a", "auto/bfloat16", "sha256_cbor", "5eed", HASH_BLOCK_SIZE, 1, 1)


def geometry(order: str = "outer", heads: int = 4) -> CacheGeometry:
    region = RegionGeometry("layer0", heads, 0, HASH_BLOCK_SIZE, 1, 256, order, "", "bfloat16")
    return CacheGeometry((GroupGeometry(HASH_BLOCK_SIZE, "full", None, (region,)),), "little")


def ranks(count: int = 1, shape: CacheGeometry | None = None) -> list[m.RankInfo]:
    return [m.RankInfo(r, f"agent{r}", b"", "DRAM", 0, 100, (), shape or geometry(), 0) for r in range(count)]


class FakeEngine:
    """``namespace``: None if it is still starting, with ``why``. ``store``: path of its node store."""

    def __init__(self, namespace=NAMESPACE, store="", why=None, key=None, ranks=None, **options):
        self.namespace, self.gpu_cache, self.exported = namespace, {}, {}
        self.reactor = Reactor("fake-engine")
        self.silent = self.busy = False
        self.load_decisions, self.lent, self.words = [], [], []
        table = ExportTable(HASH_BLOCK_SIZE, {LeaseKind.HANDOFF: 1000, LeaseKind.RETAINED: 1000})
        self.endpoint = LeaseServer(
            engine_of(self.reactor, KVTierConfig(**options)), table, key,
            LeaseServerEvents(lambda: None, self._question, lambda on: None, lambda ask: None),
        )  # fmt: skip
        if why is not None:
            self.endpoint.unusable = why
        else:
            self.endpoint.open(namespace, m.Welcome(m.PROTOCOL, "fake/1", ranks or globals()["ranks"](),
                                                  namespace.hash_block_size))  # fmt: skip
        self.address = f"127.0.0.1:{self.endpoint.port}"
        self._path = store
        self._client = None
        if store:
            shapes = [sm.GroupShape(hash_blocks_per_block=1, slot_pages=BLOCK_PAGES)]
            hello = sm.Hello("fake", os.getpid(), "engine", hash_block_size=HASH_BLOCK_SIZE, groups=shapes)
            connected = threading.Event()
            self._client = StoreClient(self.reactor, store, hello, on_change=connected.set)
            self._client.start()
        self.reactor.start()
        if store:
            assert connected.wait(10) and self._client.connected, self._client.reason

    @property
    def namespace_id(self) -> bytes:
        return hashlib.blake2b(m.encode(self.namespace), digest_size=sm.HASH_BYTES).digest()

    def block_hashes(self, text: str, salt: str = "") -> bytes:
        """Packed hashes of the whole blocks of a prompt."""
        tokens, last = text.encode(), repr((self.namespace.hash_seed, salt)).encode()
        hashes = []
        for at in range(0, len(tokens) - HASH_BLOCK_SIZE + 1, HASH_BLOCK_SIZE):
            last = hashlib.blake2b(last + tokens[at : at + HASH_BLOCK_SIZE], digest_size=sm.HASH_BYTES).digest()
            hashes.append(last)
        return b"".join(hashes)

    def stores(self, text: str, salt: str = "") -> int:
        """As an engine does that computed this prompt: blocks newly stored."""
        block_hashes = self.block_hashes(text, salt)
        hello = sm.Hello(
            "filler", os.getpid(), "engine", hash_block_size=HASH_BLOCK_SIZE, groups=[sm.GroupShape(1, BLOCK_PAGES)]
        )
        with RawClient(self._path, hello) as client:
            groups, hashes, parents = items_of(block_hashes)
            reserved = client.ask(sm.Reserve(1, self.namespace_id, b"", groups, hashes, parents, EVERYTHING))
            slots = [slot for slot in reserved.slots if slot > 0]
            client.send(sm.Commit(slots))
            client.stat()  # answered behind the commit
        return len(slots)

    def _question(self, question, answer) -> None:
        if self.silent:
            return
        if self.busy:
            answer(m.LeaseRefused(question.question, "peer_busy", "too many questions wait here"))
            return
        if isinstance(question, m.Inspect):
            store = self._client.instance if self._client is not None else ""
            counts = dict.fromkeys(m.Inspection.__struct_fields__, 0)
            answer(m.Inspection(**{**counts, "question": question.question, "blocks": 100, "store": store}))
            return
        if isinstance(question, m.GetIdentity):
            answer(m.Identity(question.question, self.words))
            return
        text = bytes(question.tokens).decode()
        if isinstance(question, m.Explain):
            self._explain(question, text, answer)
            return
        if isinstance(question, m.PinPrompt):
            hashes = self.block_hashes(text, question.cache_salt)
            pending = self._client.pin(self.namespace_id, hashes, question.pinned)
            pending.then(lambda p: answer(m.PinResult(question.question, p.outcome.count, p.outcome.reason)))
            return
        said = dict(
            question=question.question, prompt=len(text),
            gpu_cache=self.gpu_cache.get((text, question.cache_salt), 0),
            exported=self.exported.get((text, question.cache_salt), 0),
        )  # fmt: skip
        if self._client is None:
            answer(m.PrefixLengths(**said))
            return
        pending = self._client.inspect(self.namespace_id, self.block_hashes(text, question.cache_salt))
        pending.then(
            lambda p: answer(m.PrefixLengths(**said, stored=getattr(p.outcome, "num_hash_blocks", 0) * HASH_BLOCK_SIZE))
        )

    def _explain(self, question, text, answer) -> None:
        asked = (text, question.cache_salt, question.adapter)[: 3 if question.adapter else 2]
        said = dict(
            question=question.question, prompt=len(text), hash_block_size=HASH_BLOCK_SIZE,
            gpu_cache=self.gpu_cache.get(asked, 0),
            exported=self.exported.get(asked, 0), pull_threshold=64,
            load_decisions=self.load_decisions, peers=self.lent,
        )  # fmt: skip
        if self._client is None:
            answer(m.Explanation(**said, problem="it uses no node store (option store: off)"))
            return

        def told(pending) -> None:
            found = pending.outcome
            answer(
                m.Explanation(
                    **said, stored=found.num_hash_blocks * HASH_BLOCK_SIZE, store=self._client.instance,
                    store_seconds=found.seconds, history_seconds=found.known,
                    spans=spans_in_tokens(found.spans, cache_groups([(HASH_BLOCK_SIZE, None)]), len(text)),
                    tiers=[tier_source(tier, HASH_BLOCK_SIZE) for tier in found.tiers],
                    namespace=self.namespace_id.hex(),
                )
            )  # fmt: skip

        self._client.explain(self.namespace_id, self.block_hashes(text, question.cache_salt), 0.5).then(told)

    def stop(self) -> None:
        self.reactor.stop()


METRICS = """# HELP vllm:kvtier_lookups_declined_total requests not pulled
# TYPE vllm:kvtier_lookups_declined_total counter
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="100"} 1.0
"""


# The beginning of the proxy's.
PROXY_METRICS = f"# TYPE {PREFIX}queue gauge\n{PREFIX}queue 0.0\n"


def counter(name: str, value: float, kind: str = "") -> str:
    """A line of one of the connector's counters."""
    return f'# TYPE vllm:kvtier_{name}_total counter\nvllm:kvtier_{name}_total{{engine="0",kind="{kind}"}} {value}\n'


class FakeServer:
    """vLLM's HTTP server. ``tokens``: the tokens of a text; ``metrics``: the content of /metrics."""

    def __init__(self, version="0.33.0", metrics=METRICS, tokens=None):
        self.version, self.metrics, self.asked = version, metrics, []
        self.tokens = tokens or (lambda text: list(text.encode()))
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                answers = {"/version": {"version": fake.version}, "/health": {}}
                if self.path == "/metrics":
                    self._say(fake.metrics.encode(), 200)
                else:
                    self._say(json.dumps(answers.get(self.path, {})).encode(), 200 if self.path in answers else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.asked.append(body)
                text = body.get("prompt") or "".join(f"<{e['role']}>{e['content']}" for e in body["messages"])
                self._say(json.dumps({"tokens": fake.tokens(text)}).encode(), 200)

            def _say(self, data: bytes, status: int):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                """Not to the tests' output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def changed(**fields) -> m.Namespace:
    return msgspec.structs.replace(NAMESPACE, **fields)

"""The proxy and real endpoints of connectors: queries and releases."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from context_fakes import engine_of
from proxy_fakes import Cluster, turn

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.core import MAX_QUERIES, ProxyCore
from vllm_kvtier.proxy.messages.request_bodies import BadRequest
from vllm_kvtier.proxy.routes.query import read_query
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

HASH_BLOCK_SIZE = 4
QUERY = "/kvtier/query"


class KVEndpoint:
    """An engine's real endpoint and export table, without the engine.

    ``holds``: (salt, text) -> (tokens in the GPU cache, tokens exported), for prompts as FakeEngine tokenizes
    them. ``mute``: leave questions unanswered.
    """

    def __init__(self, key: ClusterKey | None = None):
        self.holds: dict[tuple[str, str], tuple[int, int]] = {}
        self.asked: list[m.Query] = []
        self.mute = False
        self.table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 100))
        self.reactor = Reactor("endpoint")
        self.endpoint = LeaseServer(
            engine_of(self.reactor, KVTierConfig(bidirectional=True)), self.table, key,
            LeaseServerEvents(self.table.take_freed, self._question, lambda active: None, lambda ask: None),
        )  # fmt: skip
        self.port = self.endpoint.port
        self.reactor.start()

    def add_export(self, name: str) -> None:
        block_hashes, blocks = [bytes([1]) * 8], [GroupBlocks(HASH_BLOCK_SIZE, [1])]
        deadline = time.monotonic() + 60
        self.table.add(
            Export(name, LeaseKind.HANDOFF, HASH_BLOCK_SIZE, block_hashes, b"d", b"", blocks, [1], -1, deadline)
        )

    def _question(self, query, answer) -> None:
        self.asked.append(query)
        if not self.mute:
            gpu, exported = self.holds.get((query.cache_salt, bytes(query.tokens).decode()), (0, 0))
            answer(m.PrefixLengths(query.question, len(query.tokens), gpu, exported))


@asynccontextmanager
async def cluster(p: int = 1, d: int = 2, key: ClusterKey | None = None, **options):
    """A Cluster whose engines name real endpoints, which are ``c.kv``, prefill engines first."""
    async with Cluster(p, d, real_release=True, **options) as c:
        c.kv = [KVEndpoint(key) for _ in range(p + d)]
        for engine, endpoint in zip((*c.p, *c.d), c.kv, strict=True):
            engine.kv_port = endpoint.port
        try:
            yield c
        finally:
            for endpoint in c.kv:
                endpoint.reactor.stop()


async def ask(c: Cluster, *texts: str, headers=None, **fields):
    return await c.client.post(QUERY, json=turn(*texts, **fields), headers=headers or {})


# ---------------------------------------------------------------- queries


async def test_query_reports_each_engine_or_unknown():
    async with cluster() as c:
        await c.chat("hello")
        salt = c.p[0].seen[0].body["cache_salt"]
        c.kv[0].holds[salt, "hello there"] = (8, 0)
        home = next(i for i, d in enumerate(c.d) if d.seen)
        c.kv[1 + home].holds[salt, "hello there"] = (4, 8)
        reply = await ask(c, "hello there", max_tokens=99, stream=True)
        assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
        lines = [
            {"role": "prefill", "url": c.p[0].url, "gpu_cache_tokens": 8, "exported_tokens": 0},
            {"role": "decode", "url": c.d[home].url, "gpu_cache_tokens": 4, "exported_tokens": 8},
            {
                "role": "decode",
                "url": c.d[1 - home].url,
                "unknown": "its connector's endpoint is not known yet",
            },
        ]
        answer = reply.json()
        assert answer["prompt_tokens"] == 11
        assert sorted(answer["engines"], key=lambda line: line["url"]) == sorted(
            lines, key=lambda e: e["url"]
        )
        # Nothing was computed: no engine saw another request to generate.
        assert len(c.p[0].seen) == 1 and sum(len(d.seen) for d in c.d) == 1
        assert c.core.state()["counts"]["queries"] == 1


@pytest.mark.parametrize("prompt", ["hello", ["hello"], list(b"hello"), [list(b"hello")]])
async def test_query_of_completion_prompt(prompt):
    async with cluster(d=1) as c:
        await c.client.post("/v1/completions", json={"model": "m", "prompt": "hello"})
        c.kv[1].holds[c.d[0].seen[0].body["cache_salt"], "hello"] = (4, 4)
        body = {"model": "m", "prompt": prompt, "add_special_tokens": False}
        answer = (await c.client.post(QUERY, json=body)).json()
        assert answer["prompt_tokens"] == 5 and answer["engines"][1]["exported_tokens"] == 4
        sent = [{"model": "m", "add_special_tokens": False, "prompt": "hello"}]
        assert c.d[0].tokenized == (sent if "hello" in prompt else [])


async def test_query_template_fields_equal_generation():
    async with cluster() as c:
        await ask(
            c, "u1", tools=[{"type": "function"}], documents=[{"a": "b"}], reasoning_effort="low", seed=5,
            chat_template_kwargs={"x": 1}, add_generation_prompt=False, cache_salt="s", conversation_id="c",
        )  # fmt: skip
        assert [body for d in c.d for body in d.tokenized] == [
            turn("u1") | {
                "tools": [{"type": "function"}], "add_generation_prompt": False,
                "chat_template_kwargs": {"x": 1, "documents": [{"a": "b"}], "reasoning_effort": "low"},
            }
        ]  # fmt: skip


async def test_query_uses_salt_of_own_tenant():
    """The salt is that of the caller's tenant, whatever salt the body names."""
    async with cluster(d=1) as c:
        ann, bob = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}
        await c.chat("a secret", headers=ann, cache_salt="mine")
        salt = c.d[0].seen[0].body["cache_salt"]
        c.kv[1].holds[salt, "a secret"] = (8, 8)

        async def exported(headers, **fields):
            lines = (await ask(c, "a secret", headers=headers, **fields)).json()["engines"]
            return lines[1]["exported_tokens"]

        assert await exported(ann, cache_salt="mine") == 8
        assert await exported(ann) == 0
        for guess in ("mine", salt, None):
            assert await exported(bob, **({"cache_salt": guess} if guess else {})) == 0
        assert len({query.cache_salt for query in c.kv[1].asked}) == 5
        assert "" not in {query.cache_salt for query in c.kv[1].asked}


@pytest.mark.parametrize("sick", ["mute", "gone", "dead engine"])
async def test_query_of_silent_engine_is_unknown_at_timeout(sick):
    async with cluster(d=1, query_timeout=0.4, backoff_initial=60, backoff_max=60) as c:
        await c.chat("u1")
        if sick == "mute":
            c.kv[1].mute = True
        elif sick == "gone":
            c.kv[1].reactor.stop()
        else:
            c.core.decode[0].mark_unavailable("It failed.")
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(c, "u1") for _ in range(5)))
        assert time.monotonic() - began < 3
        reason = "it failed and is unavailable" if sick == "dead engine" else "it did not answer in time"
        for answer in answers:
            prefill, decode = answer.json()["engines"]
            assert prefill["gpu_cache_tokens"] == 0
            assert decode == {"role": "decode", "url": c.d[0].url, "unknown": reason}
        # The next one is answered: nothing is left in the way.
        if sick == "mute":
            c.kv[1].mute = False
            assert "gpu_cache_tokens" in (await ask(c, "u1")).json()["engines"][1]


async def test_query_is_tokenized_by_decode_engine_first():
    """The next engine where one fails or stalls; and no query makes the proxy use an engine less."""
    async with cluster(query_timeout=0.6) as c:
        c.d[0].tokenize_status = 500
        c.d[1].tokenize_hold = asyncio.Event()
        assert (await ask(c, "u1")).json()["prompt_tokens"] == 2
        assert len(c.p[0].tokenized) == 1
        c.p[0].tokenize_status = 501
        reply = await ask(c, "u1")
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "upstream_error"
        assert all(engine.healthy and engine.outstanding == 0 for engine in (*c.core.prefill, *c.core.decode))
        c.d[1].tokenize_hold.set()


async def test_queries_are_parsed_few_at_once():
    async with cluster(query_timeout=4, queue_timeout=0.1) as c:
        for engine in c.d:
            engine.tokenize_hold = asyncio.Event()
        first = [asyncio.create_task(ask(c, "u1")) for _ in range(MAX_QUERIES)]
        await c.until(lambda: len(c.d[0].tokenized) == MAX_QUERIES)
        reply = await ask(c, "u2")
        assert reply.status_code == 503 and "Too many queries" in reply.text and reply.headers["retry-after"] == "1"
        for engine in c.d:
            engine.tokenize_hold.set()
        assert [(await task).status_code for task in first] == [200] * MAX_QUERIES
        assert (await ask(c, "u2")).status_code == 200


async def test_query_tokenizer_refusal_reaches_client():
    async with cluster() as c:
        for d in c.d:
            d.tokenize_status = 400
        reply = await ask(c, "u1")
        assert reply.status_code == 400 and "says no" in reply.json()["error"]["message"]
        assert not c.p[0].tokenized
        for d in c.d:
            d.tokenize_status = 404
        assert (await ask(c, "u1")).status_code == 200 and c.p[0].tokenized, "another engine may have the model"
        c.p[0].tokenize_status = 404
        reply = await ask(c, "u1")
        assert reply.status_code == 404 and "says no" in reply.json()["error"]["message"]
        reply = await c.client.post(QUERY, json={"prompt": [1] * 5})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not a JSON object"),
        (b"{}", "messages or a prompt"),
        (b'{"messages": [{"role": "user"}], "prompt": "x"}', "messages or a prompt"),
        (b'{"messages": []}', "exactly one prompt"),
        (b'{"messages": 5}', "exactly one prompt"),
        (b'{"prompt": ["a", "b"]}', "exactly one prompt"),
        (b'{"prompt": "a", "prompt_embeds": "b"}', "exactly one prompt"),
        (b'{"prompt": "a", "truncate_prompt_tokens": 5}', "truncate"),
        (b'{"prompt": "a", "cache_salt": 5}', "cache_salt"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "text only"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object"),
    ],
)
def test_query_malformed_raises_bad_request(body, words):
    with pytest.raises(BadRequest, match=words):
        read_query(body)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([-1], "token id"), ([1 << 40], "token id"), ([True], "token id"), ("x" * 1001, "1001 tokens; at most 1000")],
)
async def test_query_invalid_prompt_returns_400(prompt, words):
    async with cluster(d=1) as c:
        reply = await c.client.post(QUERY, json={"prompt": prompt})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"]
        assert not any(endpoint.asked for endpoint in c.kv)


# ---------------------------------------------------------------- releases


async def test_unused_export_is_released_at_its_engine():
    async with cluster(d=1) as c:
        c.p[0].export = "r1"
        for name in ("r1", "r2"):
            c.kv[0].add_export(name)
        await c.d[0].kill()
        assert (await c.chat("u1")).status_code == 503
        await c.until(lambda: c.kv[0].table.counts()["exports"] == 1)
        await c.until(lambda: c.core.state()["counts"]["released"] == 1)


async def test_query_and_release_use_cluster_key(tmp_path):
    file = tmp_path / "key"
    ClusterKey.create(str(file))
    key = ClusterKey.load(str(file))
    for mine, exports in ((str(file), 0), (None, 1)):
        async with cluster(d=1, key=key, cluster_key_file=mine, query_timeout=0.5) as c:
            c.p[0].export = "r1"
            c.kv[0].add_export("r1")
            await c.chat("u1")
            line = (await ask(c, "u1")).json()["engines"][0]
            assert ("gpu_cache_tokens" in line) == (mine is not None)
            await c.d[0].kill()
            await c.chat("u1")
            await c.core.releaser.aclose()
            if mine is not None:
                await c.until(lambda: c.kv[0].table.counts()["exports"] == 0)
            assert c.kv[0].table.counts()["exports"] == exports


async def test_proxy_with_missing_cluster_key_file_raises(tmp_path):
    config = ProxyConfig(decode=(EngineAddress("http://d:1"),), cluster_key_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cluster_key_file"):
        ProxyCore(config)

"""Data-parallel ranks behind one URL: each answer names the endpoint of the rank that gave it."""

import json

import msgspec
import pytest
from proxy_fakes import Cluster

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.engine_http import Secrets
from vllm_kvtier.proxy.messages.transfer_params import TransferParams


def named(c, count: int = -1) -> list[int]:
    """The ports of the sources that the prefill engine got."""
    own = c.p[0].seen[count].body["kv_transfer_params"].get("kvtier", {})
    return [source["port"] for source in own.get("sources", ())]


@pytest.mark.parametrize("stream", [False, True])
async def test_source_is_the_rank_that_has_the_conversation(stream):
    async with Cluster() as c:
        for port, text in ((7001, "a"), (7002, "b")):
            c.d[0].kv_port = port
            await c.chat(text, stream=stream)
        await c.chat("a", "x", "more", stream=stream)
        assert named(c) == [7001]
        await c.chat("a", "x", "more", "x", "still more", stream=stream)
        assert named(c) == [7002], "this rank gave the last answer"


async def test_rank_is_known_by_the_turn_before_if_an_answer_names_none():
    async with Cluster() as c:
        headers = {"x-conversation-id": "a"}
        c.d[0].kv_port = 7001
        await c.chat("a", headers=headers)
        c.d[0].kv_port = 7002
        await c.chat("b")
        c.d[0].returns_params = False
        for _ in range(2):
            await c.chat("a", "x", "more", headers=headers)
            assert named(c) == [7001]
        await c.chat("c")
        await c.chat("c", "x", "more")
        assert named(c) == [], "one of two, and not known which"


async def test_rank_of_a_failed_engine_is_forgotten():
    async with Cluster() as c:
        c.d[0].kv_port = 7001
        await c.chat("a")
        c.core.decode[0].mark_unavailable("It broke.")
        await c.until(lambda: c.core.decode[0].healthy)
        c.d[0].kv_port = 7002
        await c.chat("b")
        await c.chat("a", "x", "more")
        assert named(c) == []


RESTARTED = [("a", 1), ("b", 2), ("b", 2)]
RANKS = [("a_dp0", 1), ("a_dp1", 2)]
NAMED_BY_THE_OPERATOR = [("a", 1), ("a", 2)]
OF_TWO_NODES = [("a_dp0", 1), ("b_dp1", 2), ("a_dp0", 1)]


@pytest.mark.parametrize(
    ("answers", "followed"),
    [(RESTARTED, True), (RANKS, False), (NAMED_BY_THE_OPERATOR, False), (OF_TWO_NODES, False)],
)
def test_engine_that_restarted_while_idle_is_followed(answers, followed):
    """No request failed: the next answer names the new process."""
    address = EngineAddress("http://p:1")
    engine = Engine("prefill", 0, address, ProxyConfig(decode=(address,)), Secrets())
    for engine_id, port in answers:
        own = {"engine_id": engine_id, "can_follow": True}
        params = {"remote_host": "h", "remote_port": port, "kvtier": own}
        engine.learn(TransferParams(msgspec.Raw(json.dumps(params).encode())))
    assert engine.can_be_followed is followed and engine.last_named.port == answers[-1][1]
    assert engine.source_of(None) == (engine.last_named if followed else None)

"""Which engines the proxy chooses, and when it sets one aside."""

import asyncio

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.engines import Engine
from vllm_kvtier.proxy.routing import Router

D = (EngineAddress("http://d:1"),)


def router(p=2, d=3, slack=2):
    config = ProxyConfig(decode=D)

    def make(role, n):
        return [Engine(role, i, EngineAddress(f"http://{role}:{i}", "h", 5 + i), config) for i in range(n)]

    return Router(make("prefill", p), make("decode", d), slack)


ONCE = Name((b"x",), b"x", explicit=False)
NAMED = Name((b"x",), b"x", explicit=True)


def test_p_of_the_conversation_else_the_idlest():
    r = router()
    r.prefill[0].outstanding = 5
    assert r.pick_prefill(None).index == 1
    assert r.pick_prefill(ConversationRoute((), 0)).index == 0
    r.prefill[0].well = False
    assert r.pick_prefill(ConversationRoute((), 0)).index == 1
    r.prefill[1].well = False
    assert r.pick_prefill(None) is None
    assert router(p=0).pick_prefill(None) is None


def test_d_of_the_conversation_else_the_idlest_and_the_sick_last():
    r = router()
    route = ConversationRoute((Holder(0, 0), Holder(1, 0)), None)
    indexes = lambda name, route: [e.index for e in r.rank_decode(name, route)]  # noqa: E731
    r.decode[0].outstanding = 2
    assert indexes(ONCE, route)[0] == 0
    r.decode[0].outstanding = 3
    assert indexes(ONCE, route)[0] in (1, 2), "a crowd that only begins alike does not follow"
    assert indexes(NAMED, route)[0] == 0
    r.decode[0].well = False
    assert indexes(NAMED, route)[0] == 1, "the older holder has most of it"
    assert indexes(NAMED, route)[-1] == 0
    assert set(indexes(ONCE, None)) == {0, 1, 2}


def test_sources_are_the_holders_that_live():
    r = router()
    route = ConversationRoute((Holder(1, 0), Holder(0, 0)), None)
    assert [s.port for s in r.sources(route)] == [6, 5]
    r.decode[1].life += 1
    assert [s.port for s in r.sources(route)] == [5]
    r.decode[0].well = False
    assert r.sources(route) == [] == r.sources(None)


def test_equals_take_turns():
    r = router()
    picked = []
    for when in range(6):
        engine = r.rank_decode(ONCE, None)[0]
        engine.last_asked = when + 1
        picked.append(engine.index)
    assert sorted(picked[:3]) == [0, 1, 2] and picked[:3] == picked[3:]


def test_one_failure_however_many_requests_break():
    async def scenario():
        engine = router().decode[0]
        for _ in range(50):
            engine.set_aside("It broke.")
        assert (engine.well, engine.failures, engine.life) == (False, 1, 50)
        engine.succeeded()
        assert (engine.well, engine.failures) == (True, 0)
        await engine.aclose()

    asyncio.run(scenario())

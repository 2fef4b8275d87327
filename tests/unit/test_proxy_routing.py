"""The proxy's choice of engines, and their availability."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import EngineSlot
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.kv_events.feeds import KVEvents
from vllm_kvtier.proxy.kv_events.index import BlockIndex, PromptTokens
from vllm_kvtier.proxy.kv_events.messages import Stored, Tier
from vllm_kvtier.proxy.routing.admission import Choice
from vllm_kvtier.proxy.routing.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.routing.policies import POLICIES
from vllm_kvtier.proxy.routing.policies.kv_events import KVEventsPolicy
from vllm_kvtier.proxy.routing.policies.prefix_hash import PrefixHash
from vllm_kvtier.proxy.routing.prefixes import Piece, PrefixMemory, Seen
from vllm_kvtier.proxy.routing.prompt import Prompt
from vllm_kvtier.proxy.routing.router import Router


class World:
    """A router with ``p`` and ``d`` engines of the given weights, and what it goes by."""

    def __init__(self, p=(1.0, 1.0), d=(1.0, 1.0, 1.0), max_prefixes=1000, **options):
        def addresses(role, weights):
            return tuple(EngineAddress(f"http://{role}:{i}", "h", 5 + i, weight=w) for i, w in enumerate(weights))

        options = {"affinity_slack": 2} | options
        config = ProxyConfig(prefill=addresses("prefill", p), decode=addresses("decode", d), **options)
        self.fleet = Fleet(lambda engine: None, lambda engine: None, lambda role, wants: None)
        self.fleet.apply(config, probe_on_start=False)
        self.prefixes = PrefixMemory(max_prefixes)
        self.router = Router(self.fleet, PrefixHash(self.prefixes, KVEvents(self.fleet)), config)
        self.p, self.d = self.fleet.prefill, self.fleet.decode

    def prefill(self, name=None, tokens=1000):
        choice = self.router.choose_prefill(Prompt(name or ONCE, tokens))
        return None if choice is None or choice.engine is None else choice.engine.index

    def decodes(self, name=None, route=None, tokens=1000, prefilled=True):
        return [e.index for e in self.router.rank_decode(Prompt(name or ONCE, tokens), route, prefilled)]


ONCE = Name((b"x",), b"x", explicit=False)
NAMED = Name((b"x",), b"x", explicit=True)


def prompt(*parts: str, tokens: int = 1000) -> Name:
    """A prompt of pieces of ``tokens`` tokens each."""
    texts = ["/".join(parts[: i + 1]).encode() for i in range(len(parts))]
    return Name((), None, False, tuple(Piece(text, tokens * (i + 1)) for i, text in enumerate(texts)))


# ---------------------------------------------------------------- the prefill engine


def test_choose_prefill_engine_with_prefix_unless_busy():
    w = World()
    w.prefixes.enter(prompt("system", "tools").pieces, w.p[1])
    ask = prompt("system", "tools", "question")
    assert w.prefill(ask, 3000) == 1
    choice = w.router.choose_prefill(Prompt(ask, 3000))
    assert choice.tokens == 1000, "the rest it has"
    # 2,000 tokens are saved there; a request under way counts as 256 and what it has yet to compute.
    place = EngineSlot(w.p[1], 1500)
    assert w.prefill(ask, 3000) == 1
    other = EngineSlot(w.p[1], 500)
    assert w.prefill(ask, 3000) == 0
    place.release()
    other.release()
    assert w.prefill(ask, 3000) == 1 and w.p[1].tokens == w.p[1].outstanding == 0


def test_choose_prefill_ignores_prefix_of_restarted_engine():
    w = World()
    w.prefixes.enter(prompt("system").pieces, w.p[1])
    w.p[1].instance += 1
    w.p[1].weighted_picks = 1.0
    assert w.prefill(prompt("system", "q"), 2000) == 0


def test_choose_prefill_without_engine_or_slot():
    w = World(engine_requests=1)
    assert World(p=()).router.choose_prefill(Prompt(ONCE, 5)) is None
    places = [EngineSlot(engine) for engine in w.p]
    assert w.router.choose_prefill(Prompt(ONCE, 5)) == Choice(None), "all are full: the request must wait"
    places[1].release()
    assert w.prefill() == 1
    for engine in w.p:
        engine.healthy = False
    assert w.router.choose_prefill(Prompt(ONCE, 5)) is None


@pytest.mark.parametrize("busy", [False, True])
def test_choose_prefill_follows_weights(busy):
    """One after the other as well as under load."""
    w = World(p=(3.0, 1.0, 0.0))
    chosen = Counter()
    held = []
    for _ in range(400):
        choice = w.router.choose_prefill(Prompt(ONCE, 100))
        held.append(EngineSlot(choice.engine, choice.tokens))
        chosen[choice.engine.index] += 1
        if not busy:
            held.pop().release()
    assert abs(chosen[0] - 300) <= 4 and abs(chosen[1] - 100) <= 4 and chosen[2] == 0


def test_equal_engines_are_chosen_in_rotation():
    w = World()
    picked = []
    for _ in range(6):
        engine = w.router.rank_decode(Prompt(ONCE), None)[0]
        EngineSlot(engine).release()
        picked.append(engine.index)
    assert sorted(picked[:3]) == [0, 1, 2] and picked[:3] == picked[3:]


def test_returning_engine_is_not_chosen_more_often():
    w = World(d=(1.0, 1.0))
    w.d[0].healthy = False
    for _ in range(100):
        EngineSlot(w.router.choose_decode(Prompt(ONCE, 5), None, True).engine).release()
    w.d[0].succeeded()
    picked = Counter()
    for _ in range(20):
        engine = w.router.choose_decode(Prompt(ONCE, 5), None, True).engine
        picked[engine.index] += 1
        EngineSlot(engine).release()
    assert abs(picked[0] - picked[1]) <= 1


# ---------------------------------------------------------------- the decode engine


def test_rank_decode_conversation_engine_then_load_then_unavailable():
    w = World()
    route = ConversationRoute((Holder(0, 0), Holder(1, 0)))
    held = [EngineSlot(w.d[0]) for _ in range(2)]
    assert w.decodes(ONCE, route)[0] == w.decodes(NAMED, route)[0] == 0
    held.append(EngineSlot(w.d[0]))
    assert w.decodes(ONCE, route)[0] in (1, 2), "a crowd that only begins alike does not follow"
    assert w.decodes(NAMED, route)[0] in (1, 2), "nor do many requests with one id"
    w.d[0].healthy = False
    assert w.decodes(NAMED, route)[0] == 1, "the older holder has most of it"
    assert w.decodes(NAMED, route)[-1] == 0
    assert set(w.decodes(ONCE, None)) == {0, 1, 2}


def test_rank_decode_prefix_counts_less_after_prefill():
    w = World(d=(1.0, 1.0))
    ask = prompt("system", "question")
    w.prefixes.enter(prompt("system").pieces, w.d[1])
    EngineSlot(w.d[1], 0)
    assert w.decodes(ask, None, 2000, prefilled=False) == [1, 0]
    # To pull 1,000 tokens costs what 62 do; a request under way there counts for more.
    assert w.decodes(ask, None, 2000, prefilled=True) == [0, 1]


def test_choose_decode_with_all_drained_is_none():
    w = World(d=(1.0, 1.0))
    w.d[0].drained = True
    assert w.decodes() == [1]
    w.d[1].drained = True
    assert w.router.choose_decode(Prompt(ONCE, 5), None, True) is None
    w.d[1].drained, w.d[1].healthy = False, False
    assert w.router.choose_decode(Prompt(ONCE, 5), None, True).engine.index == 1, "better tried than refused"


def test_unavailable_decode_engine_gets_no_request_while_others_are_full():
    w = World(d=(1.0, 1.0), engine_requests=1)
    w.d[0].healthy = False
    EngineSlot(w.d[1])
    assert w.router.choose_decode(Prompt(ONCE, 5), None, True) == Choice(None)


def test_prompt_is_not_looked_up_while_all_engines_are_full(monkeypatch):
    """A request that waits asks whenever another one ends: 131,072 tokens took 10 ms at each of the engines, while all
    streams waited."""
    w = KVWorld(p=(1.0, 1.0), d=(1.0, 1.0), engine_requests=1)
    looked_up = []
    monkeypatch.setattr(BlockIndex, "prefix", lambda index, *_: looked_up.append(index) or [0] * len(Tier))
    for engine in (*w.p, *w.d):
        w.has(engine, 100)
    held = [EngineSlot(engine) for engine in (*w.p, *w.d)]
    ask = Prompt(ONCE, 1000, PromptTokens([1] * 1000, "salt"))
    assert w.router.choose_decode(ask, None, True) == w.router.choose_prefill(ask) == Choice(None) and not looked_up
    held[-1].release()
    assert w.router.choose_decode(ask, None, True).engine is w.d[1] and looked_up


def test_sources_are_live_holders():
    w = World()
    route = ConversationRoute((Holder(1, 0), Holder(0, 0)))
    assert [s.port for s in w.router.sources(route)] == [6, 5]
    w.d[1].instance += 1
    assert [s.port for s in w.router.sources(route)] == [5]
    w.d[0].drained = True
    assert [s.port for s in w.router.sources(route)] == [5], "it still has what it has"
    w.d[0].healthy = False
    assert w.router.sources(route) == [] == w.router.sources(None)


# ---------------------------------------------------------------- the memory of prefixes


def test_prefix_table_is_bounded_and_keeps_shared_prefixes():
    w = World(max_prefixes=10)
    for i in range(50):
        w.prefixes.enter(prompt("system", f"q{i}").pieces, w.p[i % 2])
        assert len(w.prefixes) <= 10
    known = w.prefixes.known(prompt("system", "other").pieces)
    assert known == {Seen("prefill", 0, 0): 1000, Seen("prefill", 1, 0): 1000}
    assert w.prefixes.known(prompt("system", "q0").pieces) == known, "q0 itself was forgotten"
    assert w.prefixes.known(prompt("system", "q49").pieces)[Seen("prefill", 1, 0)] == 2000


def test_prefix_table_keeps_beginning_of_long_prompt():
    w = World(max_prefixes=3)
    name = prompt("a", "b", "c", "d", "e")
    w.prefixes.enter(name.pieces, w.p[0])
    assert w.prefixes.known(name.pieces) == {Seen("prefill", 0, 0): 3000}


def test_prefixes_are_kept_per_engine_instance():
    w = World()
    name = prompt("a")
    for instance in range(30):
        w.p[0].instance = instance
        w.prefixes.enter(name.pieces, w.p[0])
    assert w.prefixes.known(name.pieces) == {Seen("prefill", 0, 29): 1000}


# ---------------------------------------------------------------- failures


def test_concurrent_failures_count_once():
    async def scenario():
        engine = World().d[0]
        for _ in range(50):
            engine.mark_unavailable("It broke.")
        assert (engine.healthy, engine.failures, engine.instance) == (False, 1, 50)
        engine.succeeded()
        assert (engine.healthy, engine.failures) == (True, 0)
        await engine.aclose()

    asyncio.run(scenario())


# ---------------------------------------------------------------- by KV events


class KVWorld(World):
    """Engines whose blocks of 100 tokens are as given to ``has``; loading costs 0, 0.1, 0.3 or 0.5 of computing."""

    SIZE = 100

    def __init__(self, **options):
        super().__init__(routing_policy="kv_events", **options)
        self.indexes = {}
        events = KVEvents(self.fleet)
        events.index_of = lambda engine: self.indexes.get((engine.role, engine.index))
        self.events = events
        self.router.policy = KVEventsPolicy(self.prefixes, events)

    def has(self, engine, tokens: int, tier: Tier = Tier.GPU) -> None:
        index = self.indexes.setdefault((engine.role, engine.index), BlockIndex(1000))
        count = tokens // self.SIZE
        extra = [["salt"]] + [None] * (count - 1)
        index.apply([Stored(tier, 0, self.SIZE, None, [i + 1 for i in range(count)], [1] * tokens, extra)])

    def first(self, tokens=1000, **more) -> tuple[int, int]:
        """(index of the chosen decode engine, tokens that it computes)"""
        prompt = Prompt(ONCE, tokens, PromptTokens([1] * tokens, "salt"))
        choice = self.router.choose_decode(prompt, more.get("route"), more.get("prefilled", False))
        return choice.engine.index, choice.tokens


def test_kv_events_policy_weighs_tiers_and_load():
    w = KVWorld(d=(1.0, 1.0, 1.0), request_cost_tokens=0)
    w.has(w.d[0], 400)
    w.has(w.d[1], 900, Tier.HOST)
    w.has(w.d[2], 900, Tier.DISK)
    assert w.first() == (1, 100), "900 from memory cost 90, and 100 are computed: less than 600, or than 270 and 100"
    held = [EngineSlot(w.d[1], 200)]
    assert w.first() == (2, 100)
    held.append(EngineSlot(w.d[2], 1000))
    held.append(EngineSlot(w.d[1], 500))
    assert w.first() == (0, 600)
    for each in held:
        each.release()
    w.events.load_costs._measured[w.d[1].url] = SimpleNamespace(shares=(0.0, 1.0, 1.0, 1.0, 1.0))
    assert w.first() == (2, 100), "measured: this engine loads no faster than it computes"


def test_kv_events_policy_without_events_or_ids_uses_prefixes():
    w = KVWorld(d=(1.0, 1.0), request_cost_tokens=0)
    ask = prompt("system", "question")
    w.prefixes.enter(ask.pieces, w.d[1])
    w.has(w.d[0], 1000)
    assert w.router.choose_decode(Prompt(ask, 2000), None, False).engine is w.d[1], "no ids"
    ids = PromptTokens([1] * 2000, "salt")
    choice = w.router.choose_decode(Prompt(ask, 2000, ids), None, False)
    assert (choice.engine, choice.tokens) == (w.d[1], 0), "this engine sends no events, but has got the prompt"


def test_kv_events_policy_leaves_busy_engine_of_conversation():
    w = KVWorld(d=(1.0, 1.0))
    w.has(w.d[0], 1000)
    w.has(w.d[1], 1000, Tier.HOST)
    route = ConversationRoute((Holder(0, 0),))
    assert w.first(route=route) == (0, 0)
    slot = EngineSlot(w.d[0], 300)
    assert w.first(route=route) == (1, 0), "100 to load are less than 300 to wait for"
    assert w.first(route=route, prefilled=True)[0] == 0, "it only takes what was computed elsewhere"
    slot.prompt_computed()
    assert w.d[0].tokens == 0 and w.d[0].outstanding == 1


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
def test_policies_without_prompts(policy):
    w = World(d=(1.0, 1.0))
    w.router.policy = POLICIES[policy](w.prefixes, KVEvents(w.fleet))
    w.prefixes.enter(prompt("a").pieces, w.d[0])
    held = [EngineSlot(w.d[0]), EngineSlot(w.d[0])]
    w.d[1].weighted_picks = 3.0
    chosen = w.decodes(prompt("a"), ConversationRoute((Holder(0, 0),)), prefilled=False)[0]
    assert chosen == (1 if policy == "least_load" else 0)
    assert w.decodes(NAMED, ConversationRoute((Holder(1, 0),)))[0] == 1, "a conversation with an id stays"
    for each in held:
        each.release()

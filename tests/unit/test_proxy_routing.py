"""Which engines the proxy chooses, and when it sets one aside."""

import asyncio
from collections import Counter

import pytest

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.conversations import ConversationRoute, Holder, Name
from vllm_kvtier.proxy.engines import Place
from vllm_kvtier.proxy.fleet import Fleet
from vllm_kvtier.proxy.prefixes import Piece, PrefixMemory, Seen
from vllm_kvtier.proxy.routing import Router


class World:
    """A router with ``p`` and ``d`` engines of the given weights, and what it goes by."""

    def __init__(self, p=(1.0, 1.0), d=(1.0, 1.0, 1.0), prefixes_kept=1000, **options):
        def addresses(role, weights):
            return tuple(EngineAddress(f"http://{role}:{i}", "h", 5 + i, weight=w) for i, w in enumerate(weights))

        options = {"affinity_slack": 2} | options
        config = ProxyConfig(prefill=addresses("prefill", p), decode=addresses("decode", d), **options)
        self.fleet = Fleet(lambda engine: None, lambda engine: None)
        self.fleet.apply(config, greet=False)
        self.prefixes = PrefixMemory(prefixes_kept)
        self.router = Router(self.fleet, self.prefixes, config)
        self.p, self.d = self.fleet.prefill, self.fleet.decode

    def prefill(self, name=None, tokens=1000):
        choice = self.router.choose_prefill(name or ONCE, tokens)
        return None if choice is None or choice.engine is None else choice.engine.index

    def decodes(self, name=None, route=None, tokens=1000, prefilled=True):
        return [e.index for e in self.router.rank_decode(name or ONCE, route, tokens, prefilled)]


ONCE = Name((b"x",), b"x", explicit=False)
NAMED = Name((b"x",), b"x", explicit=True)


def prompt(*parts: str, tokens: int = 1000) -> Name:
    """A prompt of pieces of ``tokens`` tokens each."""
    texts = ["/".join(parts[: i + 1]).encode() for i in range(len(parts))]
    return Name((), None, False, tuple(Piece(text, tokens * (i + 1)) for i, text in enumerate(texts)))


# ---------------------------------------------------------------- P


def test_p_that_has_the_prefix_unless_it_is_too_busy():
    w = World()
    w.prefixes.enter(prompt("system", "tools").pieces, w.p[1])
    ask = prompt("system", "tools", "question")
    assert w.prefill(ask, 3000) == 1
    choice = w.router.choose_prefill(ask, 3000)
    assert choice.tokens == 1000, "the rest it has"
    # 2,000 tokens are saved there; a request under way counts as 256 and what it has yet to compute.
    place = Place(w.p[1], 1500)
    assert w.prefill(ask, 3000) == 1
    other = Place(w.p[1], 500)
    assert w.prefill(ask, 3000) == 0
    place.leave()
    other.leave()
    assert w.prefill(ask, 3000) == 1 and w.p[1].tokens == w.p[1].outstanding == 0


def test_a_prefix_that_its_engine_lost_counts_for_nothing():
    w = World()
    w.prefixes.enter(prompt("system").pieces, w.p[1])
    w.p[1].life += 1
    w.p[1].turns = 1.0
    assert w.prefill(prompt("system", "q"), 2000) == 0


def test_no_p_and_no_room():
    w = World(engine_requests=1)
    assert World(p=()).router.choose_prefill(ONCE, 5) is None
    places = [Place(engine) for engine in w.p]
    assert w.router.choose_prefill(ONCE, 5) == (None, 0), "all are full: somebody must wait"
    places[1].leave()
    assert w.prefill() == 1
    for engine in w.p:
        engine.well = False
    assert w.router.choose_prefill(ONCE, 5) is None and not w.router.prefill_wanted()


@pytest.mark.parametrize("busy", [False, True])
def test_shares_are_as_the_weights(busy):
    """One after the other as well as under load."""
    w = World(p=(3.0, 1.0, 0.0))
    chosen = Counter()
    held = []
    for _ in range(400):
        choice = w.router.choose_prefill(ONCE, 100)
        held.append(Place(choice.engine, choice.tokens))
        chosen[choice.engine.index] += 1
        if not busy:
            held.pop().leave()
    assert abs(chosen[0] - 300) <= 4 and abs(chosen[1] - 100) <= 4 and chosen[2] == 0


def test_equals_take_turns():
    w = World()
    picked = []
    for _ in range(6):
        engine = w.router.rank_decode(ONCE, None)[0]
        Place(engine).leave()
        picked.append(engine.index)
    assert sorted(picked[:3]) == [0, 1, 2] and picked[:3] == picked[3:]


def test_who_comes_back_does_not_make_up_for_the_turns_it_missed():
    w = World(d=(1.0, 1.0))
    w.d[0].well = False
    for _ in range(100):
        Place(w.router.choose_decode(ONCE, None, 5, True).engine).leave()
    w.d[0].succeeded()
    picked = Counter()
    for _ in range(20):
        engine = w.router.choose_decode(ONCE, None, 5, True).engine
        picked[engine.index] += 1
        Place(engine).leave()
    assert abs(picked[0] - picked[1]) <= 1


# ---------------------------------------------------------------- D


def test_d_of_the_conversation_else_the_idlest_and_the_sick_last():
    w = World()
    route = ConversationRoute((Holder(0, 0), Holder(1, 0)))
    held = [Place(w.d[0]) for _ in range(2)]
    assert w.decodes(ONCE, route)[0] == 0
    held.append(Place(w.d[0]))
    assert w.decodes(ONCE, route)[0] in (1, 2), "a crowd that only begins alike does not follow"
    assert w.decodes(NAMED, route)[0] == 0
    w.d[0].well = False
    assert w.decodes(NAMED, route)[0] == 1, "the older holder has most of it"
    assert w.decodes(NAMED, route)[-1] == 0
    assert set(w.decodes(ONCE, None)) == {0, 1, 2}


def test_d_alone_goes_by_the_prefix_and_with_p_hardly():
    w = World(d=(1.0, 1.0))
    ask = prompt("system", "question")
    w.prefixes.enter(prompt("system").pieces, w.d[1])
    Place(w.d[1], 0)
    assert w.decodes(ask, None, 2000, prefilled=False) == [1, 0]
    # To pull 1,000 tokens costs what 62 do; a request under way there counts for more.
    assert w.decodes(ask, None, 2000, prefilled=True) == [0, 1]


def test_where_all_ds_are_drained_there_is_none():
    w = World(d=(1.0, 1.0))
    w.d[0].drained = True
    assert w.decodes() == [1]
    w.d[1].drained = True
    assert w.router.choose_decode(ONCE, None, 5, True) is None
    w.d[1].drained, w.d[1].well = False, False
    assert w.router.choose_decode(ONCE, None, 5, True).engine.index == 1, "better tried than refused"


def test_a_d_that_is_set_aside_is_no_room_while_others_are_full():
    w = World(d=(1.0, 1.0), engine_requests=1)
    w.d[0].well = False
    Place(w.d[1])
    assert w.router.choose_decode(ONCE, None, 5, True) == (None, 0)


def test_sources_are_the_holders_that_live():
    w = World()
    route = ConversationRoute((Holder(1, 0), Holder(0, 0)))
    assert [s.port for s in w.router.sources(route)] == [6, 5]
    w.d[1].life += 1
    assert [s.port for s in w.router.sources(route)] == [5]
    w.d[0].drained = True
    assert [s.port for s in w.router.sources(route)] == [5], "it still has what it has"
    w.d[0].well = False
    assert w.router.sources(route) == [] == w.router.sources(None)


# ---------------------------------------------------------------- the memory of prefixes


def test_prefixes_are_bounded_and_the_shared_ones_stay():
    w = World(prefixes_kept=10)
    for i in range(50):
        w.prefixes.enter(prompt("system", f"q{i}").pieces, w.p[i % 2])
        assert len(w.prefixes) <= 10
    known = w.prefixes.known(prompt("system", "other").pieces)
    assert known == {Seen("prefill", 0, 0): 1000, Seen("prefill", 1, 0): 1000}
    assert w.prefixes.known(prompt("system", "q0").pieces) == known, "q0 itself was forgotten"
    assert w.prefixes.known(prompt("system", "q49").pieces)[Seen("prefill", 1, 0)] == 2000


def test_of_a_prompt_that_is_too_long_to_remember_the_beginning_is_kept():
    w = World(prefixes_kept=3)
    name = prompt("a", "b", "c", "d", "e")
    w.prefixes.enter(name.pieces, w.p[0])
    assert w.prefixes.known(name.pieces) == {Seen("prefill", 0, 0): 3000}


def test_one_life_of_an_engine_a_prefix():
    w = World()
    name = prompt("a")
    for life in range(30):
        w.p[0].life = life
        w.prefixes.enter(name.pieces, w.p[0])
    assert w.prefixes.known(name.pieces) == {Seen("prefill", 0, 29): 1000}


# ---------------------------------------------------------------- failures


def test_one_failure_however_many_requests_break():
    async def scenario():
        engine = World().d[0]
        for _ in range(50):
            engine.set_aside("It broke.")
        assert (engine.well, engine.failures, engine.life) == (False, 1, 50)
        engine.succeeded()
        assert (engine.well, engine.failures) == (True, 0)
        await engine.aclose()

    asyncio.run(scenario())

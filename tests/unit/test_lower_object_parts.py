"""What the object tier is made of: names, the search for a chain's end, jobs in lanes."""

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import SPACE, chain_of

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.lower.objects.clients import Trouble
from vllm_kvtier.store.lower.objects.jobs import Job, Lane, Presence
from vllm_kvtier.store.lower.objects.names import Place, check_endpoint, parse_url
from vllm_kvtier.store.lower.objects.search import FIRST_WIDTH, ROUNDS, WIDTH, Chain, search
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH

KEY_ID, SECRET = "AKIAUNITTESTKEY", "unit/test/secret+of+forty+characters"

# -- names --------------------------------------------------------------------------------------------------------


def test_names_follow_from_contents():
    place = parse_url("s3://my.bucket-1/kv/70b/")
    assert place == Place("my.bucket-1", "kv/70b")
    assert place.key(SPACE, 3, b"\xff" * HASH) == f"kv/70b/{SPACE.hex()}/3/{'ff' * 16}"
    assert place.marker == "kv/70b/.kvtier"
    assert parse_url("s3://bucket").key(SPACE, 0, bytes(HASH)) == f"{SPACE.hex()}/0/{'00' * 16}"


@pytest.mark.parametrize("url", ["", "bucket", "http://bucket/x", "s3://", "s3:///x", "s3://B/x", "s3://bucket/a?b"])
def test_urls_that_are_none(url):
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize("url", ["ftp://host", "host:9000", "http://", "http://host?x=1"])
def test_endpoints_that_are_none(url):
    with pytest.raises(ConfigError):
        check_endpoint(url)


def test_credentials_in_a_url_are_refused_and_not_repeated():
    for check, url in ((parse_url, f"s3://{KEY_ID}:{SECRET}@bucket/x"), (check_endpoint, f"http://u:{SECRET}@host")):
        with pytest.raises(ConfigError) as error:
            check(url)
        assert SECRET not in str(error.value) and KEY_ID not in str(error.value)


# -- the end of a chain --------------------------------------------------------------------------------------------


def run(chain: Chain, there, known=lambda name: None):
    """(where the chain ends, rounds, questions)."""
    rounds, questions, answers = search(chain, known), 0, None
    for number in range(1000):
        try:
            names = rounds.send(answers)
        except StopIteration as end:
            return end.value, number, questions
        assert names and len(set(names)) == len(names)
        questions += len(names)
        answers = [name in there for name in names]
    raise AssertionError("it does not end")


def names_of(chain: Chain, group: int, first: int, last: int) -> set:
    """The group's blocks that lie within units [first, last)."""
    units = chain.groups[group].units
    return {chain.block(group, end) for end in range(first + units, last + 1, units)}


@given(
    length=st.integers(0, 400),
    kept=st.integers(0, 400),
    start=st.integers(0, 40),
    units=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
)
def test_full_attention_is_found_exactly(length, kept, start, units):
    step = math.lcm(*units)
    start = start // step * step
    chain = Chain(16, [GroupShape(u, 1) for u in units], chain_of((start + length, "x")), start)
    there = set()
    for group in range(len(units)):
        there |= names_of(chain, group, start, start + min(kept, length))
    end, rounds, _ = run(chain, there)
    assert end == start + min(kept, length) // step * step
    assert rounds <= 4  # of 400 blocks


def test_a_miss_costs_one_round_and_a_long_hit_four():
    chain = Chain(16, [GroupShape(1, 1)], chain_of((4000, "x")), 0)
    end, rounds, questions = run(chain, set())
    assert (end, rounds) == (0, 1) and questions <= FIRST_WIDTH + 1
    end, rounds, questions = run(chain, names_of(chain, 0, 0, 2717))
    assert end == 2717 and rounds <= 4 and questions <= 3 * WIDTH


def test_what_is_known_is_not_asked_for():
    chain = Chain(16, [GroupShape(1, 1)], chain_of((100, "x")), 0)
    kept = names_of(chain, 0, 0, 40)
    assert run(chain, set(), lambda name: name in kept) == (40, 0, 0)
    assert run(chain, kept, lambda name: True if name in kept else None)[0] == 40
    assert run(chain, set(), lambda name: False) == (0, 0, 0)
    assert run(Chain(16, [], b"", 0), set()) == (0, 0, 0)


def test_windowed_groups_need_what_can_be_seen():
    groups = [GroupShape(2, 1), GroupShape(1, 1, window=64)]  # four units of 16 tokens
    chain = Chain(16, groups, chain_of((40, "x")), 0)
    full = names_of(chain, 0, 0, 40)
    assert run(chain, full)[0] == 0
    assert run(chain, full | names_of(chain, 1, 16, 20))[0] == 20
    assert run(chain, full | names_of(chain, 1, 36, 40))[0] == 40
    assert run(chain, full | names_of(chain, 1, 30, 38))[0] == 38
    assert run(chain, names_of(chain, 0, 0, 20) | names_of(chain, 1, 16, 20))[0] == 20
    assert run(chain, names_of(chain, 0, 0, 21) | names_of(chain, 1, 0, 40))[0] == 20


@given(st.integers(1, 60), st.integers(1, 200), st.sets(st.integers(1, 60)), st.sampled_from([None, 1, 3]))
def test_windowed_search_ends_and_believes_nothing_missing(length, window, missing, full):
    groups = [GroupShape(1, 1, window=window), *([GroupShape(full, 1)] if full else [])]
    chain = Chain(16, groups, chain_of((length, "x")), 0)
    there = names_of(chain, 0, 0, length) - {chain.block(0, end) for end in missing if end <= length}
    there |= names_of(chain, 1, 0, length) if full else set()
    end, rounds, _ = run(chain, there)
    assert rounds <= ROUNDS + 4 and end % chain.step == 0
    assert end == 0 or chain.block(0, end) in there


# -- jobs ---------------------------------------------------------------------------------------------------------


class Bench:
    """Jobs whose blocks end when the test says so."""

    def __init__(self, width):
        self.lane, self.begun, self.over = Lane(width), deque(), []

    def add(self, name, count):
        def start(i, done):
            self.begun.append((name, i, done))

        self.lane.add(Job(count, start, lambda troubles: self.over.append((name, troubles))))

    def end(self, trouble=None):
        name, i, done = self.begun.popleft()
        done(trouble)
        return name, i


def test_jobs_take_turns_and_no_more_than_the_width_are_under_way():
    bench = Bench(3)
    bench.add("long", 9)
    bench.add("short", 2)
    assert [item[:2] for item in bench.begun] == [("long", 0), ("long", 1), ("long", 2)]
    order = []
    while bench.begun:
        assert len(bench.begun) <= 3
        order.append(bench.end())
    assert order.index(("short", 1)) < order.index(("long", 5))
    assert sorted(bench.over) == [("long", [None] * 9), ("short", [None] * 2)]
    bench.add("empty", 0)
    assert bench.over[-1] == ("empty", [])


def test_a_trouble_ends_a_job_when_what_is_under_way_has_ended():
    bench = Bench(2)
    bench.add("a", 5)
    bench.add("b", 1)
    trouble = Trouble("no")
    bench.end(trouble)
    assert not bench.over and len(bench.begun) == 2
    bench.end()
    assert bench.over == [("a", [trouble, None, trouble, trouble, trouble])]
    bench.end()
    assert bench.over[1:] == [("b", [None])]


def test_presence_forgets():
    now = [0.0]
    seen = Presence(2, 100.0, 1.0, lambda: now[0])
    assert seen.get("a") is None
    seen.saw("a", True)
    seen.saw("b", False)
    assert (seen.get("a"), seen.get("b")) == (True, False)
    now[0] = 2.0
    assert (seen.get("a"), seen.get("b")) == (True, None)
    seen.saw("b", True)
    seen.saw("c", True)
    assert seen.get("a") is None and seen.get("b") and len(seen) == 2
    now[0] = 200.0
    assert seen.get("c") is None

"""What the object tier is made of: names, the search for a chain's end, jobs in lanes."""

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import NAMESPACE_ID, block_hashes_of

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.objects.object_names import ObjectLocation, check_endpoint, parse_url, store_digest
from vllm_kvtier.store.tiers.prefix_search import (
    FIRST_ROUND_REQUESTS,
    MAX_ROUNDS,
    ROUND_REQUESTS,
    Prefix,
    end_of,
    names_by_position,
    search,
)
from vllm_kvtier.store.tiers.request_pool import Job, Lane, Presence, Trouble

KEY_ID, SECRET = "AKIAUNITTESTKEY", "unit/test/secret+of+forty+characters"

# -- names --------------------------------------------------------------------------------------------------------


def test_object_keys_follow_from_block_hashes():
    place = parse_url("s3://my.bucket-1/kv/70b/")
    assert place == ObjectLocation("my.bucket-1", "kv/70b")
    assert place.key(NAMESPACE_ID, 3, b"\xff" * HASH_BYTES) == f"kv/70b/{NAMESPACE_ID.hex()}/3/{'ff' * 16}"
    assert place.marker == "kv/70b/.kvtier"
    assert parse_url("s3://bucket").key(NAMESPACE_ID, 0, bytes(HASH_BYTES)) == f"{NAMESPACE_ID.hex()}/0/{'00' * 16}"


def test_object_locations_of_clouds_and_directories():
    for scheme in ("s3", "gs", "az"):
        place = parse_url(f"{scheme}://blocks/kv/")
        assert place == ObjectLocation("blocks", "kv", scheme) and str(place) == f"{scheme}://blocks/kv"
    place = parse_url("file:///mnt/my%20share/kv@home/")
    assert place == ObjectLocation("/mnt/my share/kv@home", "", "file") and place.marker == ".kvtier"
    assert place.key(NAMESPACE_ID, 3, b"\xff" * HASH_BYTES) == f"{NAMESPACE_ID.hex()}/3/ff/{'ff' * 16}"
    assert len({store_digest(f"{scheme}://blocks", "") for scheme in ("s3", "gs", "az")}) == 3


@pytest.mark.parametrize("url", ["file://", "file:///", "file://host/x", "file:///x#1", "file:///x?y", "file:///\n"])
def test_directory_url_invalid_raises(url):
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize("url", ["", "bucket", "http://bucket/x", "s3://", "s3:///x", "s3://B/x", "s3://bucket/a?b"])
def test_object_url_invalid_raises(url):
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize("url", ["ftp://host", "host:9000", "http://", "http://host?x=1"])
def test_object_endpoint_invalid_raises(url):
    with pytest.raises(ConfigError):
        check_endpoint(url)


def test_object_url_with_credentials_raises_without_revealing_them():
    for check, url in ((parse_url, f"s3://{KEY_ID}:{SECRET}@bucket/x"), (check_endpoint, f"http://u:{SECRET}@host")):
        with pytest.raises(ConfigError) as error:
            check(url)
        assert SECRET not in str(error.value) and KEY_ID not in str(error.value)


# -- the end of a chain --------------------------------------------------------------------------------------------


def run(prefix: Prefix, there, known=lambda name: None):
    """(where the chain ends, rounds, questions)."""
    rounds, questions, answers = search(prefix, known), 0, None
    for number in range(1000):
        try:
            names = rounds.send(answers)
        except StopIteration as end:
            return end.value, number, questions
        assert names and len(set(names)) == len(names)
        questions += len(names)
        answers = [name in there for name in names]
    raise AssertionError("it does not end")


def names_of(prefix: Prefix, group: int, first: int, last: int) -> set:
    """The group's blocks that lie within units [first, last)."""
    hash_blocks_per_block = prefix.groups[group].hash_blocks_per_block
    return {prefix.block(group, end) for end in range(first + hash_blocks_per_block, last + 1, hash_blocks_per_block)}


@given(
    length=st.integers(0, 400),
    kept=st.integers(0, 400),
    start=st.integers(0, 40),
    hash_blocks_per_block=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
)
def test_object_search_finds_exact_prefix_of_full_attention(length, kept, start, hash_blocks_per_block):
    step = math.lcm(*hash_blocks_per_block)
    start = start // step * step
    prefix = Prefix(
        16, [GroupShape(u, 1) for u in hash_blocks_per_block], block_hashes_of((start + length, "x")), start
    )
    there = set()
    for group in range(len(hash_blocks_per_block)):
        there |= names_of(prefix, group, start, start + min(kept, length))
    end, rounds, _ = run(prefix, there)
    assert end == start + min(kept, length) // step * step
    assert rounds <= 4  # of 400 blocks


def test_object_search_miss_takes_one_round_and_long_hit_four():
    prefix = Prefix(16, [GroupShape(1, 1)], block_hashes_of((4000, "x")), 0)
    end, rounds, questions = run(prefix, set())
    assert (end, rounds) == (0, 1) and questions <= FIRST_ROUND_REQUESTS + 1
    end, rounds, questions = run(prefix, names_of(prefix, 0, 0, 2717))
    assert end == 2717 and rounds <= 4 and questions <= 3 * ROUND_REQUESTS


def test_object_tier_known_presence_skips_request():
    prefix = Prefix(16, [GroupShape(1, 1)], block_hashes_of((100, "x")), 0)
    kept = names_of(prefix, 0, 0, 40)
    assert run(prefix, set(), lambda name: name in kept) == (40, 0, 0)
    assert run(prefix, kept, lambda name: True if name in kept else None)[0] == 40
    assert run(prefix, set(), lambda name: False) == (0, 0, 0)
    assert run(Prefix(16, [], b"", 0), set()) == (0, 0, 0)


def test_object_search_of_windowed_groups_needs_visible_blocks():
    groups = [GroupShape(2, 1), GroupShape(1, 1, window=64)]  # four units of 16 tokens
    prefix = Prefix(16, groups, block_hashes_of((40, "x")), 0)
    full = names_of(prefix, 0, 0, 40)
    assert run(prefix, full)[0] == 0
    assert run(prefix, full | names_of(prefix, 1, 16, 20))[0] == 20
    assert run(prefix, full | names_of(prefix, 1, 36, 40))[0] == 40
    assert run(prefix, full | names_of(prefix, 1, 30, 38))[0] == 38
    assert run(prefix, names_of(prefix, 0, 0, 20) | names_of(prefix, 1, 16, 20))[0] == 20
    assert run(prefix, names_of(prefix, 0, 0, 21) | names_of(prefix, 1, 0, 40))[0] == 20


@given(
    st.integers(1, 60), st.integers(1, 200), st.sets(st.integers(1, 60)), st.sampled_from([None, 1, 3]),
    st.sampled_from(["sliding", "chunked"]),
)  # fmt: skip
def test_object_search_of_windowed_groups_is_bounded_and_sound(length, window, missing, full, kind):
    groups = [GroupShape(1, 1, window=window, kind=kind), *([GroupShape(full, 1)] if full else [])]
    prefix = Prefix(16, groups, block_hashes_of((length, "x")), 0)
    there = names_of(prefix, 0, 0, length) - {prefix.block(0, end) for end in missing if end <= length}
    there |= names_of(prefix, 1, 0, length) if full else set()
    end, rounds, _ = run(prefix, there)
    assert rounds <= MAX_ROUNDS + 4 and end % prefix.step == 0
    assert end == 0 or prefix.block(0, end) in there


# -- jobs ---------------------------------------------------------------------------------------------------------


class Stored(set):
    """Blocks of a store; counts how often one is looked for."""

    asked = 0

    def __contains__(self, name):
        self.asked += 1
        return super().__contains__(name)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_end_of_prefix_without_its_windows_asks_once_for_each_block(kind):
    """For 8,192 blocks with chunks of 512 it took longer than a lookup in a Mooncake cluster may."""
    prefix = Prefix(16, [GroupShape(1, 1), GroupShape(1, 1, 1600, kind)], block_hashes_of((1000, "x")), 0)
    stored = Stored(name for name in names_by_position(prefix) if name[0] == 0)
    assert end_of(prefix, stored) == 0 and stored.asked <= 2000
    stored |= {prefix.block(1, end) for end in range(301, 501)}
    assert end_of(prefix, stored) == 500


def test_end_of_prefix_asks_once_for_the_blocks_of_groups_that_lack_none():
    """Where one window lacked all blocks, each end was looked at anew with those of all other windows: 4 s for 32,768
    hash blocks."""
    groups = [GroupShape(1, 1), *(GroupShape(1, 1, 1024, "sliding") for _ in range(3))]
    prefix = Prefix(16, groups, block_hashes_of((2000, "x")), 0)
    for missing in (1, 2, 3):
        stored = Stored(name for name in names_by_position(prefix) if name[0] != missing)
        assert end_of(prefix, stored) == 0 and stored.asked <= 4 * 2000
        stored |= {prefix.block(missing, end) for end in range(100, 201)}
        assert end_of(prefix, stored) == 200


@given(st.data())
def test_end_of_prefix_is_the_last_whose_blocks_are_stored(data):
    shapes = [(None, "full"), (64, "sliding"), (100, "sliding"), (128, "chunked"), (None, "mamba")]
    groups = [
        GroupShape(data.draw(st.sampled_from([1, 2, 3])), 1, *data.draw(st.sampled_from(shapes)))
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    align = Prefix(16, groups, b"", 0).step
    prefix = Prefix(16, groups, block_hashes_of((40, "x")), align * data.draw(st.integers(0, 3)))
    names = names_by_position(prefix)
    stored = set(names) - set(data.draw(st.lists(st.sampled_from(names), max_size=12)) if names else ())

    def complete(end: int) -> bool:
        return all(
            prefix.block(group, (block + 1) * shape.hash_blocks_per_block) in stored
            for group, shape in enumerate(groups)
            for block in range(shape.first_block(16, prefix.start, end), end // shape.hash_blocks_per_block)
        )

    ends = range(prefix.start, 41, align)
    assert end_of(prefix, stored) == max((end for end in ends if complete(end)), default=prefix.start)


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


def test_object_jobs_alternate_within_concurrency_limit():
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


def test_object_jobs_error_ends_job_after_running_requests():
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


def test_object_job_without_blocks_added_by_ending_job_ends():
    lane, over = Lane(1), []

    def first_over(troubles):
        over.append("first")
        lane.add(Job(0, lambda i, done: None, lambda troubles: over.append("empty")))

    lane.add(Job(1, lambda i, done: done(None), first_over))
    assert over == ["first", "empty"]


def test_object_presence_cache_expires():
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

"""The store's directory against a plain model: which engines are named for a prefix, from any block on, and in which
order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support import WITHOUT_SHRINKING

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.types import BadRequest
from vllm_kvtier.store.server.peer_directory import PeerDirectory, directory_query

CLIENTS = range(1, 7)
FAMILIES = (b"family 1", b"family 2")
MIXES = (b"\xff" * 8, b"another.")
LIMIT = 40
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def hashes_of(tokens: list[int]) -> list[bytes]:
    """Chained: which prefix it is, in the half that keys are made of."""
    return [
        int("1" + "".join(map(str, tokens[: n + 1])), 2).to_bytes(8, "little") + b"the rest" for n in range(len(tokens))
    ]


def key_of(block_hash: bytes, key_mask: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(block_hash[:8], key_mask, strict=True))


class Engine:
    def __init__(self, family: bytes):
        self.family, self.address = family, ()
        self.keys: set[bytes] = set()
        self.named = 0

    def num_hash_blocks(self, hashes: list[bytes], start: int, key_mask: bytes, hash_blocks_per_block: int) -> int:
        """Where the run of its blocks ends that begins with the one that has unit ``start``; 0: there is none."""
        block = start // hash_blocks_per_block
        end = 0
        while (last := (block + 1) * hash_blocks_per_block - 1) < len(hashes) and key_of(
            hashes[last], key_mask
        ) in self.keys:
            block += 1
            end = block * hash_blocks_per_block
        return end


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = PeerDirectory(LIMIT)
        self.engines: dict[int, Engine] = {}
        self.answers = self.left = self.peak = 0

    @rule(client=st.sampled_from(CLIENTS), family=st.sampled_from(FAMILIES), port=st.integers(1, 9))
    def present(self, client, family, port):
        """Also again: another address, or another family."""
        address = ("host", port, f"{client}")
        self.directory.present(client, family, *address)
        engine = self.engines.get(client)
        if engine is None or engine.family != family:
            self.left += engine is not None
            engine = self.engines[client] = Engine(family)
        engine.address = address

    @rule(client=st.sampled_from(CLIENTS))
    def leave(self, client):
        self.directory.leave(client)
        self.left += self.engines.pop(client, None) is not None

    @rule(limit=st.integers(0, 15))
    def sweep(self, limit):
        if not self.directory.sweep(limit):
            self.left = 0

    @rule(
        client=st.sampled_from(CLIENTS),
        tokens=TOKENS,
        key_mask=st.sampled_from(MIXES),
        hash_blocks_per_block=st.integers(1, 3),
        gone=TOKENS,
        which=st.sampled_from(["added", "gone", "both"]),
        anew=st.sampled_from([False, False, True]),
    )
    def update(self, client, tokens, key_mask, hash_blocks_per_block, gone, which, anew):
        added = (
            [key_of(each, key_mask) for each in hashes_of(tokens)[hash_blocks_per_block - 1 :: hash_blocks_per_block]]
            if which != "gone"
            else []
        )
        gone = [key_of(each, key_mask) for each in hashes_of(gone)[-2:]] if which != "added" else []
        engine = self.engines.get(client)
        try:
            self.directory.update(client, b"".join(added), b"".join(gone), anew)
        except BadRequest:
            assert engine is None or (not anew and len(engine.keys | set(added)) > LIMIT)
            return
        if anew:
            self.left += bool(engine.keys)
            engine.keys = set()
        engine.keys |= set(added)
        assert len(engine.keys) <= LIMIT
        engine.keys -= set(gone)

    @rule(
        client=st.sampled_from(CLIENTS),
        tokens=TOKENS,
        key_mask=st.sampled_from(MIXES),
        hash_blocks_per_block=st.integers(1, 3),
        start=st.integers(0, 11),
    )
    def lookup(self, client, tokens, key_mask, hash_blocks_per_block, start):
        hashes = hashes_of(tokens)
        got = self.directory.holders(client, directory_query(b"".join(hashes), start, key_mask, hash_blocks_per_block))
        me = self.engines.get(client)
        others = [each for name, each in self.engines.items() if name != client and me and each.family == me.family]
        found = [(-each.num_hash_blocks(hashes, start, key_mask, hash_blocks_per_block), each.named) for each in others]
        expected = sorted(each for each in found if each[0])[: m.MAX_HOLDERS]
        named = [self.engines[int(holder.instance)] for holder in got]
        assert len({holder.instance for holder in got}) == len(got)
        assert [(-holder.num_hash_blocks, engine.named) for holder, engine in zip(got, named, strict=True)] == expected
        for holder, engine in zip(got, named, strict=True):
            assert engine in others and (holder.host, holder.port, holder.instance) == engine.address
            assert holder.num_hash_blocks == engine.num_hash_blocks(hashes, start, key_mask, hash_blocks_per_block)
            assert holder.num_hash_blocks > start and holder.num_hash_blocks % hash_blocks_per_block == 0
        if named:
            self.answers += 1
            named[0].named = self.answers
        assert (
            self.directory.holders(client, directory_query(b"".join(hashes), start, b"", hash_blocks_per_block)) == []
        )

    @invariant()
    def numbers_agree(self):
        counts = self.directory.counts()
        assert counts == m.DirectoryCounts(len(self.engines), sum(len(each.keys) for each in self.engines.values()))
        families = [each.family for each in self.engines.values()]
        assert self.directory.others() == {name: families.count(e.family) - 1 for name, e in self.engines.items()}

    @invariant()
    def nothing_is_left_of_nobody(self):
        """Bits belong to engines that are present, or that left and are not swept yet; they are reused."""
        inside = self.directory._groups
        for name, here in inside.items():
            mine = {c: e for c, e in self.engines.items() if e.family == name}
            assert here.present.bit_count() == len(mine) == len(here.engines)
            assert here.taken & here.present == here.present and here.taken
            bits = {each.instance: bit for bit, each in here.engines.items()}
            for key in here.masks:
                packed = key.to_bytes(8, "little")
                has = sum(bits[f"{client}"] for client, each in mine.items() if packed in each.keys)
                assert here.masks[key] & here.present == has
                assert here.masks[key] and here.masks[key] & here.taken == here.masks[key]
            assert all(int.from_bytes(key, "little") in here.masks for each in mine.values() for key in each.keys)
        if not self.left:
            assert set(inside) == {each.family for each in self.engines.values()}
            assert all(here.taken == here.present and all(here.masks.values()) for here in inside.values())
        self.peak = max(self.peak, len(self.engines) + self.left)
        assert all(here.taken.bit_length() <= self.peak for here in inside.values())

    def teardown(self):
        """Everybody goes: nothing is left anywhere."""
        for client in CLIENTS:
            self.directory.leave(client)
        while self.directory.sweep(7):
            pass
        assert not self.directory._groups and not self.directory._engines


Machine.TestCase.settings = settings(settings.default, stateful_step_count=50)
TestDirectory = Machine.TestCase


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40, phases=WITHOUT_SHRINKING, deadline=None)
def test_peer_directory_random_operations_keep_invariants(seed):
    """The machine's own rules in long walks; hypothesis alone seldom has four engines share a chain."""
    walk(seed)


def test_peer_directory_random_operations_cover_all_events():
    assert sum(walk(seed) for seed in range(10)) > 60


def walk(seed: int) -> int:
    """How many lookups were answered."""
    rng = random.Random(seed)
    machine = Machine()

    def tokens():
        return [int(rng.random() < 0.2) for _ in range(rng.randint(1, 10))]

    def client():
        return rng.choice(CLIENTS)

    def key_mask():
        return rng.choice([*[MIXES[0]] * 4, MIXES[1]])

    def present():
        machine.present(client=client(), family=rng.choice([*[FAMILIES[0]] * 5, FAMILIES[1]]), port=rng.randint(1, 9))

    def update():
        which = rng.choice(["added", "added", "both", "gone"])
        hash_blocks_per_block = rng.choice([1, 1, 2, 3])
        machine.update(
            client=client(),
            tokens=tokens(),
            key_mask=key_mask(),
            hash_blocks_per_block=hash_blocks_per_block,
            gone=tokens(),
            which=which,
            anew=rng.random() < 0.1,
        )

    def lookup():
        machine.lookup(
            client=client(),
            tokens=tokens(),
            key_mask=key_mask(),
            hash_blocks_per_block=rng.choice([1, 1, 2, 3]),
            start=rng.choice([0, 0, 1, 2, 4]),
        )

    events = [
        (3, present),
        (12, update),
        (12, lookup),
        (1, lambda: machine.leave(client=client())),
        (2, lambda: machine.sweep(limit=rng.randint(0, 15))),
    ]
    for _ in range(300):
        rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        machine.numbers_agree()
        machine.nothing_is_left_of_nobody()
    machine.teardown()
    return machine.answers


def test_directory_query_keys_equal_engine_keys():
    """As the scheduler's ``ChecksumIndex`` does: one number of 64 bits a block, of the hash that ends it."""
    block_hashes = random.Random(7).randbytes(16 * 7)
    key_mask = bytes(range(8))
    for hash_blocks_per_block in (1, 2, 3):
        expected = [
            int.from_bytes(block_hashes[end - 16 : end - 8], "little") ^ int.from_bytes(key_mask, "little")
            for end in range(16 * hash_blocks_per_block, len(block_hashes) + 1, 16 * hash_blocks_per_block)
        ]
        assert list(directory_query(block_hashes, 0, key_mask, hash_blocks_per_block).keys()) == expected
        assert (
            list(directory_query(block_hashes, 2 * hash_blocks_per_block, key_mask, hash_blocks_per_block).keys())
            == expected[2:]
        )

"""The store's directory against a plain model: who is named for a chain, from any unit on, and in which order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support import WITHOUT_SHRINKING

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.directory import Directory, sought
from vllm_kvtier.store.records import BadRequest

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


def key_of(block_hash: bytes, mix: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(block_hash[:8], mix, strict=True))


class Engine:
    def __init__(self, family: bytes):
        self.family, self.address = family, ()
        self.keys: set[bytes] = set()
        self.named = 0

    def units(self, hashes: list[bytes], start: int, mix: bytes, stride: int) -> int:
        """Where the run of its blocks ends that begins with the one that has unit ``start``; 0: there is none."""
        block = start // stride
        end = 0
        while (last := (block + 1) * stride - 1) < len(hashes) and key_of(hashes[last], mix) in self.keys:
            block += 1
            end = block * stride
        return end


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = Directory(LIMIT)
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
        mix=st.sampled_from(MIXES),
        stride=st.integers(1, 3),
        gone=TOKENS,
        which=st.sampled_from(["added", "gone", "both"]),
        anew=st.sampled_from([False, False, True]),
    )
    def update(self, client, tokens, mix, stride, gone, which, anew):
        added = [key_of(each, mix) for each in hashes_of(tokens)[stride - 1 :: stride]] if which != "gone" else []
        gone = [key_of(each, mix) for each in hashes_of(gone)[-2:]] if which != "added" else []
        engine = self.engines.get(client)
        try:
            self.directory.update(client, b"".join(added), b"".join(gone), anew)
        except BadRequest:
            assert engine is None or not anew and len(engine.keys | set(added)) > LIMIT
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
        mix=st.sampled_from(MIXES),
        stride=st.integers(1, 3),
        start=st.integers(0, 11),
    )
    def lookup(self, client, tokens, mix, stride, start):
        hashes = hashes_of(tokens)
        got = self.directory.holders(client, sought(b"".join(hashes), start, mix, stride))
        me = self.engines.get(client)
        others = [each for name, each in self.engines.items() if name != client and me and each.family == me.family]
        found = [(-each.units(hashes, start, mix, stride), each.named) for each in others]
        expected = sorted(each for each in found if each[0])[: m.MAX_HOLDERS]
        named = [self.engines[int(holder.instance)] for holder in got]
        assert len({holder.instance for holder in got}) == len(got)
        assert [(-holder.units, engine.named) for holder, engine in zip(got, named, strict=True)] == expected
        for holder, engine in zip(got, named, strict=True):
            assert engine in others and (holder.host, holder.port, holder.instance) == engine.address
            assert holder.units == engine.units(hashes, start, mix, stride)
            assert holder.units > start and holder.units % stride == 0
        if named:
            self.answers += 1
            named[0].named = self.answers
        assert self.directory.holders(client, sought(b"".join(hashes), start, b"", stride)) == []

    @invariant()
    def numbers_agree(self):
        counts = self.directory.counts()
        assert counts == m.DirectoryCounts(len(self.engines), sum(len(each.keys) for each in self.engines.values()))
        families = [each.family for each in self.engines.values()]
        assert self.directory.others() == {name: families.count(e.family) - 1 for name, e in self.engines.items()}

    @invariant()
    def nothing_is_left_of_nobody(self):
        """Bits are those of who is there, and of who left and is not swept yet; they are given anew."""
        inside = self.directory._families
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
        assert not self.directory._families and not self.directory._engines


Machine.TestCase.settings = settings(settings.default, stateful_step_count=50)
TestDirectory = Machine.TestCase


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40, phases=WITHOUT_SHRINKING, deadline=None)
def test_long_random_lives(seed):
    """The machine's own rules in long walks; hypothesis alone seldom has four engines share a chain."""
    walk(seed)


def test_long_lives_are_about_something():
    assert sum(walk(seed) for seed in range(10)) > 60


def walk(seed: int) -> int:
    """How many lookups were answered."""
    rng = random.Random(seed)
    machine = Machine()

    def tokens():
        return [int(rng.random() < 0.2) for _ in range(rng.randint(1, 10))]

    def client():
        return rng.choice(CLIENTS)

    def mix():
        return rng.choice([*[MIXES[0]] * 4, MIXES[1]])

    def present():
        machine.present(client=client(), family=rng.choice([*[FAMILIES[0]] * 5, FAMILIES[1]]), port=rng.randint(1, 9))

    def update():
        which = rng.choice(["added", "added", "both", "gone"])
        stride = rng.choice([1, 1, 2, 3])
        machine.update(
            client=client(),
            tokens=tokens(),
            mix=mix(),
            stride=stride,
            gone=tokens(),
            which=which,
            anew=rng.random() < 0.1,
        )

    def lookup():
        machine.lookup(
            client=client(),
            tokens=tokens(),
            mix=mix(),
            stride=rng.choice([1, 1, 2, 3]),
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


def test_keys_are_those_that_engines_make():
    """As the scheduler's ledger does: one number of 64 bits a block, of the hash that ends it."""
    chain = random.Random(7).randbytes(16 * 7)
    mix = bytes(range(8))
    for stride in (1, 2, 3):
        expected = [
            int.from_bytes(chain[end - 16 : end - 8], "little") ^ int.from_bytes(mix, "little")
            for end in range(16 * stride, len(chain) + 1, 16 * stride)
        ]
        assert list(sought(chain, 0, mix, stride).keys()) == expected
        assert list(sought(chain, 2 * stride, mix, stride).keys()) == expected[2:]

"""The disk tier and what writes to it, against a plain model and a simulated disk that fails at any point.

The disk does what its tier process promises: step by step it journals what was given up, writes blocks, journals that
they are there. Killed between any two steps it keeps what the journal says. What must hold: a journaled place holds the
bytes of its name; what was reported as kept is found again, also by the next tier process, unless it was given up; what
was discarded or cleared is never found again; what is leased is not overwritten; answers come once.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import WITHOUT_SHRINKING, Clock
from tier_backend_fakes import FakeMover, FakeReactor

from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.admission import admission
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.demotion import Demotion, DemotionLimits
from vllm_kvtier.store.tiers.disk.tier import DiskTier
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, READY, TierContext
from vllm_kvtier.wire.slots import PAGE

HASH_BLOCK_SIZE = 4
NOWHERE = 1 << 30
NAMESPACE_IDS = [b"A" * HASH_BYTES, b"B" * HASH_BYTES]
MEMORY, DISK = 40, 34  # pages
SHAPES = [
    [GroupShape(1, 3)],
    [GroupShape(1, 2), GroupShape(2, 5)],
    [GroupShape(2, 3), GroupShape(1, 3)],
]

Name = tuple[bytes, int, bytes]
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def block_hashes_of(tokens: list[int]) -> list[bytes]:
    return [bytes(tokens[: n + 1]).ljust(HASH_BYTES, b"\xff") for n in range(len(tokens))]


class Disk:
    """``bytes``: by page, whose they are. ``journal``: by place; it survives whatever happens."""

    def __init__(self):
        self.bytes: dict[int, Name] = {}
        self.journal: dict[int, m.Move] = {}
        self.namespaces: dict[bytes, m.NamespaceShape] = {}

    def give_up(self, positions: list[int]) -> None:
        for position in positions:
            self.journal.pop(position, None)

    def write(self, move: m.Move) -> None:
        pages = range(move.position, move.position + move.pages)
        assert move.position > 0 and pages.stop <= DISK
        for other in self.journal.values():
            apart = other.position >= pages.stop or other.position + other.pages <= pages.start
            assert apart, "a block is overwritten that the journal still names"
        for page in pages:
            self.bytes[page] = name_of(move)

    def put(self, move: m.Move) -> None:
        assert move.namespace_id in self.namespaces, "the tier process does not know this namespace"
        self.journal[move.position] = move

    def check(self) -> None:
        for move in self.journal.values():
            assert all(self.bytes[move.position + i] == name_of(move) for i in range(move.pages))


def name_of(x) -> Name:
    return x.namespace_id, x.group, x.hash


class Tiers(RuleBasedStateMachine):
    @initialize(shapes=st.sampled_from(SHAPES), how=st.sampled_from(["all", "all", "reuse"]))
    def start(self, shapes, how):
        self.shapes = shapes
        self.groups = shapes
        self.align = max(s.hash_blocks_per_block for s in shapes)
        self.clock = Clock()
        self.reactor = FakeReactor(self.clock)
        self.index = Index(SlotPool(MEMORY, MEMORY), None, self.clock)
        self.index.grow(MEMORY)
        self.index.connect(1, HASH_BLOCK_SIZE, shapes)
        context = TierContext(-1, 0, self.reactor, self.clock, make_process=FakeMover)
        self.tier = DiskTier(context, {"size": DISK * PAGE}, self.shapes_of)
        self.tier_process: FakeMover = self.tier._tier_process
        self.demotion = Demotion(
            self.index, {self.tier: admission(how)}, 2, DemotionLimits(1 << 30, 1 << 30), self.reactor, self.clock
        )
        self.index.watches.append(self.demotion)
        self.tier.on_change = self.demotion.tiers_changed
        self.write_of_tier, self.tier.write = self.tier.write, self.write
        self.disk = Disk()
        self.kept: dict[Name, int] = {}  # what the tier says it has, and where; of this tier process
        # Discarded or cleared, when so many messages had been sent; what is written later is another copy.
        self.forbidden: dict[Name, int] = {}
        self.inbox = 0  # of what the tier process was sent, so much was done
        self.heard = 0  # and of so much the places given up were seen here
        self.finds: list = []  # (find, names)
        self.finds_of_old: list = []
        self.dead = False  # and buried
        self.reads: list[dict] = []
        self.writes: list[dict] = []
        self.tier.start()
        self.tier_process.opened()
        self.reactor.run()

    def shapes_of(self, namespace_id):
        return HASH_BLOCK_SIZE, self.groups

    # -- what the tier is asked, seen from outside ---------------------------------------------------------------

    def write(self, blocks, done):
        """In place of the tier's: what it was asked, and that it answers once."""
        for block in blocks:
            entry = self.index.find(*name_of(block))
            assert entry is not None and entry.slot == block.slot and entry.leases
        write = {"blocks": blocks, "answers": []}
        self.writes.append(write)

        def over(good):
            write["answers"].append(good)
            assert len(good) == len(blocks)
            done(good)

        self.write_of_tier(blocks, over)

    def given_up(self) -> None:
        """What the tier process was asked to drop is not reported as kept either; it was not leased."""
        for message in self.tier_process.sent[self.heard :]:
            for position in getattr(message, "gone", []):
                for name in [name for name, at in self.kept.items() if at == position]:
                    assert not any(name in names for _, names in self.finds), "evicted although leased"
                    del self.kept[name]
        self.heard = len(self.tier_process.sent)

    def names(self, namespace_id, hashes, end) -> list[Name]:
        return [
            (namespace_id, g, hashes[(j + 1) * s.hash_blocks_per_block - 1])
            for g, s in enumerate(self.shapes)
            for j in range(end // s.hash_blocks_per_block)
        ]

    # -- rules ---------------------------------------------------------------------------------------------------

    @rule(namespace_id=st.sampled_from([*NAMESPACE_IDS, NAMESPACE_IDS[0]]), tokens=tokens_of)
    def store(self, namespace_id, tokens):
        hashes = block_hashes_of(tokens)
        items = [
            (
                g,
                hashes[(j + 1) * s.hash_blocks_per_block - 1],
                hashes[j * s.hash_blocks_per_block - 1] if j else bytes(HASH_BYTES),
            )
            for g, s in enumerate(self.shapes)
            for j in range(len(tokens) // s.hash_blocks_per_block)
        ]
        slots = self.index.reserve(
            1,
            namespace_id,
            b"",
            [g for g, _, _ in items],
            b"".join(h for _, h, _ in items),
            b"".join(p for _, _, p in items),
            NOWHERE,
        )
        self.index.commit(1, [slot for slot in slots if slot > 0])

    @rule(namespace_id=st.sampled_from(NAMESPACE_IDS), tokens=tokens_of)
    def use(self, namespace_id, tokens):
        found = self.index.lookup(1, namespace_id, b"".join(block_hashes_of(tokens)), 0, NOWHERE)
        self.index.release(1, found.lease)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 100.0]))
    def time_passes(self, seconds):
        self.reactor.run(seconds)
        self.given_up()
        if self.tier_process.state == BACKOFF and not self.dead:  # by the tier, which opens it anew
            self.bury(self.tier_process.sent[self.inbox :], 0, 0, 0)

    @rule(namespace_id=st.sampled_from(NAMESPACE_IDS), tokens=tokens_of)
    def find(self, namespace_id, tokens):
        hashes, found = block_hashes_of(tokens), []
        self.tier.find(Want(namespace_id, HASH_BLOCK_SIZE, self.groups, b"".join(hashes), 0), found.append)
        ends = range(len(hashes) // self.align * self.align, 0, -self.align)
        end = next((e for e in ends if all(name in self.kept for name in self.names(namespace_id, hashes, e))), 0)
        assert [f.num_hash_blocks for f in found] == [end if self.tier.usable else 0]
        if found[0].num_hash_blocks:
            self.finds.append((found[0], self.names(namespace_id, hashes, end)))

    @precondition(lambda self: getattr(self, "finds", None))
    @rule(pick=st.randoms(use_true_random=False))
    def read(self, pick):
        find, names = pick.choice(self.finds)
        blocks = [
            Block(*name, bytes(HASH_BYTES), b"", 7 + i, self.shapes[name[1]].slot_pages) for i, name in enumerate(names)
        ]
        read = {"names": names, "answers": [], "sent": len(self.tier_process.sent)}
        self.reads.append(read)
        self.tier.read(find, blocks, read["answers"].append)

    @precondition(lambda self: getattr(self, "finds", None))
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick):
        self.tier.release(self.finds.pop(pick.randrange(len(self.finds)))[0])

    @rule(pick=st.randoms(use_true_random=False), namespace_id=st.sampled_from(NAMESPACE_IDS), tokens=tokens_of)
    def discard(self, pick, namespace_id, tokens):
        names = sorted(self.kept) or self.names(namespace_id, block_hashes_of(tokens), len(tokens))
        if names:
            self.forget([pick.choice(names)])

    @rule(namespace_id=st.sampled_from([None, *NAMESPACE_IDS]), really=st.integers(0, 4))
    def clear(self, namespace_id, really):
        if really:
            return
        everything = {name_of(move) for move in self.disk.journal.values()} | set(self.kept)
        everything |= {name_of(b) for w in self.writes if not w["answers"] for b in w["blocks"]}
        mine = [name for name in everything if namespace_id in (None, name[0])]
        self.forget(mine, lambda: self.tier.clear(namespace_id))

    def forget(self, names: list[Name], how=None) -> None:
        for name in names:
            if how is None:
                self.tier.discard(*name)
            self.kept.pop(name, None)
            self.forbidden[name] = len(self.tier_process.sent)
        for _, found in self.finds:
            found[:] = [name for name in found if name not in names]
        if how is not None:
            how()
        self.given_up()

    # -- the tier process's side -----------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "tier_process") and self.inbox < len(self.tier_process.sent))
    @rule(bad=st.sets(st.integers(0, 6)), fails=st.integers(0, 5), stays=st.integers(0, 3))
    def mover_works(self, bad, fails, stays):
        self.given_up()
        message = self.tier_process.sent[self.inbox]
        self.inbox += 1
        if isinstance(message, m.Drop):
            self.disk.give_up(message.gone)
            return
        good = [fails > 0 or i not in bad for i in range(len(message.moves))]
        at = next(i for i, (asked, _) in enumerate(self.tier_process.asked) if asked is message)
        if isinstance(message, m.Write):
            # Of blocks that failed some are there nevertheless: it was the journal's sync that failed.
            there = [is_good or i % 2 for i, is_good in enumerate(good)]
            puts = [move for move, is_there in zip(message.moves, there, strict=True) if is_there]
            self.do_write(message, 3 if any(good) or stays != 1 else 0, puts)
            before = {name_of(x) for x in message.moves if self.tier.has(*name_of(x))}
            for move, is_good in zip(message.moves, good, strict=True):
                if is_good and name_of(move) in before:
                    self.kept[name_of(move)] = move.position
        else:
            for move in message.moves:
                if name_of(move) in self.kept:
                    assert all(self.disk.bytes[move.position + i] == name_of(move) for i in range(move.pages))
            # What cannot be read is given up, leased or not.
            unread = {name_of(move) for move, is_good in zip(message.moves, good, strict=True) if not is_good}
            for name in unread:
                self.kept.pop(name, None)
                self.forbidden[name] = len(self.tier_process.sent)
            for _, found in self.finds:
                found[:] = [name for name in found if name not in unread]
        words = {} if all(good) else {"error": "EIO", "writable": bool(stays)}
        self.tier_process.answer(good, at, **words)
        self.given_up()
        self.disk.check()

    def do_write(self, message: m.Write, steps: int, puts: list[m.Move]) -> None:
        if steps >= 1:
            self.disk.give_up(message.gone)
            self.disk.namespaces.update(
                {namespace_id.namespace_id: namespace_id for namespace_id in message.namespaces}
            )
        if steps >= 2:
            for move in message.moves:
                self.disk.write(move)
        if steps >= 3:
            sent = next(i for i, other in enumerate(self.tier_process.sent) if other is message)
            for move in puts:
                self.disk.put(move)
                if self.forbidden.get(name_of(move), NOWHERE) <= sent:
                    del self.forbidden[name_of(move)]

    @precondition(lambda self: hasattr(self, "tier_process") and self.tier_process.state == READY)
    @rule(done=st.integers(0, 3), steps=st.integers(0, 3), puts=st.integers(0, 6), really=st.integers(0, 2))
    def mover_dies(self, done, steps, puts, really):
        """After so many messages, in the midst of the next one."""
        if really:
            return
        rest = self.tier_process.sent[self.inbox :]
        unanswered = [x for x in [*self.reads, *self.writes] if not x["answers"]]
        self.tier_process.back_off("a fault")
        assert not any(x["answers"] for x in unanswered), "answered while its I/O may still go on"
        self.bury(rest, done, steps, puts)

    def bury(self, rest: list, done: int, steps: int, puts: int) -> None:
        self.dead = True
        unanswered = [x for x in [*self.reads, *self.writes] if not x["answers"]]
        for n, message in enumerate(rest[: done + 1]):
            if isinstance(message, m.Drop) and (n < done or steps):
                self.disk.give_up(message.gone)
            elif isinstance(message, m.Write):
                self.do_write(message, 3 if n < done else steps, message.moves if n < done else message.moves[:puts])
            self.disk.check()
        self.inbox = len(self.tier_process.sent)
        self.tier_process.reap()
        assert all(len(x["answers"]) == 1 for x in [*self.reads, *self.writes])
        assert all(not any(x["answers"][0]) for x in unanswered)
        self.reads, self.writes = [], []
        self.finds_of_old, self.finds = self.finds, []
        assert not self.tier.usable and not self.tier.writable

    @precondition(lambda self: hasattr(self, "tier_process") and self.tier_process.state == BACKOFF)
    @rule(pick=st.randoms(use_true_random=False), ordered=st.booleans(), writable=st.integers(0, 5))
    def mover_returns(self, pick, ordered, writable):
        moves = sorted(self.disk.journal.values(), key=lambda move: move.hash.rstrip(b"\xff"))
        if not ordered:
            pick.shuffle(moves)
        told = sum(len(w["answers"]) for w in self.writes)
        self.tier_process.opened(moves, list(self.disk.namespaces.values()), writable=bool(writable))
        self.reactor.run()
        if writable and told == sum(len(w["answers"]) for w in self.writes):
            here = {name_of(move): move.position for move in moves if self.tier.has(*name_of(move))}
            busy = {name_of(b) for w in self.writes if not w["answers"] for b in w["blocks"]}
            lost = [name for name in self.kept if name not in here]
            evicted = {position for x in self.tier_process.sent[self.heard :] for position in getattr(x, "gone", [])}
            assert all(self.kept[name] in evicted for name in lost), "reported as kept, and lost"
            assert not (set(here) - busy) & set(self.forbidden), "discarded or cleared, and here again"
            self.kept = {name: position for name, position in here.items() if name not in busy}
        else:
            self.kept = {name_of(move): move.position for move in moves if self.tier.has(*name_of(move))}
        self.heard = len(self.tier_process.sent)
        for find, _ in self.finds_of_old:
            self.tier.release(find)
        self.dead = False
        self.finds_of_old = []

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def it_has_what_it_keeps(self):
        if not hasattr(self, "tier_process") or not self.tier.usable:
            return
        self.given_up()
        busy = {name_of(b) for w in self.writes if not w["answers"] for b in w["blocks"]}
        for name in self.kept:
            assert self.tier.has(*name)
        counts = self.tier.counts()
        assert counts.blocks == len(self.kept)
        for name in set(self.forbidden) - busy - set(self.kept):
            assert not self.tier.has(*name)
        assert len([w for w in self.writes if not w["answers"]]) <= 1
        assert all(len(x["answers"]) <= 1 for x in [*self.reads, *self.writes])
        under_way = sum(isinstance(asked, m.Read) for asked, _ in self.tier_process.asked)
        assert self.tier._slot_map.stats().leases == len(self.finds) + under_way
        writing = any(not w["answers"] for w in self.writes)
        assert self.index.client_counts(2)[0] == writing

    def teardown(self):
        """All is answered and released: nothing is leased or reserved anywhere."""
        if not hasattr(self, "tier_process"):
            return
        self.tier.stop()
        assert all(len(x["answers"]) == 1 for x in [*self.reads, *self.writes])
        assert self.index.client_counts(2) == (0, 0)


Tiers.TestCase.settings = settings(settings.default, max_examples=40, stateful_step_count=40, deadline=None)
TestTiers = Tiers.TestCase


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_disk_tier_random_operations_keep_invariants(seed):
    """The machine's own rules in long walks; hypothesis alone seldom has the tier process die at the right moment."""
    rng = random.Random(seed)
    machine = Tiers()
    machine.start(shapes=rng.choice(SHAPES), how=rng.choice(["all", "all", "reuse"]))

    def tokens():
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]

    def namespace_id():
        return rng.choice([NAMESPACE_IDS[0], *NAMESPACE_IDS])

    def works():
        if machine.inbox < len(machine.tier_process.sent):
            bad = {rng.randint(0, 6) for _ in range(rng.randint(0, 3))}
            machine.mover_works(bad=bad, fails=rng.randint(0, 5), stays=rng.randint(0, 5))

    def dies():
        if machine.tier_process.state == READY:
            machine.mover_dies(done=rng.randint(0, 3), steps=rng.randint(0, 3), puts=rng.randint(0, 6), really=0)

    def returns():
        if machine.tier_process.state == BACKOFF:
            machine.mover_returns(pick=rng, ordered=rng.random() < 0.7, writable=rng.randint(0, 9))

    def of_finds(rule):
        if machine.finds:
            rule(pick=rng)

    events = [
        (8, lambda: machine.store(namespace_id=namespace_id(), tokens=tokens())),
        (4, lambda: machine.use(namespace_id=namespace_id(), tokens=tokens())),
        (8, lambda: machine.time_passes(seconds=rng.choice([0.0, 0.1, 2.0, 100.0]))),
        (4, lambda: machine.find(namespace_id=namespace_id(), tokens=tokens())),
        (2, lambda: of_finds(machine.read)),
        (4, lambda: of_finds(machine.release)),
        (1, lambda: machine.discard(pick=rng, namespace_id=namespace_id(), tokens=tokens())),
        (0.3, lambda: machine.clear(namespace_id=rng.choice([None, *NAMESPACE_IDS]), really=0)),
        (8, works),
        (1, dies),
        (3, returns),
    ]
    for _ in range(400):
        rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        machine.it_has_what_it_keeps()
    machine.teardown()

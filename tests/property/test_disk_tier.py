"""The disk tier and what writes to it, against a plain model and a simulated disk that fails at any point.

The disk does what its mover promises: step by step it journals what was given up, writes blocks, journals that they
are there. Killed between any two steps it keeps what the journal says. What must hold: a journaled place holds the
bytes of its name; what was said to be kept is found again, also by the next mover, unless it was given up; what was
discarded or cleared is never found again; what is leased is not overwritten; answers come once.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lower_fakes import FakeMover, FakeReactor
from support import WITHOUT_SHRINKING, Clock

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.admission import admission
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.lower.demotion import Demotion
from vllm_kvtier.store.lower.disk.tier import DiskTier
from vllm_kvtier.store.lower.mover import READY, SET_ASIDE
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.slots import PAGE

UNIT = 4
NOWHERE = 1 << 30
SPACES = [b"A" * HASH, b"B" * HASH]
MEMORY, DISK = 40, 34  # pages
SHAPES = [
    [GroupShape(1, 3)],
    [GroupShape(1, 2), GroupShape(2, 5)],
    [GroupShape(2, 3), GroupShape(1, 3)],
]

Name = tuple[bytes, int, bytes]
tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def chain_of(tokens: list[int]) -> list[bytes]:
    return [bytes(tokens[: n + 1]).ljust(HASH, b"\xff") for n in range(len(tokens))]


class Disk:
    """``bytes``: by page, whose they are. ``journal``: by place; it survives whatever happens."""

    def __init__(self):
        self.bytes: dict[int, Name] = {}
        self.journal: dict[int, m.Move] = {}
        self.spaces: dict[bytes, m.SpaceShape] = {}

    def give_up(self, places: list[int]) -> None:
        for place in places:
            self.journal.pop(place, None)

    def write(self, move: m.Move) -> None:
        pages = range(move.place, move.place + move.pages)
        assert move.place > 0 and pages.stop <= DISK
        for other in self.journal.values():
            apart = other.place >= pages.stop or other.place + other.pages <= pages.start
            assert apart, "a block is overwritten that the journal still names"
        for page in pages:
            self.bytes[page] = name_of(move)

    def put(self, move: m.Move) -> None:
        assert move.space in self.spaces, "the mover was not told of this space"
        self.journal[move.place] = move

    def check(self) -> None:
        for move in self.journal.values():
            assert all(self.bytes[move.place + i] == name_of(move) for i in range(move.pages))


def name_of(x) -> Name:
    return x.space, x.group, x.hash


class Tiers(RuleBasedStateMachine):
    @initialize(shapes=st.sampled_from(SHAPES), how=st.sampled_from(["all", "all", "reuse"]))
    def start(self, shapes, how):
        self.shapes = shapes
        self.groups = [Shape(s.units, s.window, s.slot_pages) for s in shapes]
        self.align = max(s.units for s in shapes)
        self.clock = Clock()
        self.reactor = FakeReactor(self.clock)
        self.index = Index(SlotPool(MEMORY, MEMORY), None, self.clock)
        self.index.grow(MEMORY)
        self.index.connect(1, UNIT, shapes)
        self.tier = DiskTier(
            {"size": DISK * PAGE}, -1, 0, self.reactor, self.shapes_of, clock=self.clock, make_mover=FakeMover
        )
        self.mover: FakeMover = self.tier._mover
        self.demotion = Demotion(
            self.index, [self.tier], 2, lambda tier: admission(how), 1 << 30, 1 << 30, self.reactor, self.clock
        )
        self.index.watch = self.demotion
        self.tier.on_change = self.demotion.tiers_changed
        self.write_of_tier, self.tier.write = self.tier.write, self.write
        self.disk = Disk()
        self.kept: dict[Name, int] = {}  # what the tier says it has, and where; of the mover's life
        # Discarded or cleared, when so many messages had been sent; what is written later is another copy.
        self.forbidden: dict[Name, int] = {}
        self.inbox = 0  # of what the mover was sent, so much was done
        self.heard = 0  # and of so much the places given up were seen here
        self.finds: list = []  # (find, names)
        self.finds_of_old: list = []
        self.dead = False  # and buried
        self.reads: list[dict] = []
        self.writes: list[dict] = []
        self.tier.start()
        self.mover.opened()
        self.reactor.run()

    def shapes_of(self, space):
        return UNIT, self.groups

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
        """What the mover was told is no longer there, is not said to be kept either; leased it was not."""
        for message in self.mover.sent[self.heard :]:
            for place in getattr(message, "gone", []):
                for name in [name for name, at in self.kept.items() if at == place]:
                    assert not any(name in names for _, names in self.finds), "evicted although leased"
                    del self.kept[name]
        self.heard = len(self.mover.sent)

    def names(self, space, hashes, end) -> list[Name]:
        return [
            (space, g, hashes[(j + 1) * s.units - 1]) for g, s in enumerate(self.shapes) for j in range(end // s.units)
        ]

    # -- rules ---------------------------------------------------------------------------------------------------

    @rule(space=st.sampled_from([*SPACES, SPACES[0]]), tokens=tokens_of)
    def store(self, space, tokens):
        hashes = chain_of(tokens)
        items = [
            (g, hashes[(j + 1) * s.units - 1], hashes[j * s.units - 1] if j else bytes(HASH))
            for g, s in enumerate(self.shapes)
            for j in range(len(tokens) // s.units)
        ]
        slots = self.index.reserve(
            1,
            space,
            b"",
            [g for g, _, _ in items],
            b"".join(h for _, h, _ in items),
            b"".join(p for _, _, p in items),
            NOWHERE,
        )
        self.index.commit(1, [slot for slot in slots if slot > 0])

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def use(self, space, tokens):
        found = self.index.lookup(1, space, b"".join(chain_of(tokens)), 0, NOWHERE)
        self.index.release(1, found.lease)

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 100.0]))
    def time_passes(self, seconds):
        self.reactor.run(seconds)
        self.given_up()
        if self.mover.state == SET_ASIDE and not self.dead:  # by the tier, which opens it anew
            self.bury(self.mover.sent[self.inbox :], 0, 0, 0)

    @rule(space=st.sampled_from(SPACES), tokens=tokens_of)
    def find(self, space, tokens):
        hashes, found = chain_of(tokens), []
        self.tier.find(Want(space, UNIT, self.groups, b"".join(hashes), 0), found.append)
        ends = range(len(hashes) // self.align * self.align, 0, -self.align)
        end = next((e for e in ends if all(name in self.kept for name in self.names(space, hashes, e))), 0)
        assert [f.units for f in found] == [end if self.tier.usable else 0]
        if found[0].units:
            self.finds.append((found[0], self.names(space, hashes, end)))

    @precondition(lambda self: getattr(self, "finds", None))
    @rule(pick=st.randoms(use_true_random=False))
    def read(self, pick):
        find, names = pick.choice(self.finds)
        blocks = [
            Block(*name, bytes(HASH), b"", 7 + i, self.shapes[name[1]].slot_pages) for i, name in enumerate(names)
        ]
        read = {"names": names, "answers": [], "sent": len(self.mover.sent)}
        self.reads.append(read)
        self.tier.read(find, blocks, read["answers"].append)

    @precondition(lambda self: getattr(self, "finds", None))
    @rule(pick=st.randoms(use_true_random=False))
    def release(self, pick):
        self.tier.release(self.finds.pop(pick.randrange(len(self.finds)))[0])

    @rule(pick=st.randoms(use_true_random=False), space=st.sampled_from(SPACES), tokens=tokens_of)
    def discard(self, pick, space, tokens):
        names = sorted(self.kept) or self.names(space, chain_of(tokens), len(tokens))
        if names:
            self.forget([pick.choice(names)])

    @rule(space=st.sampled_from([None, *SPACES]), really=st.integers(0, 4))
    def clear(self, space, really):
        if really:
            return
        everything = {name_of(move) for move in self.disk.journal.values()} | set(self.kept)
        everything |= {name_of(b) for w in self.writes if not w["answers"] for b in w["blocks"]}
        mine = [name for name in everything if space in (None, name[0])]
        self.forget(mine, lambda: self.tier.clear(space))

    def forget(self, names: list[Name], how=None) -> None:
        for name in names:
            if how is None:
                self.tier.discard(*name)
            self.kept.pop(name, None)
            self.forbidden[name] = len(self.mover.sent)
        for _, found in self.finds:
            found[:] = [name for name in found if name not in names]
        if how is not None:
            how()
        self.given_up()

    # -- the mover's side ----------------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "mover") and self.inbox < len(self.mover.sent))
    @rule(bad=st.sets(st.integers(0, 6)), fails=st.integers(0, 5), stays=st.integers(0, 3))
    def mover_works(self, bad, fails, stays):
        self.given_up()
        message = self.mover.sent[self.inbox]
        self.inbox += 1
        if isinstance(message, m.Drop):
            self.disk.give_up(message.gone)
            return
        good = [fails > 0 or i not in bad for i in range(len(message.moves))]
        at = next(i for i, (asked, _) in enumerate(self.mover.asked) if asked is message)
        if isinstance(message, m.Write):
            # Of blocks that failed some are there all the same: it was the journal's sync that failed.
            there = [is_good or i % 2 for i, is_good in enumerate(good)]
            puts = [move for move, is_there in zip(message.moves, there, strict=True) if is_there]
            self.do_write(message, 3 if any(good) or stays != 1 else 0, puts)
            before = {name_of(x) for x in message.moves if self.tier.has(*name_of(x))}
            for move, is_good in zip(message.moves, good, strict=True):
                if is_good and name_of(move) in before:
                    self.kept[name_of(move)] = move.place
        else:
            for move in message.moves:
                if name_of(move) in self.kept:
                    assert all(self.disk.bytes[move.place + i] == name_of(move) for i in range(move.pages))
            # What cannot be read is given up, leased or not.
            unread = {name_of(move) for move, is_good in zip(message.moves, good, strict=True) if not is_good}
            for name in unread:
                self.kept.pop(name, None)
                self.forbidden[name] = len(self.mover.sent)
            for _, found in self.finds:
                found[:] = [name for name in found if name not in unread]
        words = {} if all(good) else {"error": "EIO", "writable": bool(stays)}
        self.mover.answer(good, at, **words)
        self.given_up()
        self.disk.check()

    def do_write(self, message: m.Write, steps: int, puts: list[m.Move]) -> None:
        if steps >= 1:
            self.disk.give_up(message.gone)
            self.disk.spaces.update({space.space: space for space in message.spaces})
        if steps >= 2:
            for move in message.moves:
                self.disk.write(move)
        if steps >= 3:
            sent = next(i for i, other in enumerate(self.mover.sent) if other is message)
            for move in puts:
                self.disk.put(move)
                if self.forbidden.get(name_of(move), NOWHERE) <= sent:
                    del self.forbidden[name_of(move)]

    @precondition(lambda self: hasattr(self, "mover") and self.mover.state == READY)
    @rule(done=st.integers(0, 3), steps=st.integers(0, 3), puts=st.integers(0, 6), really=st.integers(0, 2))
    def mover_dies(self, done, steps, puts, really):
        """After so many messages, in the midst of the next one."""
        if really:
            return
        rest = self.mover.sent[self.inbox :]
        unanswered = [x for x in [*self.reads, *self.writes] if not x["answers"]]
        self.mover.set_aside("a fault")
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
        self.inbox = len(self.mover.sent)
        self.mover.reap()
        assert all(len(x["answers"]) == 1 for x in [*self.reads, *self.writes])
        assert all(not any(x["answers"][0]) for x in unanswered)
        self.reads, self.writes = [], []
        self.finds_of_old, self.finds = self.finds, []
        assert not self.tier.usable and not self.tier.writable

    @precondition(lambda self: hasattr(self, "mover") and self.mover.state == SET_ASIDE)
    @rule(pick=st.randoms(use_true_random=False), ordered=st.booleans(), writable=st.integers(0, 5))
    def mover_returns(self, pick, ordered, writable):
        moves = sorted(self.disk.journal.values(), key=lambda move: move.hash.rstrip(b"\xff"))
        if not ordered:
            pick.shuffle(moves)
        told = sum(self.demotion.stats()["disk"][x] for x in ("written", "failed"))
        self.mover.opened(moves, list(self.disk.spaces.values()), writable=bool(writable))
        self.reactor.run()
        if writable and told == sum(self.demotion.stats()["disk"][x] for x in ("written", "failed")):
            here = {name_of(move): move.place for move in moves if self.tier.has(*name_of(move))}
            busy = {name_of(b) for w in self.writes if not w["answers"] for b in w["blocks"]}
            lost = [name for name in self.kept if name not in here]
            evicted = {place for x in self.mover.sent[self.heard :] for place in getattr(x, "gone", [])}
            assert all(self.kept[name] in evicted for name in lost), "said to be kept, and lost"
            assert not (set(here) - busy) & set(self.forbidden), "discarded or cleared, and here again"
            self.kept = {name: place for name, place in here.items() if name not in busy}
        else:
            self.kept = {name_of(move): move.place for move in moves if self.tier.has(*name_of(move))}
        self.heard = len(self.mover.sent)
        for find, _ in self.finds_of_old:
            self.tier.release(find)
        self.dead = False
        self.finds_of_old = []

    # -- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def it_has_what_it_keeps(self):
        if not hasattr(self, "mover") or not self.tier.usable:
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
        under_way = sum(isinstance(asked, m.Read) for asked, _ in self.mover.asked)
        assert self.tier._places.stats().leases == len(self.finds) + under_way
        writing = any(not w["answers"] for w in self.writes)
        assert self.index.held(2)[0] == writing

    def teardown(self):
        """All is answered and released: nothing is leased or reserved anywhere."""
        if not hasattr(self, "mover"):
            return
        self.tier.stop()
        assert all(len(x["answers"]) == 1 for x in [*self.reads, *self.writes])
        assert self.index.held(2) == (0, 0)


Tiers.TestCase.settings = settings(settings.default, max_examples=40, stateful_step_count=40, deadline=None)
TestTiers = Tiers.TestCase


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_long_random_lives(seed):
    """The machine's own rules in long walks; hypothesis alone seldom has the mover die at the right moment."""
    rng = random.Random(seed)
    machine = Tiers()
    machine.start(shapes=rng.choice(SHAPES), how=rng.choice(["all", "all", "reuse"]))

    def tokens():
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]

    def space():
        return rng.choice([SPACES[0], *SPACES])

    def works():
        if machine.inbox < len(machine.mover.sent):
            bad = {rng.randint(0, 6) for _ in range(rng.randint(0, 3))}
            machine.mover_works(bad=bad, fails=rng.randint(0, 5), stays=rng.randint(0, 5))

    def dies():
        if machine.mover.state == READY:
            machine.mover_dies(done=rng.randint(0, 3), steps=rng.randint(0, 3), puts=rng.randint(0, 6), really=0)

    def returns():
        if machine.mover.state == SET_ASIDE:
            machine.mover_returns(pick=rng, ordered=rng.random() < 0.7, writable=rng.randint(0, 9))

    def of_finds(rule):
        if machine.finds:
            rule(pick=rng)

    events = [
        (8, lambda: machine.store(space=space(), tokens=tokens())),
        (4, lambda: machine.use(space=space(), tokens=tokens())),
        (8, lambda: machine.time_passes(seconds=rng.choice([0.0, 0.1, 2.0, 100.0]))),
        (4, lambda: machine.find(space=space(), tokens=tokens())),
        (2, lambda: of_finds(machine.read)),
        (4, lambda: of_finds(machine.release)),
        (1, lambda: machine.discard(pick=rng, space=space(), tokens=tokens())),
        (0.3, lambda: machine.clear(space=rng.choice([None, *SPACES]), really=0)),
        (8, works),
        (1, dies),
        (3, returns),
    ]
    for _ in range(400):
        rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        machine.it_has_what_it_keeps()
    machine.teardown()

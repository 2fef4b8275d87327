"""How far a chain is kept in an object store, found with few requests.

A store answers for one object at a time, in tens of milliseconds, many at once. Blocks of full-attention groups are
written from the first on, so what is there of a chain is taken to be its beginning, and its end is found by asking
many places at a time: two rounds for 60 blocks, three for 1000, four for 18000. What was taken to be there and is not
(objects expire) is noticed when it is read.

Windowed groups need the blocks that tokens after the end can see, and nothing says where those are: of each window a
few blocks are asked for, and where one is missing the end moves before it, a bounded number of times.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH

FIRST_WIDTH = 4  # requests of the first round: most often nothing more is there, and then these are all
WIDTH = 16  # of a later one
SAMPLES = 8  # blocks asked for of a window
EARLIER = 8  # ends before the one at hand that are asked for with it
ROUNDS = 8  # most, for windowed groups

Name = tuple[int, bytes]  # group, hash of a block


@dataclass(frozen=True)
class Chain:
    """``unit_tokens``, ``hashes`` and ``start`` (in units) as in ``moving.Look``."""

    unit_tokens: int
    groups: Sequence[GroupShape]
    hashes: bytes
    start: int

    @property
    def step(self) -> int:
        """Units from one place where blocks of all groups end to the next."""
        return math.lcm(*(group.units for group in self.groups))

    def block(self, group: int, end: int) -> Name:
        """The group's block that ends at unit ``end``."""
        return group, self.hashes[(end - 1) * HASH : end * HASH]

    def first_seen(self, shape: GroupShape, end: int) -> int:
        """First unit of the first block behind ``start`` that a token at unit ``end`` can see of a windowed group."""
        seen = max(0, end * self.unit_tokens - shape.window) // (shape.units * self.unit_tokens)
        return max(self.start, seen * shape.units)


Rounds = Iterator[list[Name]]


def search(chain: Chain, known: Callable[[Name], bool | None]) -> Rounds:
    """A generator: yields names to ask for, at once; wants to be sent whether they are there, in their order;
    returns the unit where the chain ends (``chain.start``: nothing is there). ``known``: what need not be asked."""
    if not chain.groups:
        return chain.start
    step = chain.step
    full = [g for g, shape in enumerate(chain.groups) if shape.window is None]
    windowed = [g for g, shape in enumerate(chain.groups) if shape.window is not None]
    end = chain.start + (len(chain.hashes) // HASH - chain.start) // step * step
    if full and end > chain.start:
        end = yield from _beginning(chain, full, end, known)
    if windowed and end > chain.start:
        end = yield from _before_gaps(chain, windowed, end, known)
    return end


def _beginning(chain: Chain, groups: list[int], end: int, known: Callable[[Name], bool | None]):
    step = chain.step
    there, missing = 0, (end - chain.start) // step + 1  # steps from ``start``: the last known of, the first unknown

    def names(steps: int) -> list[Name]:
        return [chain.block(group, chain.start + steps * step) for group in groups]

    while there + 1 < missing:
        answers = [known(name) for name in names(there + 1)]
        if not all(answers):
            if False in answers:
                missing = there + 1
            break
        there += 1
    width = FIRST_WIDTH
    while missing - there > 1:
        # The next one is always among them: if that is missing, one round says all.
        count = min(max(1, width // len(groups)), missing - there - 1)
        width = WIDTH
        places = sorted({there + 1, *(there + (missing - there) * i // (count + 1) for i in range(1, count + 1))})
        places = [place for place in places if there < place < missing]
        answers = yield [name for place in places for name in names(place)]
        for i, place in enumerate(places):
            if not all(answers[i * len(groups) : (i + 1) * len(groups)]):
                missing = place
                break
            there = place
    return chain.start + there * step


def _before_gaps(chain: Chain, groups: list[int], end: int, known: Callable[[Name], bool | None]):
    step, answers = chain.step, {}

    def look(name: Name) -> bool | None:
        there = answers.get(name)
        return known(name) if there is None else there

    for _ in range(ROUNDS):
        while True:  # back to an end of which nothing is known to be missing
            needed = [(block_end, chain.block(g, block_end)) for g in groups for block_end in _sample(chain, g, end)]
            gap = max((block_end for block_end, name in needed if look(name) is False), default=None)
            if gap is None:
                break
            end = chain.start + (gap - 1 - chain.start) // step * step
            if end <= chain.start:
                return chain.start
        unknown = [name for _, name in needed if look(name) is None]
        if not unknown:
            return end
        for earlier in range(end - step, max(chain.start, end - EARLIER * step - 1), -step):
            unknown += [name for g in groups if look(name := chain.block(g, earlier)) is None]
        unknown = list(dict.fromkeys(unknown))
        answers.update(zip(unknown, (yield unknown), strict=True))
    return chain.start


def _sample(chain: Chain, group: int, end: int) -> list[int]:
    """Where some of the blocks end that a token at unit ``end`` can see: the first, the last, and between."""
    shape = chain.groups[group]
    ends = range(chain.first_seen(shape, end) + shape.units, end + 1, shape.units)
    if len(ends) <= SAMPLES:
        return list(ends)
    return [ends[i * (len(ends) - 1) // (SAMPLES - 1)] for i in range(SAMPLES)]

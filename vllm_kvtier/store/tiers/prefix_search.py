"""Finds the end of a prefix in an object store with few requests.

A request asks for one object and takes tens of milliseconds; many run in parallel. If a prefix needs all blocks of a
group, they are written from the first on, and the stored ones are assumed to be contiguous. The search asks many
positions per round: two rounds for 60 blocks, three for 1000, four for 18000. A read finds blocks that are missing
after all (objects expire).

Of other groups a prefix needs the blocks near its end. The search asks for a sample of them. If a block is missing, the
end moves before it, a bounded number of times.

``end_of`` is for a store that answers for thousands of objects in one request, and evicts any of them.
"""

import math
from collections.abc import Callable, Container, Generator, Sequence
from dataclasses import dataclass

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import GroupShape

FIRST_ROUND_REQUESTS = 4  # requests of the first round; few, because most searches find nothing and end with it
ROUND_REQUESTS = 16  # requests of a later round
WINDOW_SAMPLES = 8  # blocks per window or chunk
EARLIER_ENDS = 8  # earlier ends that are asked for in the same round
MAX_ROUNDS = 8  # for groups that need blocks near the end only

Name = tuple[int, bytes]  # group, hash of a block


@dataclass(frozen=True)
class Prefix:
    """``hash_block_size``, ``groups``, ``hashes`` and ``start`` as in ``process.protocol.Look``."""

    hash_block_size: int
    groups: Sequence[GroupShape]
    hashes: bytes
    start: int

    @property
    def step(self) -> int:
        """Hash blocks between positions where blocks of all groups end."""
        return math.lcm(*(group.hash_blocks_per_block for group in self.groups))

    def block(self, group: int, end: int) -> Name:
        """The group's block that ends at hash block ``end``."""
        return group, self.hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]


Rounds = Generator[list[Name], list[bool], int]


def names_by_position(prefix: Prefix) -> list[Name]:
    """All blocks that some end of the prefix may need."""
    ends = []
    for group, shape in enumerate(prefix.groups):
        step = shape.hash_blocks_per_block
        first = (prefix.start // step + 1) * step
        ends += [(end, group) for end in range(first, len(prefix.hashes) // HASH_BYTES + 1, step)]
    return [prefix.block(group, end) for end, group in sorted(ends)]


def end_of(prefix: Prefix, stored: Container[Name]) -> int:
    """The exact end of the prefix, by what is ``stored``: for stores that can be asked for all blocks at once."""
    if not prefix.groups:
        return prefix.start
    end = len(prefix.hashes) // HASH_BYTES
    for group, shape in enumerate(prefix.groups):
        step = shape.hash_blocks_per_block
        if shape.cache_kind.whole_prefix:
            first = prefix.start // step * step
            ends = range(first + step, end + 1, step)
            missing = next((each for each in ends if prefix.block(group, each) not in stored), end + step)
            end = min(end, missing - step)
    end = prefix.start + max(0, end - prefix.start) // prefix.step * prefix.step
    sparse = [group for group, shape in enumerate(prefix.groups) if not shape.cache_kind.whole_prefix]
    stored_from = [end + 1] * len(prefix.groups)  # per group: what ends from here on, up to a later end, is stored
    while end > prefix.start:  # back to an end without a missing block
        for group in sparse:
            needed = _needed(prefix, group, end)
            unknown = range(needed.start, min(needed.stop, stored_from[group]), needed.step)
            gap = next((each for each in reversed(unknown) if prefix.block(group, each) not in stored), 0)
            if gap:
                break
            stored_from[group] = min(stored_from[group], needed.start)
        else:
            return end
        sparse.remove(group)
        sparse.insert(0, group)  # it may lack the blocks before as well
        end = prefix.start + max(0, gap - 1 - prefix.start) // prefix.step * prefix.step
    return end


def search(prefix: Prefix, known: Callable[[Name], bool | None]) -> Rounds:
    """A generator that yields the names to ask for in one round, is sent whether they exist (in the same order), and
    returns the end of the prefix (``prefix.start``: nothing is stored). ``known``: answers that need no request."""
    if not prefix.groups:
        return prefix.start
    step = prefix.step
    full = [g for g, shape in enumerate(prefix.groups) if shape.cache_kind.whole_prefix]
    sparse = [g for g, shape in enumerate(prefix.groups) if not shape.cache_kind.whole_prefix]
    end = prefix.start + (len(prefix.hashes) // HASH_BYTES - prefix.start) // step * step
    if full and end > prefix.start:
        end = yield from _beginning(prefix, full, end, known)
    if sparse and end > prefix.start:
        end = yield from _before_gaps(prefix, sparse, end, known)
    return end


def _beginning(prefix: Prefix, groups: list[int], end: int, known: Callable[[Name], bool | None]) -> Rounds:
    step = prefix.step
    there, missing = 0, (end - prefix.start) // step + 1  # steps from ``start``: the last found, the first missing

    def names(steps: int) -> list[Name]:
        return [prefix.block(group, prefix.start + steps * step) for group in groups]

    while there + 1 < missing:
        cached = [known(name) for name in names(there + 1)]
        if not all(cached):
            if False in cached:
                missing = there + 1
            break
        there += 1
    width = FIRST_ROUND_REQUESTS
    while missing - there > 1:
        # Always includes the next position: if that is missing, one round is enough.
        count = min(max(1, width // len(groups)), missing - there - 1)
        width = ROUND_REQUESTS
        steps = sorted({there + 1, *(there + (missing - there) * i // (count + 1) for i in range(1, count + 1))})
        steps = [each for each in steps if there < each < missing]
        answers = yield [name for each in steps for name in names(each)]
        for i, each in enumerate(steps):
            if not all(answers[i * len(groups) : (i + 1) * len(groups)]):
                missing = each
                break
            there = each
    return prefix.start + there * step


def _before_gaps(prefix: Prefix, groups: list[int], end: int, known: Callable[[Name], bool | None]) -> Rounds:
    step, answers = prefix.step, dict[Name, bool]()

    def look(name: Name) -> bool | None:
        there = answers.get(name)
        return known(name) if there is None else there

    for _ in range(MAX_ROUNDS):
        while True:  # back to an end without a known gap
            needed = [(block_end, prefix.block(g, block_end)) for g in groups for block_end in _sample(prefix, g, end)]
            gap = max((block_end for block_end, name in needed if look(name) is False), default=None)
            if gap is None:
                break
            end = prefix.start + (gap - 1 - prefix.start) // step * step
            if end <= prefix.start:
                return prefix.start
        unknown = [name for _, name in needed if look(name) is None]
        if not unknown:
            return end
        for earlier in range(end - step, max(prefix.start, end - EARLIER_ENDS * step - 1), -step):
            unknown += [name for g in groups if look(name := prefix.block(g, earlier)) is None]
        unknown = list(dict.fromkeys(unknown))
        answers.update(zip(unknown, (yield unknown), strict=True))
    return prefix.start


def _sample(prefix: Prefix, group: int, end: int) -> list[int]:
    """Ends of a sample of the blocks that a prefix up to ``end`` needs: the first, the last, and some between."""
    ends = _needed(prefix, group, end)
    if len(ends) <= WINDOW_SAMPLES:
        return list(ends)
    return [ends[i * (len(ends) - 1) // (WINDOW_SAMPLES - 1)] for i in range(WINDOW_SAMPLES)]


def _needed(prefix: Prefix, group: int, end: int) -> range:
    """Ends of the blocks that a prefix up to ``end`` needs."""
    shape = prefix.groups[group]
    first = shape.first_block(prefix.hash_block_size, prefix.start, end)
    return range((first + 1) * shape.hash_blocks_per_block, end + 1, shape.hash_blocks_per_block)

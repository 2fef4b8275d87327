"""A trace for many nodes: copies of its conversations, and its prompts as pieces.

Each copy has block ids of its own. Only the blocks that all prompts of the trace begin with are common to all copies.
"""

import itertools

from vllm_kvtier.plan.trace import Requests

COPY_SECONDS = 60.0  # a request's copies are spread over so long


def num_common(requests: Requests) -> int:
    """Blocks that all prompts begin with."""
    columns = zip(*(ids for _, ids in requests), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def scatter(number: int) -> float:
    """Of [0, 1), by Knuth's multiplicative hash."""
    return (number * 2654435761 + 974711) % (1 << 32) / (1 << 32)


def sample(requests: Requests, share: float) -> Requests:
    """A share of the conversations: of what follows the blocks that all prompts begin with."""
    common = num_common(requests)
    return [(when, ids) for when, ids in requests if scatter(ids[common] if len(ids) > common else -1) < share]


def ideal(requests: Requests, copies: float) -> float:
    """Share of blocks that one cache without limit would find."""
    common, hits, total, done = num_common(requests), 0, 0, 0
    for part, times in ((requests, int(copies)), (sample(requests, copies % 1), 1)):
        if not times or not part:
            continue
        seen: set[int] = set()
        for _, ids in part:
            hits += times * sum(1 for _ in itertools.takewhile(seen.__contains__, ids))
            seen.update(ids)
        hits += common * (times if done else times - 1)
        total += times * sum(len(ids) for _, ids in part)
        done += times
    return hits / total if total else 0.0


class Prompts:
    """Requests as pieces: ``keys`` and ``sizes`` of each. A piece ends where prompts branch or end, and after ``grain``
    blocks. Copy n adds n * ``stride`` to the keys from ``common`` on."""

    def __init__(self, requests: Requests, grain: int):
        shared = num_common(requests)
        ends = {ids[-1] for _, ids in requests}
        if shared:
            ends.add(requests[0][1][shared - 1])
        following: dict[int, int] = {}
        for _, ids in requests:
            ends.update(a for a, b in itertools.pairwise(ids) if following.setdefault(a, b) != b)
        names: dict[int, int] = {}
        self.keys: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self.common = 0
        for _, ids in requests:
            keys, sizes, begun = [], [], 0
            for at, block in enumerate(ids, 1):
                if block in ends or at - begun == grain:
                    keys.append(names.setdefault(ids[begun], len(names)))
                    sizes.append(at - begun)
                    begun = at
                    if at == shared:
                        self.common = len(keys)
            self.keys.append(keys)
            self.sizes.append(sizes)
        self.stride = len(names)


def arrivals(requests: Requests, copies: float) -> list[tuple[float, int, int]]:
    """(seconds, copy, index of the request), sorted."""
    whole = int(copies)
    found = [(at, 0, i) for i, (at, _) in enumerate(requests)] if whole else []
    for copy in range(1, whole):
        offset = COPY_SECONDS * scatter(copy)
        found += [(at + offset, copy, i) for i, (at, _) in enumerate(requests)]
    part = {id(ids) for _, ids in sample(requests, copies % 1)}
    offset = COPY_SECONDS * scatter(whole) if whole else 0.0
    found += [(at + offset, whole, i) for i, (at, ids) in enumerate(requests) if id(ids) in part]
    found.sort()
    return found

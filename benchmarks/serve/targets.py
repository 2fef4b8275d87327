"""Where requests go: servers, and ranks inside of them; and which of them a conversation's next turn goes to."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# vLLM's servers with several data-parallel ranks send a request to the rank that this header names.
RANK_HEADER = "X-data-parallel-rank"

POLICIES = {
    "hop": "a conversation's next turn goes to the next one",
    "sticky": "a conversation stays where it began",
    "random": "each turn goes to any",
    "round-robin": "requests take turns, whichever conversation they belong to",
}

# (conversation, turn) -> index of a target
Policy = Callable[[int, int], int]


@dataclass(frozen=True)
class Target:
    """``rank``: of a server that has several, else None."""

    base_url: str
    rank: int | None = None
    name: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.rank is None else {RANK_HEADER: str(self.rank)}


def targets_of(urls: Sequence[str], ranks: int = 1) -> list[Target]:
    """One for each rank of each server; ``ranks`` 1: the servers decide by themselves."""
    made = []
    for url in urls:
        for rank in range(ranks):
            made.append(Target(url.rstrip("/"), rank if ranks > 1 else None, str(len(made))))
    return made


def policy(name: str, count: int, seed: int) -> Policy:
    """Raises KeyError for an unknown name."""
    if name == "hop":
        return lambda conversation, turn: (conversation + turn) % count
    if name == "sticky":
        return lambda conversation, turn: conversation % count
    if name == "random":
        # Of the turn, not of the order in which turns happen to be asked: the same in every run.
        return lambda conversation, turn: random.Random(f"{seed} {conversation} {turn}").randrange(count)
    if name == "round-robin":
        asked = iter(range(1 << 62))
        return lambda conversation, turn: next(asked) % count
    raise KeyError(name)

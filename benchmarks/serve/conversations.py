"""Conversations: their text is drawn once, from a seed, and is the same for every system that plays them.

The default ones are like ShareGPT's in that lengths of questions and answers are lognormal, with a system prompt that
all share and turn upon turn whose prompt has the whole history. The tokens are random: nothing is ever shared
that is not meant to be.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from .lengths import Lengths

# As many tokens as words, for tokenizers that know English; which they are does not matter.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week month system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


@dataclass(frozen=True)
class Turn:
    """``new``: what the user adds, token ids. ``output``: most tokens of the answer. ``due``: seconds after the start
    at which it is asked, where a trace says so. ``pause``: seconds before it is asked, after the answer before it; the
    conversation counts as one that is asked meanwhile."""

    new: list[int]
    output: int
    due: float | None = None
    pause: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """``opening``: token ids before the first turn. ``answers``: the replies when it was first played, by
    turn; playing it again goes on from those, so that its prompts are the same to the token."""

    number: int
    opening: list[int]
    turns: list[Turn]
    answers: dict[int, list[int] | str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """All of it, if every answer is as long as it may be."""
        return len(self.opening) + sum(len(turn.new) + turn.output for turn in self.turns)

    def unplayed(self) -> "Conversation":
        """The same with answers of its own: for another engine, which may say something else."""
        return Conversation(self.number, self.opening, self.turns)


@dataclass(frozen=True)
class Shape:
    """Of synthetic conversations. ``system``: tokens that all begin with; ``context``: tokens after that which are the
    conversation's own; ``longest``: no conversation grows beyond so many tokens (0: no limit)."""

    system: int
    context: Lengths
    turns: Lengths
    input: Lengths
    output: Lengths
    longest: int = 0


def synthetic(shape: Shape, count: int, seed: int, vocabulary: int) -> list[Conversation]:
    """Each conversation depends on the seed and its number alone: more of them leave the first ones as they are.

    Raises ValueError where not even a first turn fits into ``shape.longest``.
    """
    system = tokens(random.Random(f"{seed} system"), shape.system, vocabulary)
    return [_one(shape, system, number, random.Random(f"{seed} {number}"), vocabulary) for number in range(count)]


def _one(shape: Shape, system: list[int], number: int, rng: random.Random, vocabulary: int) -> Conversation:
    opening = system + tokens(rng, shape.context.draw(rng), vocabulary)
    turns: list[Turn] = []
    total = len(opening)
    for _ in range(max(1, shape.turns.draw(rng))):
        turn = Turn(tokens(rng, max(1, shape.input.draw(rng)), vocabulary), max(1, shape.output.draw(rng)))
        total += len(turn.new) + turn.output
        if shape.longest and total > shape.longest:
            break
        turns.append(turn)
    if not turns:
        raise ValueError(
            f"conversation {number} has {total} tokens after one turn, over the limit of {shape.longest}: give shorter "
            "--system, --context, --input or --output, or a larger --max-len"
        )
    return Conversation(number, opening, turns)


def tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    """Random ids; not the first ones, which mean something to many models."""
    return rng.choices(range(min(1000, vocabulary // 2), vocabulary), k=count)


def as_text(ids: Sequence[int]) -> str:
    """Words instead, where prompts have to be text: about as many tokens, and as different."""
    return " ".join(WORDS[(i // len(WORDS)) % len(WORDS)] + " " + WORDS[i % len(WORDS)] for i in ids[::2])

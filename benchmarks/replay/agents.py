"""Agents: prompts that grow by what tools return, with a system prompt that all sessions share.

A session is a conversation of ``serve``: its task, then turn upon turn an answer (a tool call) and the tool's output.
Between an answer and the next prompt the tool runs. Every session's numbers depend on the seed and its number alone.
"""

import random
from dataclasses import dataclass

from serve.conversations import Conversation, Turn, tokens
from serve.lengths import Lengths


@dataclass(frozen=True)
class Agents:
    """``system``: tokens that all begin with; ``task``, ``tool``, ``answer``: tokens; ``turns``: prompts of a session;
    ``pause``: mean seconds that a tool runs (exponential); ``longest``: a session ends before it grows beyond it."""

    system: int
    task: Lengths
    tool: Lengths
    answer: Lengths
    turns: Lengths
    pause: float
    longest: int

    def sessions(self, count: int, vocabulary: int, salt: object) -> list[Conversation]:
        """``count`` sessions, which begin within twice the mean pause. The same ``salt`` makes the same ones. Raises
        ValueError where not even the first prompt fits."""
        system = tokens(random.Random(f"{salt} system"), self.system, vocabulary)
        return [self._session(number, system, vocabulary, salt) for number in range(count)]

    def _session(self, number: int, system: list[int], vocabulary: int, salt: object) -> Conversation:
        rng = random.Random(f"{salt} session {number}")
        lengths = random.Random(f"session {number}")  # not of the salt: every level has the same shapes
        turns, total = [], self.system
        for turn in range(max(1, self.turns.draw(lengths))):
            new = max(1, (self.tool if turn else self.task).draw(lengths))
            answer = max(1, self.answer.draw(lengths))
            pause = lengths.expovariate(1 / self.pause) if self.pause else 0.0
            total += new + answer
            if total > self.longest:
                break
            # The first ones are spread out evenly: agents do not begin all at once.
            pause = pause if turn else lengths.uniform(0, 2 * self.pause)
            turns.append(Turn(tokens(rng, new, vocabulary), answer, pause=pause))
        if not turns:
            raise ValueError(f"an agent's first prompt has {total} tokens, over the limit of {self.longest}")
        return Conversation(number, system, turns)

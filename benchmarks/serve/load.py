"""Plays conversations: which turn is asked when and where, and what came of it.

Turns of a conversation follow each other, since each prompt holds the answers before it. Which conversation is next:

  closed       with a concurrency limit alone, the turn of the conversation that has waited longest, as soon as there is
               room; a new conversation where none waits. ``active`` more conversations than may be asked at once make
               each of them wait for the others between its turns, as users that read do.
  open         with a rate, requests leave at the times of a Poisson process, whatever became of those before; the
               concurrency limit is still kept, and what it delays is reported.
  trace        conversations with a time of their own begin then.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .client import Reply, ask, encode
from .conversations import Conversation, as_text
from .targets import Policy, Target

FOUND = 0.9  # of a history: what is missing then is a block or two


@dataclass(frozen=True)
class Limits:
    """``concurrency``: most requests at once; ``active``: most conversations begun and not over, 0: as it comes;
    ``rate``: requests a second, 0: as soon as there is room; ``seconds``: no turn is asked after so long, 0: all."""

    concurrency: int
    active: int = 0
    rate: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Form:
    """What requests look like. ``body``, ``headers``: added to each."""

    model: str
    chat: bool = False
    ignore_eos: bool = True
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """Of one request. Times in seconds, ``start`` from the beginning of the pass. ``moved``: asked of another target
    than the turn before (None: there was none). ``late``: after the time at which it was due. ``history``: tokens of
    the prompt that earlier turns had, 0 if that is not known."""

    conversation: int
    turn: int
    target: int
    moved: bool | None
    start: float
    late: float
    prompt_tokens: int
    output_tokens: int
    ttft: float | None = None
    latency: float | None = None
    itl: float | None = None
    longest_gap: float | None = None
    cached_tokens: int | None = None
    error: str = ""
    history: int = 0

    @property
    def found(self) -> bool:
        """Whether the server had nearly all of what earlier turns were made of, wherever it was."""
        return bool(self.history and self.cached_tokens and self.cached_tokens >= FOUND * self.history)


@dataclass
class _Game:
    """A conversation under way."""

    conversation: Conversation
    turn: int = 0
    target: int | None = None
    history: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.turn == len(self.conversation.turns)


class Load:
    """One pass over the conversations. ``begun``, ``ended``: time.perf_counter; ``given_up``: turns that were not asked
    since one before them failed; ``left_out``: those for which there was no time."""

    def __init__(
        self,
        conversations: Iterable[Conversation],
        targets: list[Target],
        choose: Policy,
        limits: Limits,
        form: Form,
        seed: int = 0,
        seen: Callable[[Record], None] = lambda record: None,
    ):
        self._new = deque(_Game(conversation) for conversation in conversations)
        self._targets, self._choose, self._limits, self._form = targets, choose, limits, form
        self._rng, self._seen = random.Random(f"{seed} arrivals"), seen
        self._timed = any(game.conversation.turns[0].due is not None for game in self._new)
        if self._timed:
            self._new = deque(sorted(self._new, key=_due))
        self._waiting: deque[_Game] = deque()
        self._asked: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._defect: BaseException | None = None
        self.records: list[Record] = []
        self.given_up = self.left_out = 0
        self.begun = self.ended = 0.0

    async def play(self, session: aiohttp.ClientSession) -> list[Record]:
        """Until every turn was answered, failed or given up."""
        self.begun = due = time.perf_counter()
        try:
            while (game := await self._next()) is not None:
                if self._timed and not game.turn:
                    due = self.begun + _due(game)
                elif self._limits.rate:
                    due += self._rng.expovariate(self._limits.rate)
                else:
                    due = time.perf_counter()
                await self._until(due)
                if self._limits.rate or self._timed:
                    await self._room()  # the wait has let others finish, none begin; but answers may still be under way
                if self._out_of_time():
                    self._waiting.append(game)
                    break
                self._start(game, due, session)
            while self._asked:
                await self._change()
        finally:
            for task in self._asked:
                task.cancel()
            await asyncio.gather(*self._asked, return_exceptions=True)
        self.ended = max((self.begun + r.start + (r.latency or 0.0) for r in self.records), default=self.begun)
        self.left_out += sum(len(g.conversation.turns) - g.turn for g in (*self._waiting, *self._new))
        return self.records

    async def _next(self) -> _Game | None:
        """Whose turn it is; None when there is nothing left to ask, or no time."""
        while not self._out_of_time():
            if self._limits.rate or self._timed or self._has_room():
                fresh = bool(self._new) and not self._full()
                if fresh and (self._limits.active or not self._waiting):
                    return self._new.popleft()
                if self._waiting:
                    return self._waiting.popleft()
                if not self._asked and not self._new:
                    return None
            await self._change()
        return None

    def _full(self) -> bool:
        return bool(self._limits.active) and len(self._asked) + len(self._waiting) >= self._limits.active

    def _has_room(self) -> bool:
        return len(self._asked) < self._limits.concurrency

    async def _room(self) -> None:
        while not self._has_room():
            await self._change()

    async def _change(self) -> None:
        """Until an answer is over."""
        self._changed.clear()
        await self._changed.wait()
        if self._defect is not None:
            raise self._defect

    async def _until(self, due: float) -> None:
        while (left := due - time.perf_counter()) > 0:
            await asyncio.sleep(left)

    def _out_of_time(self) -> bool:
        seconds = self._limits.seconds
        return bool(seconds) and time.perf_counter() - self.begun >= seconds

    def _start(self, game: _Game, due: float, session: aiohttp.ClientSession) -> None:
        task = asyncio.ensure_future(self._turn(game, due, session))
        self._asked.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            self._defect = self._defect or task.exception()  # of ours: what servers do is in the records
        self._changed.set()

    async def _turn(self, game: _Game, due: float, session: aiohttp.ClientSession) -> None:
        conversation, number = game.conversation, game.turn
        turn = conversation.turns[number]
        if turn.pause:
            await asyncio.sleep(turn.pause)
            due = time.perf_counter()
            if self._out_of_time():
                self._waiting.append(game)
                return
        chosen = self._choose(conversation.number, number)
        target, before = self._targets[chosen], game.target
        known = len(game.history) if number else 0
        path, body, asked = self._request(game)
        headers = {**self._form.headers, **target.headers, "X-Request-Id": f"c{conversation.number}-t{number}"}
        reply = await ask(session, f"{target.base_url}/v1/{path}", encode(body), headers)
        game.turn, game.target = number + 1, chosen
        record = _record(reply, conversation.number, number, chosen, before, asked, self.begun, due, known)
        self.records.append(record)
        self._seen(record)
        if reply.error:
            self.given_up += len(conversation.turns) - game.turn
            return
        # What was answered when it was first played, or now.
        answer = conversation.answers.setdefault(number, reply.text if self._form.chat else reply.token_ids)
        if self._form.chat:
            game.messages.append({"role": "assistant", "content": answer})
        elif answer:
            game.history += answer
        else:  # a server that does not say its tokens: then something of the same length, the same in every pass
            game.history += random.Random(f"answer {conversation.number} {number}").choices(turn.new, k=turn.output)
        if not game.over:
            self._waiting.append(game)

    def _request(self, game: _Game) -> tuple[str, dict[str, Any], int]:
        """Path, body and prompt tokens (of chats about), with the turn's question in the game's history."""
        conversation, turn = game.conversation, game.conversation.turns[game.turn]
        form = self._form
        body: dict[str, Any] = {
            "model": form.model, "max_tokens": turn.output, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": form.ignore_eos,
        }  # fmt: skip
        if form.chat:
            if not game.turn and conversation.opening:
                game.messages.append({"role": "system", "content": as_text(conversation.opening)})
            game.messages.append({"role": "user", "content": as_text(turn.new)})
            words = sum(len(message["content"].split()) for message in game.messages)
            return "chat/completions", {**body, "messages": game.messages, **form.body}, words
        if not game.turn:
            game.history += conversation.opening
        game.history += turn.new
        return "completions", {**body, "prompt": game.history, "return_token_ids": True, **form.body}, len(game.history)


def _due(game: _Game) -> float:
    return game.conversation.turns[0].due or 0.0


def _record(
    reply: Reply, conversation: int, turn: int, target: int, before: int | None, asked: int, begun: float, due: float,
    history: int,
) -> Record:  # fmt: skip
    known: dict[str, Any] = {}
    if not reply.error:
        known = {
            "ttft": reply.ttft, "latency": reply.latency, "itl": reply.itl, "longest_gap": reply.longest_gap,
            "cached_tokens": reply.cached_tokens,
        }  # fmt: skip
    return Record(
        conversation, turn, target, None if before is None else before != target, reply.start - begun,
        max(0.0, reply.start - due), reply.prompt_tokens or asked, reply.output_tokens, error=reply.error,
        history=history, **known,
    )  # fmt: skip

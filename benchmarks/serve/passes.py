"""The same load several times: cold, then warm, on each variant; repeated with other conversations.

A round has new conversations. Each variant runs them once (cold), then again with the same tokens (warm). Variants
alternate pass by pass, in another order each round, so that noise affects them alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
from rich.console import Console

from . import counters
from .control import Hands
from .conversations import Conversation
from .engines import Running
from .load import Form, Limits, Load, Record
from .meters import Meters
from .progress import Bar, line
from .stats import summary
from .targets import policy

NAMES = ("cold", "warm")  # of a round's passes; any more are warm3 and so on


@dataclass(frozen=True)
class Plan:
    """``fresh``: conversations of a round; of -1, to warm up with. ``reset``: empty the engines' own prefix caches
    before each pass."""

    rounds: int
    passes: int
    policy: str
    limits: Limits
    seed: int
    fresh: Callable[[int], list[Conversation]]
    reset: bool = False
    deadline: float = float("inf")  # by time.monotonic: no pass is begun after it


@dataclass
class PassResult:
    variant: str
    round: int
    name: str
    records: list[Record]
    document: dict  # as it is written


@dataclass(frozen=True)
class Player:
    """A variant with all that is needed to ask it."""

    running: Running
    hands: Hands
    form: Form

    @property
    def name(self) -> str:
        return self.running.variant.name


def pass_name(number: int) -> str:
    return NAMES[number] if number < len(NAMES) else f"warm{number}"


async def play(
    players: Sequence[Player], plan: Plan, session: aiohttp.ClientSession, console: Console,
    done: Callable[[PassResult], None],
) -> list[PassResult]:
    """``done`` is called after each pass. Raises ServerFailed or NoMetrics if a server is gone between passes; inside
    of a pass that is an error of each request."""
    results: list[PassResult] = []
    for player in players:
        await _warm_up(player, plan, session)
    for number in range(plan.rounds):
        said = plan.fresh(number)
        own = {player.name: [conversation.unplayed() for conversation in said] for player in players}
        for which in range(plan.passes):
            for player in _order(players, number, which):
                if time.monotonic() > plan.deadline:
                    console.print(f"[yellow]Out of time[/yellow]: left out from {pass_name(which)}, round {number} on.")
                    return results
                result = await _one(player, plan, number, which, own[player.name], session, console)
                results.append(result)
                done(result)
    return results


def _order(players: Sequence[Player], number: int, which: int) -> list[Player]:
    """Each is first as often as the others."""
    turned = number % len(players)
    order = [*players[turned:], *players[:turned]]
    return order[::-1] if which % 2 else order


async def _one(
    player: Player, plan: Plan, number: int, which: int, conversations: list[Conversation],
    session: aiohttp.ClientSession, console: Console,
) -> PassResult:
    targets, name = player.running.targets, pass_name(which)
    if plan.reset:
        for target in targets:
            await player.hands.forget(target)
    before = await _still(player)
    choose = policy(plan.policy, len(targets), plan.seed + number)
    title = f"{player.name}, {name}" + (f", round {number + 1} of {plan.rounds}" if plan.rounds > 1 else "")
    with Bar(console, title, sum(len(c.turns) for c in conversations)) as bar:
        load = Load(conversations, targets, choose, plan.limits, player.form, plan.seed + number, bar.seen)
        async with Meters() as meters:
            records = await load.play(session)
    counted = counters.difference(before, await _still(player))
    document = {
        "variant": player.name, "round": number, "pass": name, **summary(records, load.ended - load.begun),
        "given_up": load.given_up, "left_out": load.left_out, "client": meters.result(),
        "tokens": counters.tokens(counters.total(counted)),
        "engines": {engine: {"tokens": counters.tokens(c), "counters": c} for engine, c in counted.items()},
    }  # fmt: skip
    console.print(line(title, document), markup=False, highlight=False, soft_wrap=True)
    return PassResult(player.name, number, name, records, document)


async def _still(player: Player) -> counters.Counts:
    """The engines' counters after all pending stores have ended, so that they do not disturb the next pass."""
    counts: counters.Counts = {}
    for target in player.running.targets:
        counts |= await player.hands.settle(target)
    return counts


async def _warm_up(player: Player, plan: Plan, session: aiohttp.ClientSession) -> None:
    """Send a long prompt to each engine, because the first one has extra costs."""
    for number in range(len(player.running.targets)):
        said = [conversation.unplayed() for conversation in plan.fresh(-1)]
        limits = Limits(plan.limits.concurrency)
        load = Load(said, player.running.targets, lambda *_, to=number: to, limits, player.form)
        for record in await load.play(session):
            if record.error:
                raise RuntimeError(f"{player.name} fails at its first requests: {record.error}")

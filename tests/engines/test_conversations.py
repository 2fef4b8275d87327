"""Greedy answers along prefill, decode and prefill engine equal a single engine's, token for token, whatever happens in
between."""

import asyncio
import random

import pytest
from engine_client import (
    PREFILL,
    SYSTEM,
    WORDS,
    Driver,
    assert_same,
    facts,
    known_from,
    question,
    random_tokens,
    told,
    with_sources,
)
from engine_fixtures import MAX_LENGTH, Fleet

pytestmark = pytest.mark.usefixtures("fleet_is_idle_afterwards")

# Around one block, around several, tiny, and near the longest.
LENGTHS = (1, 2, 5, 17, 31, 32, 33, 63, 64, 65, 96, 200, 511, 512, 513, 1000, 2900)
ANSWER = 70  # some answers fill blocks that only the decode engine has
ROOM = MAX_LENGTH - ANSWER - 64


class Tally:
    """What happened over all conversations: that nothing was pulled must not pass for right answers."""

    def __init__(self) -> None:
        self.turns = self.to_decode = self.to_prefill = self.aborts = self.edits = 0


class TokenTalk:
    """A conversation as token ids."""

    def __init__(self, rng: random.Random):
        self.rng, self.prompt = rng, []

    def say(self) -> bool:
        length = self.rng.choice(LENGTHS)
        if len(self.prompt) + length > ROOM:
            return False
        self.prompt = self.prompt + random_tokens(self.rng, length)
        return True

    def hear(self, reply) -> None:
        self.prompt = self.prompt + reply.tokens

    def edit(self) -> None:
        tokens, at = list(self.prompt), self.rng.randrange(len(self.prompt))
        match self.rng.randrange(3):
            case 0:
                tokens[at] = 300 + (tokens[at] + 1) % 1000
            case 1:
                del tokens[at : at + self.rng.randrange(1, 70)]
            case 2:
                tokens = tokens[at:] + tokens[:at]
        self.prompt = tokens or self.prompt


class Chat:
    """A conversation as messages: codes are given, and asked for later."""

    def __init__(self, rng: random.Random):
        self.rng, self.prompt, self.codes = rng, [SYSTEM], {}

    def say(self) -> bool:
        length = sum(len(m["content"]) for m in self.prompt) // 3  # tokens, roughly
        new = facts(self.rng, self.rng.choice((1, 2, 8, 30)))
        filler = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.choice((0, 0, 5, 400))))
        text = " ".join([told(new), filler]).strip()
        if length + len(text) // 3 > ROOM // 2:
            return False
        self.codes |= new
        asked = question(self.rng.choice(list(self.codes)))
        self.prompt = [*self.prompt, {"role": "user", "content": f"{text} {asked}"}]
        return True

    def hear(self, reply) -> None:
        self.prompt = [*self.prompt, {"role": "assistant", "content": reply.text}]

    def edit(self) -> None:
        messages, at = list(self.prompt), self.rng.randrange(1, len(self.prompt))
        match self.rng.randrange(3):
            case 0:
                messages[at] = {**messages[at], "content": messages[at]["content"].replace("1", "7", 1) + "."}
            case 1 if len(messages) > 3:
                del messages[at]
            case 2:
                messages[1], messages[at] = messages[at], messages[1]
        self.prompt = messages


async def converse(driver: Driver, fleet: Fleet, rng: random.Random, tally: Tally) -> None:
    talk = rng.choice((TokenTalk, Chat))(rng)
    salt = {"cache_salt": f"tenant {rng.randrange(3)}"} if rng.random() < 0.3 else {}
    known = None  # the decode engine's last params
    for _ in range(4):
        if not talk.say():
            return
        if known and rng.random() < 0.4:
            talk.edit()
            tally.edits += 1
        prompt = talk.prompt
        # Routers differ in what they tell the prefill engine: where to look, the decode engine's own params as they
        # came, or nothing.
        told_p = rng.choice((with_sources(fleet.decode), known or PREFILL, PREFILL))
        if rng.random() < 0.25:
            await driver.disconnect(fleet.prefill, prompt, rng.uniform(0, 0.5), told_p)
            tally.aborts += 1
        first = await driver.prefill(fleet.prefill, prompt, told_p, **salt)
        if rng.random() < 0.25:
            await driver.disconnect(fleet.decode, prompt, rng.uniform(0, 0.5), first.params)
            tally.aborts += 1
        reply = await driver.ask(fleet.decode, prompt, rng.choice((1, 2, 8, ANSWER)), first.params, **salt)
        want = await driver.truth(prompt, len(reply.tokens), **salt)
        what = f"{type(talk).__name__} of {len(want.prompt)} tokens, P {first.report}, D {reply.report}"
        assert_same(reply, want, what)
        assert_same(first, want.head(1), what)
        talk.hear(reply)
        known = known_from(reply)
        tally.turns += 1
        tally.to_decode += reply.pulled > 0
        tally.to_prefill += first.pulled > 0


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.parametrize("seed", range(4))
async def test_random_conversations_answer_as_without_connector(fleet, driver, tally, seed):
    """Six at a time, with edited histories and clients that leave at any moment."""
    rngs = [random.Random(f"conversation {seed} {i}") for i in range(6)]
    before = tally.turns
    await asyncio.gather(*(converse(driver, fleet, rng, tally) for rng in rngs))
    assert tally.turns - before >= 8


def test_random_conversations_covered_aborts_edits_and_pulls(tally):
    if tally.turns < 40:
        pytest.skip("the conversations above did not all run")
    assert tally.aborts >= 10 and tally.edits >= 10, vars(tally)
    assert tally.to_decode >= tally.turns // 2, vars(tally)
    # Seven or eight; fewer where a turn takes as long as blocks are retained.
    assert tally.to_prefill >= 1, vars(tally)


async def test_preempted_pulled_requests_answer_correctly(fleet, driver):
    """More long answers than the decode engine has blocks for: pulled requests lose their blocks and are computed
    again."""
    rng = random.Random("preempted")
    before = await driver.metric(fleet.decode, "vllm:num_preemptions_total")
    # On the way through the prefill engine, so that its hand-offs are not dropped for room
    limit = asyncio.Semaphore(4)

    async def one(length: int):
        prompt = random_tokens(rng, length)
        async with limit:
            first = await driver.prefill(fleet.prefill, prompt)
        return prompt, await driver.ask(fleet.decode, prompt, 150, first.params)

    lengths = [640, 641, 671, 672, 673, 700, 704, 640]
    # Whether they meet in the decode engine, so that it runs out of blocks, is a matter of milliseconds
    for _ in range(3):
        leaving = [driver.disconnect(fleet.decode, random_tokens(rng, 300), rng.uniform(0.5, 2.0)) for _ in range(2)]
        *answers, _, _ = await asyncio.gather(*map(one, lengths), *leaving)
        if await driver.metric(fleet.decode, "vllm:num_preemptions_total") > before:
            break
    assert await driver.metric(fleet.decode, "vllm:num_preemptions_total") > before, "nothing was preempted"
    assert sum(reply.pulled > 0 for _, reply in answers) >= 2, "hardly anything was pulled"
    for pair in (answers[i : i + 3] for i in range(0, len(answers), 3)):
        await asyncio.gather(*(driver.assert_right(reply, prompt, reply.report) for prompt, reply in pair))


async def test_prefill_engine_pulls_evicted_prefix_from_decode_engine(fleet, driver):
    rng = random.Random("evicted")
    prompt = random_tokens(rng, 500)
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt, 40)
    for _ in range(2):
        await driver.ask(fleet.prefill, random_tokens(rng, 3000), 1)
    assert (await driver.query(fleet.prefill, prompt)).gpu_cache == 0, "P still has it"
    longer = [*prompt, *reply.tokens, *random_tokens(rng, 50)]
    first, second = await driver.hand_off(fleet.prefill, fleet.decode, longer, params=with_sources(fleet.decode))
    assert first.pulled == (500 + 40 - 1) // 32 * 32, first.report
    await driver.assert_right(second, longer)


@pytest.mark.parametrize("change", ["edit", "strip", "reorder"])
async def test_changed_history_pulls_only_common_prefix(fleet, driver, change):
    """The prefill engine takes from the decode engine what is still the same, and not one block more."""
    rng = random.Random(f"history {change}")
    turns = [random_tokens(rng, 96) for _ in range(4)]
    await driver.ask(fleet.decode, sum(turns, []), 8)
    same, changed = {
        "edit": (160, [*turns[0], *turns[1][:70], 7, *turns[1][71:], *turns[2], *turns[3]]),
        "strip": (96, [*turns[0], *turns[2], *turns[3]]),
        "reorder": (0, [*turns[1], *turns[0], *turns[2], *turns[3]]),
    }[change]
    first, reply = await driver.hand_off(fleet.prefill, fleet.decode, changed, params=with_sources(fleet.decode))
    assert first.report["local_tokens"] + first.pulled == same, first.report
    await driver.assert_right(reply, changed)

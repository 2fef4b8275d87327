#!/usr/bin/env python3
"""Agents whose prompts grow turn by turn with tool calls and their results.

Each agent follows a trail of records. The record of a code states the next code in the middle of a long file. In a turn
the model answers the code, the loop turns it into a call of `read_record`, the tool reads the file, its result is
appended, and the next question asks for the next code. A wrong code opens no file. At the end the model is asked for
its first code again, and `add` adds the first and the last one. All messages have OpenAI's form, with `tool_calls` and
role `tool`; a model of this size needs the questions to make its next call.

Several agents alternate on one engine whose KV cache holds little more than one of them, so that they evict each other.
All turns run twice: on a plain engine, which computes the whole history again, and on one with a node store with little
memory and a disk, which loads it. Near the end a summary replaces an old tool result in the middle of each history, as
in agents that run out of context. Blocks after the edit match nothing, and the answer must still be right.

vLLM counts prompt tokens; the store counts tokens read from disk. The exit code is not 0 if an answer is wrong (for
other models than the shipped one: differs from the plain engine's), if a turn found less than the agent's last turn had
stored, if an edited history matched beyond the edit, or if a block failed its checksum.

usage: agent_loop.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0] [--agents 3] [--turns 6] [--quick]
"""

import argparse
import copy
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _support import IDLE_SECONDS, PATIENT, arguments, as_command, await_store, common, engine, parser, run, tokens_of
from host_cache_demo import BLOCK, SUBJECTS, Failures, read_failures, same, warm_up
from multiturn_demo import SYSTEM, at_least_one_computed, bring_up, console, python_file
from rich import box
from rich.table import Table

from vllm_kvtier.devtools.clients import Answer, PromptTokens, chat, prompt_tokens
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.devtools.stores import counts_when_idle, open_tier, tier_of
from vllm_kvtier.store.launcher import store_path

MAX_LEN = 2560
CACHE_BLOCKS = MAX_LEN // BLOCK + 4  # one agent's last turn, and little more
FUNCTIONS = (3, 4)  # of a record's file, before and behind what it states: about 450 tokens
EDITED = 1  # the tool result that a summary replaces
SLACK = 2 * BLOCK  # tokens: blocks match as a whole, and a request's last one is not full
PLAIN, KVTIER = "plain", "kvtier"

TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": {
        "type": "object", "required": list(takes), "properties": {key: {"type": "string"} for key in takes}}}}
    for name, what, takes in (
        ("read_record", "Read the record that a code opens.", ("code",)),
        ("add", "Add two codes.", ("first", "second")),
    )
]  # fmt: skip


class Asked(NamedTuple):
    """One turn: its prompt tokens by source, seconds to the first token, the answer and the right answer."""

    tokens: PromptTokens
    disk: int  # of those that the connector brought
    first_token: float
    answer: str
    code: str
    messages: list[dict]
    known: int  # tokens that this prompt begins with and that its agent's turn before left, whole blocks of them
    edited: bool = False

    @property
    def host(self) -> int:
        return self.tokens.pulled - self.disk

    @property
    def found(self) -> int:
        return self.tokens.cached + self.tokens.pulled


class Played(NamedTuple):
    turns: dict[tuple[int, int], Asked]  # by (turn, agent), in the order in which they were asked
    sums: list[tuple[str, int]]  # by agent: what the tool `add` returned at the end, and what is right
    failures: Failures


class Agent:
    """One conversation and its tools. ``trail``: (subject, code) pairs; each record states the next code."""

    def __init__(self, number: int, turns: int, folder: Path, recalls: bool):
        names = list(SUBJECTS)
        self.trail = [(names[(3 * number + i) % len(names)], _code(number, i)) for i in range(turns)]
        self._records, self._recalls, self._calls = folder / f"agent-{number}", recalls, 0
        self.last_code = ""  # of the trail, as the model answered it
        self._records.mkdir(parents=True, exist_ok=True)
        for i, ((_, opens), (name, code)) in enumerate(zip(self.trail, self.trail[1:], strict=False)):
            before, behind = (python_file(100 * number + 10 * i + n, FUNCTIONS[n]) for n in range(2))
            (self._records / f"{opens}.txt").write_text(f"{before}\nThe code for {name} is {code}.\n{behind}")
        name, code = self.trail[0]
        self.messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"The code for {name} is {code}."},
            {"role": "assistant", "content": "Noted 1 codes."},
        ]

    def ask(self, name: str) -> list[dict]:
        """The prompt of the next turn; later changes of the history do not affect it."""
        self.messages.append({"role": "user", "content": f"What is the code for {name}?"})
        return copy.deepcopy(self.messages)

    def hear(self, name: str, answer: str, code: str) -> str:
        """Append the model's answer; returns the code in it. For models that need not recall, returns the right code,
        so that all continue alike."""
        text = answer if self._recalls else f"The code for {name} is {code}."
        self.messages.append({"role": "assistant", "content": text})
        found = re.search(r"is (\d{5})", text) or re.search(r"\d{5}", text)
        return found.group(found.lastindex or 0) if found else "none"

    def call(self, tool: str, **takes: str) -> str:
        """Run the tool call of the model's last message, and append its result."""
        self._calls += 1
        call = {"id": f"call_{self._calls}", "type": "function"}
        self.messages[-1]["tool_calls"] = [{**call, "function": {"name": tool, "arguments": json.dumps(takes)}}]
        result = getattr(self, f"_{tool}")(**takes)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return result

    def _read_record(self, code: str) -> str:
        record = self._records / f"{code}.txt"
        return record.read_text() if record.exists() else f"There is no record {code}."

    def _add(self, first: str, second: str) -> str:
        return str(int(first) + int(second)) if first.isdigit() and second.isdigit() else "These are no numbers."

    def edit(self, which: int) -> None:
        """Replace an old tool result by a summary."""
        results = [message for message in self.messages if message["role"] == "tool"]
        name, code = self.trail[which + 1]
        results[which]["content"] = f"The code for {name} is {code}."


def _code(agent: int, number: int) -> str:
    # The shipped model recalls these, which it does of nine in ten.
    return str(random.Random(f"0 {agent} {number}").randrange(10000, 100000))


def main() -> int:
    return run(options(), play, "All answers right; agents found what their last turns had left.")


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--agents", type=int, help="that take turns (3; with --quick 2, only with kvtier)")
    made.add_argument("--turns", type=int, help="tool calls of each, at most 6 with the shipped model (6)")
    made.add_argument("--store-size", help="memory of the store (64MiB; 1GiB for other models)")
    args = arguments(made)
    args.agents, args.turns = args.agents or (2 if args.quick else 3), args.turns or 6
    args.gpus = args.gpus[:1]
    args.store_size = args.store_size or (("32MiB" if args.quick else "64MiB") if args.recalls else "1GiB")
    if not (0 < args.agents <= 26 and EDITED + 2 < args.turns <= len(SUBJECTS) - 1):
        made.error(f"--agents must be from 1 to 26, --turns from {EDITED + 3} to {len(SUBJECTS) - 1}")
    return args


def play(args: argparse.Namespace, folder: Path) -> list[str]:
    engines = [make_engine(args, name, folder) for name in ([KVTIER] if args.quick else [PLAIN, KVTIER])]
    try:
        bring_up(engines, "an engine with kvtier" if args.quick else "an engine without and one with kvtier")
        await_store()
        open_tier(store_path())
        played = {one.name: play_round(args, one, folder / one.name) for one in engines}
        referee = {} if args.recalls or args.quick else referees(engines[0], played)
    finally:
        kill_all(engines)
    console.print(turns_table(played))
    return judge(played, args.recalls, referee)


def make_engine(args: argparse.Namespace, name: str, folder: Path) -> Engine:
    (folder / "disk").mkdir(exist_ok=True)
    extra = {
        **PATIENT,
        "endpoint_port": free_port(),
        "store_size": args.store_size,
        "store_idle_seconds": IDLE_SECONDS,
        "store_disk_path": str(folder / "disk"),
        "store_disk_size": "8GiB",
        "store_disk_admission": "all",  # by default only what was asked for twice is written
        # By default what would arrive later than it could be computed is computed, and which that is depends on the
        # machine: here all is loaded that is there.
        "load_policy": "always",
    }
    return engine(
        args, name, folder, gpus=args.gpus, kv=kvtier(extra) if name == KVTIER else None,
        max_model_len=MAX_LEN, num_blocks=CACHE_BLOCKS,
    )  # fmt: skip


def play_round(args: argparse.Namespace, one: Engine, folder: Path) -> Played:
    """All turns, agent by agent; at the end each agent is asked for its first code."""
    warm_up(one)
    agents = [Agent(number, args.turns, folder, args.recalls) for number in range(args.agents)]
    turns: dict[tuple[int, int], Asked] = {}
    before: dict[int, list[int]] = {}  # by agent: tokens of its last prompt
    sums = []
    with console.status("") as status:
        for turn in range(args.turns + 1):
            for number, agent in enumerate(agents):
                status.update(f"{one.name}: turn {turn + 1} of {args.turns + 1}, agent {letter(number)}")
                edited = turn == args.turns - 1
                if edited:
                    agent.edit(EDITED)
                last = turn == args.turns
                name, code = agent.trail[0 if last else turn]
                asked, before[number] = ask(one, agent.ask(name), code, before.get(number, []), edited)
                turns[turn, number] = asked
                said = agent.hear(name, asked.answer, code)
                if turn < args.turns - 1:
                    agent.call("read_record", code=said)
                elif not last:
                    agent.last_code = said
                else:
                    right = int(agent.trail[0][1]) + int(agent.trail[-1][1])
                    sums.append((agent.call("add", first=said, second=agent.last_code), right))
    seconds = sum(asked.first_token for asked in turns.values())
    console.print(f"Played {len(turns)} turns, {one.name}: {seconds:.2f} s to the first tokens.")
    return Played(turns, sums, read_failures(one))


def ask(one: Engine, messages: list[dict], code: str, before: list[int], edited: bool) -> tuple[Asked, list[int]]:
    """One turn. Returns also its prompt's tokens."""
    prompt = tokens_of(one.base_url, messages, tools=TOOLS)
    known = common(before, prompt) // BLOCK * BLOCK
    counted, read = prompt_tokens(one.base_url), blocks_read(one)
    answer = chat(one.base_url, messages, stream=True, tools=TOOLS, tool_choice="none")
    tokens = at_least_one_computed(prompt_tokens(one.base_url) - counted)
    disk = min(tokens.pulled, (blocks_read(one) - read) * BLOCK)
    first_token = answer.first_token_seconds or answer.seconds
    return Asked(tokens, disk, first_token, answer.text, code, messages, known, edited), prompt


def blocks_read(one: Engine) -> int:
    """Tokens from disk, after all promotions for this engine have ended; 0 without a store."""
    return tier_of(counts_when_idle(store_path())).read_blocks if one.kv else 0


def referees(plain: Engine, played: dict[str, Played]) -> dict[tuple[int, int], Answer]:
    """For turns with different answers: the plain engine's probabilities of both."""
    turns = played[PLAIN].turns.items()
    other = played[KVTIER].turns
    return {
        place: chat(plain.base_url, asked.messages, logprobs=True, top_logprobs=5, tools=TOOLS, tool_choice="none")
        for place, asked in turns
        if asked.answer != other[place].answer
    }


def judge(played: dict[str, Played], recalls: bool, referee: dict[tuple[int, int], Answer]) -> list[str]:
    """The failures, as sentences."""
    problems = []
    for (turn, agent), asked in played[KVTIER].turns.items():
        where, both = f"turn {turn + 1} of agent {letter(agent)}:", {n: p.turns[turn, agent] for n, p in played.items()}
        plain = both.get(PLAIN, asked)
        for name, each in both.items() if recalls else ():
            if each.code not in each.answer:
                problems.append(f"{where} {name} answered {each.answer!r}, the code is {each.code}.")
        if not recalls and not same(plain.answer, asked.answer, referee.get((turn, agent))):
            problems.append(f"{where} answered {asked.answer!r}, and the plain engine answers {plain.answer!r}.")
        if asked.found < asked.known - SLACK:
            problems.append(f"{where} found {asked.found} tokens, and its last turn left {asked.known}.")
        if asked.edited and asked.found > asked.known:
            problems.append(f"{where} its history was edited at token {asked.known}, and {asked.found} were found.")
    asked, plain = (list(played[name].turns.values()) for name in (KVTIER, PLAIN if PLAIN in played else KVTIER))
    # What an engine without kvtier would have computed if it had forgotten everything, where there is none.
    without = sum(a.tokens.computed if PLAIN in played else a.tokens.total for a in plain)
    with_ = sum(a.tokens.computed for a in asked)
    if with_ * 2 > without:
        problems.append(f"{with_:,} tokens were computed with kvtier, {without:,} without: too little was forgotten.")
    if not sum(asked.disk for asked in played[KVTIER].turns.values()):
        problems.append("nothing came from disk: all fits into the store's memory, give it less (--store-size).")
    if recalls:
        for name, each in played.items():
            for agent, (result, right) in enumerate(each.sums):
                if result != str(right):
                    problems.append(
                        f"agent {letter(agent)}, {name}: its codes were added up to {result!r}, right is {right}."
                    )
    failures = played[KVTIER].failures
    if failures.integrity:
        problems.append(f"{failures.integrity} blocks came from the store with a wrong checksum.")
    if failures.loads:
        problems.append(f"{failures.loads} loads from the store failed.")
    return problems


HEADS = ("prompt", "com-\nputed", "ms", "GPU", "host", "disk", "com-\nputed", "ms")


def turns_table(played: dict[str, Played]) -> Table:
    """A row a turn of an agent, and one for all of them."""
    title = "Without and with kvtier: tokens, by where they were (* edited)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("turn", no_wrap=True)
    for head in HEADS:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("right", no_wrap=True)
    asked = played[KVTIER].turns
    plain = played[PLAIN].turns if PLAIN in played else {}
    last = max(turn for turn, _ in asked)
    for (turn, agent), each in asked.items():
        ends = (turn, agent + 1) not in asked
        row = cells([plain[turn, agent]] if plain else [], [each])
        where = f"{turn + 1}{letter(agent)}{'*' if each.edited else ''}"
        right = "yes" if each.code in each.answer else "no"
        table.add_row(where, *row, right, end_section=ends and turn == last)
    table.add_row("all", *cells(list(plain.values()), list(asked.values())), "")
    return table


def letter(agent: int) -> str:
    return chr(ord("a") + agent)


def cells(plain: Sequence[Asked], asked: Sequence[Asked]) -> list[str]:
    """Of these turns, summed up, as ``HEADS`` has them."""
    counts = [
        sum(a.tokens.total for a in asked),
        sum(a.tokens.computed for a in plain),
        sum(a.first_token for a in plain) * 1000,
        sum(a.tokens.cached for a in asked),
        sum(a.host for a in asked),
        sum(a.disk for a in asked),
        sum(a.tokens.computed for a in asked),
        sum(a.first_token for a in asked) * 1000,
    ]
    return [f"{count:,.0f}" if plain or number not in (1, 2) else "-" for number, count in enumerate(counts)]


if __name__ == "__main__":
    as_command(main)

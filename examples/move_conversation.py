#!/usr/bin/env python3
"""Moves a conversation to another engine while it is answered; the other engine continues in mid-sentence.

Engine A answers. C is on A's node and shares its node store. B stands for an engine of another node and shares no
memory with A. Four moves of three conversations:

  slice ends    to B. The client has A generate in slices (`max_tokens`), each from the end of the last one. After the
  last slice A retains its blocks for a while (`bidirectional`). A's answer has its address (`remote_host`,
  `remote_port` in `kv_transfer_params`); B gets it among its `sources`, and pulls the blocks from A's cache. mid-stream
  to C, at any token: the client closes A's stream and sends C the prompt and the tokens so far. Whole blocks are in the
  node's memory, or C copies them from A's cache. killed        A is killed in mid-stream. B finds no blocks and
  computes. C loads them from the node's memory.

Every conversation states codes, reads files, and asks for a code; it is moved before the first digit of the answer. The
reference is A's answer to the same prompt under a `cache_salt`, which shares no KV with it. All generate beyond the
answer's end, for a longer comparison. At the end the new engine is asked for another code.

The exit code is not 0 if a continuation differs from the reference in any token (for other models than the shipped one,
unless it is nearly a tie), if a code is wrong, or if a move transferred less than the whole blocks of its prompt (B
without A: if it transferred any).

usage: move_conversation.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0,1] [--quick]
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from _support import IDLE_SECONDS, PATIENT, arguments, as_command, await_store, engine, parser, run, tokens_of
from host_cache_demo import BLOCK, SUBJECTS, warm_up
from multiturn_demo import SYSTEM, TIE, bring_up, console, python_file
from rich import box
from rich.table import Table

from vllm_kvtier.devtools.clients import TIMEOUT, chat, complete
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

MAX_LEN = 2560
NUM_BLOCKS = 200
FUNCTIONS = 12  # of each of two files: about 1,650 tokens in all
SLICE = 4  # tokens
CUT = 2 * SLICE  # tokens behind which it is moved: the code's digits begin there, if the model is the shipped one
LENGTH = 64  # tokens of an answer
NAMES = list(SUBJECTS)[:6]
HALF = len(NAMES) // 2

SLICED, STREAMED, KILLED_B, KILLED_C = MOVES = ("slice ends, to B", "mid-stream, to C", "killed, to B", "killed, to C")


class Talk(NamedTuple):
    """A conversation: its messages, the prompt's tokens, and by name the codes that it states."""

    messages: list[dict[str, str]]
    prompt: list[int]
    codes: dict[str, str]


class Moved(NamedTuple):
    """One move. ``produced``: tokens of the answer before it; ``gap``: seconds from then to the first token of the new
    engine; ``report``: the new engine's sources of KV; ``later``: its answer to the question for another code."""

    produced: list[int]
    went_on: list[int]
    text: str
    gap: float
    report: dict[str, Any]
    later: str


class Told(NamedTuple):
    """A's answer without a move."""

    tokens: list[int]
    text: str


def main() -> int:
    return run(options(), play, "Every continuation equals A's answer.")


def options() -> argparse.Namespace:
    args = arguments(parser(__doc__))
    args.moves = (SLICED, KILLED_B) if args.quick else MOVES
    return args


def play(args: argparse.Namespace, folder: Path) -> list[str]:
    engines = a, b, c = [make_engine(args, n, folder) for n in range(3)]
    if args.quick:
        engines.remove(c)
    moved: dict[str, Moved] = {}
    try:
        bring_up(engines, f"engines {', '.join(one.name for one in engines)}")
        await_store()
        for one in engines:
            warm_up(one)
        talks = [talk(a, number) for number in (1, 2, 3)]  # the shipped model recalls all of them
        expected = [whole(a, each) for each in talks]
        moved[SLICED] = go_on(b, talks[0], *sliced(a, talks[0]))
        if not args.quick:
            moved[STREAMED] = go_on(c, talks[1], *streamed(a, talks[1]))
        produced = streamed(a, talks[2], then=a.kill)
        console.print("Killed A (SIGKILL).")
        moved[KILLED_B] = go_on(b, talks[2], *produced)
        if not args.quick:
            moved[KILLED_C] = go_on(c, talks[2], *produced)
        of = dict(zip(MOVES, (0, 1, 2, 2), strict=True))
        rows = {move: (talks[of[move]], expected[of[move]], moved[move]) for move in args.moves}
        ties = set() if args.recalls else {move for move, row in rows.items() if tied(b, *row)}
    finally:
        kill_all(engines)
    console.print(moves_table(rows))
    return judge(rows, args.recalls, ties)


def make_engine(args: argparse.Namespace, number: int, folder: Path) -> Engine:
    extra: dict[str, Any] = {
        **PATIENT,
        "endpoint_port": free_port(),
        "bidirectional": True,  # A retains finished blocks; B queries engines that may have them
        "retain_share": 0.5,
        "store_size": "256MiB" if args.recalls else "4GiB",
        "store_idle_seconds": IDLE_SECONDS,
        "load_policy": "always",  # not only what is expected sooner than it would be computed: see all of it move
    }
    if number == 1:
        extra |= {"store": "off"}
    gpus = args.gpus[number % len(args.gpus) :][:1] if args.gpus else []
    return engine(
        args, "ABC"[number], folder, gpus=gpus, kv=kvtier(extra), max_model_len=MAX_LEN, num_blocks=NUM_BLOCKS
    )


def talk(a: Engine, number: int) -> Talk:
    """Nothing but a few tokens of the beginning is shared with another number's."""
    rng = random.Random(number)
    codes = {name: str(rng.randrange(10000, 100000)) for name in NAMES}
    messages = [{"role": "system", "content": SYSTEM}]
    for half in range(2):
        names = NAMES[HALF * half :][:HALF]
        for said, reply in (
            (" ".join(f"The code for {name} is {codes[name]}." for name in names), f"Noted {len(names)} codes."),
            ("Read this file:\n" + python_file(10 * number + half, FUNCTIONS), "Done reading."),
        ):
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
    messages.append({"role": "user", "content": question(NAMES[0])})
    return Talk(messages, tokens_of(a.base_url, messages), codes)


def question(name: str) -> str:
    return f"What is the code for {name}?"


# -- asking --------------------------------------------------------------------------------------------------------


def whole(a: Engine, t: Talk) -> Told:
    """A's answer, with KV that no other request shares."""
    answer = complete(a.base_url, t.prompt, max_tokens=LENGTH, ignore_eos=True, cache_salt="whole")
    return Told(answer.token_ids, answer.text)


def sliced(a: Engine, t: Talk) -> tuple[list[int], str, dict[str, Any]]:
    """(tokens, text, params with A's address) of A's answer in two slices."""
    produced, text = [], ""
    for _ in range(CUT // SLICE):
        prompt = t.prompt + produced
        part = complete(a.base_url, prompt, max_tokens=SLICE, ignore_eos=True, kv_transfer_params={"kvtier": {}})
        produced, text = produced + part.token_ids, text + part.text
    return produced, text, {name: (part.params or {}).get(f"remote_{name}") for name in ("host", "port")}


def streamed(a: Engine, t: Talk, then: Callable[[], None] = lambda: None) -> tuple[list[int], str]:
    """(tokens, text) of A's answer until the stream is closed; ``then`` is called before that."""
    body = {"model": "model", "temperature": 0, "prompt": t.prompt, "max_tokens": LENGTH, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    produced, text = [], ""
    with httpx.stream("POST", f"{a.base_url}/v1/completions", json=body, timeout=TIMEOUT, trust_env=False) as response:
        for line in response.raise_for_status().iter_lines():
            if line.startswith("data:") and not line.endswith("[DONE]"):
                for choice in json.loads(line[5:])["choices"]:
                    produced, text = produced + choice["token_ids"], text + choice["text"]
            if len(produced) >= CUT:
                then()
                return produced, text
    raise httpx.RemoteProtocolError(f"{a.name} ended its answer after {len(produced)} tokens: {text!r}")


def go_on(one: Engine, t: Talk, produced: list[int], text: str, source: dict[str, Any] | None = None) -> Moved:
    """Continue after these tokens on ``one``: first one token, for its time and the transferred KV, then the rest."""
    # `kvtier`: the answer is to say where its KV came from
    asked = {"kvtier": {"sources": [source]} if source else {}}
    since = time.monotonic()
    first = complete(one.base_url, t.prompt + produced, max_tokens=1, ignore_eos=True, kv_transfer_params=asked)
    gap = time.monotonic() - since
    ahead = produced + first.token_ids
    rest = complete(one.base_url, t.prompt + ahead, max_tokens=LENGTH - len(ahead), ignore_eos=True)
    report, answer = (first.params or {}).get("kvtier", {}), f"The code for {NAMES[0]} is {t.codes[NAMES[0]]}."
    turns = [{"role": "assistant", "content": answer}, {"role": "user", "content": question(NAMES[-1])}]
    later = chat(one.base_url, [*t.messages, *turns])
    return Moved(produced, first.token_ids + rest.token_ids, text + first.text + rest.text, gap, report, later.text)


def parted(expected: Told, moved: Moved) -> int | None:
    """The first token in which the moved answer differs from A's; None if it is the same."""
    went = moved.produced + moved.went_on
    if went == expected.tokens:
        return None
    return next((i for i, (x, y) in enumerate(zip(expected.tokens, went, strict=False)) if x != y), -1)


def tied(b: Engine, t: Talk, expected: Told, moved: Moved) -> bool:
    """Whether, where the answers part, an engine that computes all of it finds both tokens nearly equally likely."""
    at = parted(expected, moved)
    if at is None or at < 0:
        return False
    before = t.prompt + expected.tokens[:at]
    asked = {"logprobs": 20, "return_tokens_as_token_ids": True, "cache_salt": "referee"}
    return nearly_tied(logprobs_of(b, before, asked), expected.tokens[at], (moved.produced + moved.went_on)[at])


def logprobs_of(b: Engine, prompt: Sequence[int], asked: dict[str, Any]) -> dict[str, float]:
    body = {"model": "model", "temperature": 0, "prompt": list(prompt), "max_tokens": 1, **asked}
    response = httpx.post(f"{b.base_url}/v1/completions", json=body, timeout=TIMEOUT, trust_env=False)
    return response.raise_for_status().json()["choices"][0]["logprobs"]["top_logprobs"][0]


def nearly_tied(top: dict[str, float], first: int, second: int) -> bool:
    """``top``: log-probabilities by "token_id:N"."""
    both = [top.get(f"token_id:{token}") for token in (first, second)]
    return None not in both and abs(both[0] - both[1]) <= TIE


# -- judging -------------------------------------------------------------------------------------------------------

Rows = dict[str, tuple[Talk, Told, Moved]]


def tokens_moved(moved: Moved) -> int:
    return moved.report.get("pulled_tokens", 0)


def judge(rows: Rows, recalls: bool, ties: set[str]) -> list[str]:
    """The failures, as sentences."""
    problems = []
    for move, (t, expected, moved) in rows.items():
        at = parted(expected, moved)
        if at is not None and move not in ties:
            problems.append(f"{move}: differs from A's answer at token {at}: {moved.text!r}, not {expected.text!r}.")
        for name, answer in ((NAMES[0], moved.text), (NAMES[-1], moved.later)) if recalls else ():
            if t.codes[name] not in answer:
                problems.append(f"{move}: the code for {name} is {t.codes[name]}, and the answer was {answer!r}.")
        least = len(t.prompt) // BLOCK * BLOCK
        if move == KILLED_B and tokens_moved(moved):
            problems.append(f"{move}: {tokens_moved(moved)} tokens came from {moved.report.get('pulled_from')}.")
        if move != KILLED_B and tokens_moved(moved) < least:
            problems.append(f"{move}: {tokens_moved(moved)} tokens were moved, the prompt's blocks are {least}.")
        if not 0 < len(moved.produced) < len(expected.tokens):
            problems.append(f"{move}: it was moved behind {len(moved.produced)} of {len(expected.tokens)} tokens.")
    return problems


def source(moved: Moved) -> str:
    """The source of the KV as text; the engine reports an address, "gpu" and an address, or "host"."""
    source = moved.report.get("pulled_from")
    if not tokens_moved(moved) or source is None:
        return "computed"
    if source == "host":
        return "node's memory"
    return "A's cache" if source.startswith("gpu ") else "A's cache, NIXL"


def moves_table(rows: Rows) -> Table:
    """A row a move."""
    table = Table(title="Moved in the middle of an answer", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("move", no_wrap=True)
    for head in ("prompt", "answer\nby A", "moved", "com-\nputed", "gap\nms"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("as A\nwould", no_wrap=True)
    for move, (t, expected, moved) in rows.items():
        counts = (len(t.prompt), len(moved.produced), tokens_moved(moved), moved.report.get("computed_tokens", 0))
        same = "yes" if parted(expected, moved) is None else "no"
        table.add_row(move, *(f"{n:,}" for n in counts), f"{moved.gap * 1000:,.0f}", source(moved), same)
    return table


if __name__ == "__main__":
    as_command(main)

#!/usr/bin/env python3
"""A conversation over a prefill engine, a decode engine and the proxy, with KV pulled in both directions.

The same conversation runs twice: with pulls by the decode engine only, and with ``bidirectional`` pulls. It plants
facts and asks for them later. Before some turns, other prompts evict the conversation from the prefill engine's cache,
as those of other users would. Then the prefill engine computes all of it again, unless it may pull it from the decode
engine.

All figures come from vLLM's counters of prompt tokens. The connector's report, if the proxy forwards it, must agree
with them. The exit code is not 0 if an answer is wrong, if the decode engine did not pull in a turn, or if the prefill
engine did not pull after its cache was lost (or pulled although it must not). The shipped model must recall the planted
codes. Another model's answers must equal those of a plain engine without a connector, unless that engine's choice is
nearly a tie.

usage: multiturn_demo.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0,1] [--pull-threshold TOKENS]
"""

import argparse
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from vllm_kvtier.devtools.clients import Answer, PromptTokens, chat, complete, prompt_tokens
from vllm_kvtier.devtools.engines import MIB, Engine, kvtier, proxy
from vllm_kvtier.devtools.gpus import chosen
from vllm_kvtier.devtools.processes import Service, ServiceFailed, free_port, kill_all, start_all

SHIPPED_MODEL = Path(__file__).parents[1] / "models" / "recall-6m"
SYSTEM = "You keep notes and answer from them."
MAX_LEN = 3456  # tokens; the shipped model recalls exactly up to about 3,400
BLOCK = 32
# The prefill engine's cache has room for little more than one conversation; the decode engine's for many.
P_BLOCKS, D_BLOCKS = MAX_LEN // BLOCK + 4, 256
OTHER_WORK_TOKENS = MAX_LEN - BLOCK
# Nats. Rounding alone moved the log-probabilities of one plain engine by 0.06 between a cached and an
# uncached prompt (recall-28m, bf16), which decides between guesses; wrong KV moves them by whole nats.
TIE = 0.25
# The same with recurrent states in bf16, which decode steps change otherwise than a prefill does.
STATES_TIE = 1.0

console = Console(highlight=False)


class Fit(msgspec.Struct, frozen=True):
    """What vLLM made of an engine's cache. Models with recurrent states have larger blocks than asked for, and blocks
    of states beside those of attention. ``block``: tokens; ``prompt``: blocks that the longest prompt takes."""

    block: int = BLOCK
    prompt: float | None = None  # None: as asked for

    def engine(self, gpus: list[str], blocks: int, max_len: int) -> dict[str, Any]:
        """Options of an engine with a cache for as many tokens as ``blocks`` of the size asked for."""
        if self.prompt is None:
            return {"num_blocks": blocks, "args": []}
        # On CPUs vLLM's Mamba 2 loses a state within a step.
        args = [] if gpus else ["--max-num-batched-tokens", str(self.block)]
        return {"num_blocks": math.ceil(blocks * BLOCK / max_len * self.prompt) + 1, "args": args}


def fitted(engine: Engine, blocks: int) -> Fit | None:
    """Read from the log of an engine with so many blocks; None: its blocks are as asked for."""
    log = engine.log_path.read_text("utf-8", "replace")
    sizes = re.findall(r"Setting attention block size to (\d+) tokens", log)
    prompts = re.findall(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", log)
    return Fit(int(sizes[-1]), blocks / float(prompts[-1])) if sizes and prompts else None


class Turn(msgspec.Struct, frozen=True):
    """The user's message, the code in a right answer, and whether the prefill engine's cache is lost before."""

    user: str
    code: str | None = None
    p_lost: bool = False


class Played(msgspec.Struct, frozen=True):
    """One turn: prompt tokens of both engines by source, time to first token in seconds.

    ``reported``: by role ("prefill", "decode"), the pulled tokens that the connector reported.
    """

    p: PromptTokens
    d: PromptTokens
    first_token: float
    answer: str
    reported: dict[str, int]


def python_file(seed: int, functions: int) -> str:
    """A dull Python file, the same on every machine: ballast between a fact and the question about it."""
    rng = random.Random(seed)
    names = ["index", "total", "value", "count", "width", "name", "key", "size", "path", "state"]
    lines = []
    for number in range(functions):
        first, second, third = rng.sample(names, 3)
        lines += [
            f"def update_{first}_{number}({first}, {second}=None):",
            f"    if {second} is None:",
            f"        {second} = self.get_{third}({first}, {rng.randrange(10)})",
            f"    for {third} in range(len({first})):",
            f"        {second} = {second} + {first}[{third}]",
            f"    return {second}",
            "",
        ]
    return "\n".join(lines)


CONVERSATION = [
    Turn("The code for amber brook is 40512. The code for silver harbor is 77120."),
    Turn("Read this file:\n" + python_file(1, 18)),
    Turn("The code for quiet meadow is 91834. The code for violet bridge is 20657."),
    Turn("What is the code for amber brook?", "40512", p_lost=True),
    Turn("Read this file:\n" + python_file(2, 18)),
    Turn("What is the code for violet bridge?", "20657", p_lost=True),
    Turn("The code for copper lantern is 55309."),
    Turn("What is the code for silver harbor?", "77120", p_lost=True),
    Turn("What is the code for copper lantern?", "55309"),
    Turn("What is the code for quiet meadow?", "91834", p_lost=True),
]


def main() -> int:
    args = arguments()
    started = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
    console.print(f"Model {args.model}; logs in {logs}")
    problems: list[str] = []
    rounds: dict[bool, list[Played]] = {}
    try:
        for bidirectional in (False, True):
            rounds[bidirectional] = play_round(args, bidirectional, logs)
            problems += judge(rounds[bidirectional], bidirectional, args)
        if not args.recalls:
            problems += compare_with_one_engine(args, rounds, logs)
    except (ServiceFailed, httpx.HTTPError) as error:
        console.print(f"[red]{type(error).__name__}:[/red] {error}", markup=True)
        return 2
    summary(rounds)
    console.print(f"{time.monotonic() - started:.0f} s in all.")
    for problem in problems:
        console.print(f"[red]NOT RIGHT[/red] {problem}")
    if not problems:
        console.print("[green]All answers right; KV was pulled in both directions.[/green]")
    return 1 if problems else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(SHIPPED_MODEL), help="directory or hub name")
    parser.add_argument(
        "--gpus", type=chosen, default=[],
        help="GPUs of the prefill and the decode engine, for example 0,1; without, the CPU build",
    )  # fmt: skip
    parser.add_argument("--pull-threshold", type=int, default=1, help="fewest tokens worth a pull")
    args = parser.parse_args()
    # The shipped model was trained to recall; what others answer is their affair, but it must be the same.
    args.recalls = Path(args.model).resolve() == SHIPPED_MODEL.resolve()
    args.fit = Fit()
    return args


def engine(args: argparse.Namespace, name: str, blocks: int, gpu: list[str], extra: dict | None, logs: Path):
    fit = args.fit.engine(gpu, blocks, MAX_LEN)
    return Engine(
        args.model,
        name=name,
        kv=kvtier({"endpoint_port": free_port(), **extra}) if extra is not None else None,
        gpus=gpu,
        max_model_len=MAX_LEN,
        block_size=BLOCK,
        num_blocks=fit["num_blocks"],
        kv_cache_bytes=2048 * MIB,
        args=[*fit["args"], *(["--gpu-memory-utilization", "0.4"] if gpu else [])],
        log_dir=logs,
    )


def bring_up(services: list[Service], what: str) -> None:
    """Start services together; shows how long it takes while it does."""
    with console.status(f"Starting {what}") as status:
        begun = time.monotonic()
        start_all(services, lambda _: status.update(f"Starting {what}: {time.monotonic() - begun:.0f} s"))
    console.print(f"Started {what} in {time.monotonic() - begun:.0f} s.")


def bring_up_fitted(
    args: argparse.Namespace, engine: Engine, blocks: int, make: Callable[[], Engine], what: str
) -> Engine:
    """Start the engine, and another in its place if it has larger blocks; returns that which runs."""
    bring_up([engine], what)
    fit = fitted(engine, blocks)
    if fit is None:
        return engine
    engine.kill()
    args.fit = fit
    console.print(f"This model's blocks are of {fit.block} tokens: it needs another cache.")
    engine = make()
    try:
        bring_up([engine], what)
    except BaseException:
        engine.kill()
        raise
    return engine


def play_round(args: argparse.Namespace, bidirectional: bool, logs: Path) -> list[Played]:
    """Start both engines and the proxy, play the conversation, stop them."""
    word = "on" if bidirectional else "off"
    console.rule(f"bidirectional pulls {word}")
    # The decode engine retains at most this share: the whole conversation.
    extra = {"bidirectional": bidirectional, "pull_threshold": args.pull_threshold, "retain_share": 0.5}
    extra["handoff_share"] = 1.0  # the prefill engine's cache has room for little more
    extra["store"] = "off"  # so that the prefill engine pulls, instead of loading from it
    p = engine(args, f"P-{word}", P_BLOCKS, args.gpus[:1], extra, logs)
    d = engine(args, f"D-{word}", D_BLOCKS, args.gpus[-1:], extra, logs)
    flags = ["--min-prefill-chars", "0"]  # the first turn is short
    flags += [] if bidirectional else ["--no-bidirectional"]
    front = proxy([p], [d], name=f"proxy-{word}", args=flags, log_dir=logs)
    try:
        bring_up([p, d], "P and D")
        if args.fit.prompt is None and (fit := fitted(p, P_BLOCKS)):
            args.fit = fit
            console.print(f"This model's blocks are of {fit.block} tokens: it needs other caches.")
            kill_all([d, p])
            return play_round(args, bidirectional, logs)
        bring_up([front], "the proxy")
        return list(play(p, d, front, f"demo-{word}", args.recalls))
    finally:
        kill_all([front, d, p])


def play(p: Engine, d: Engine, front: Service, conversation: str, must_recall: bool):
    """Play the conversation turn by turn, printing each as it is done."""
    show = Columns(must_recall)
    messages = [{"role": "system", "content": SYSTEM}]
    rng = random.Random(0)
    for number, turn in enumerate(CONVERSATION, 1):
        if turn.p_lost:
            complete(p.base_url, [rng.randrange(300, 2000) for _ in range(OTHER_WORK_TOKENS)], max_tokens=1)
        messages.append({"role": "user", "content": turn.user})
        before = prompt_tokens(p.base_url), prompt_tokens(d.base_url)
        answer = chat(
            front.base_url,
            messages,
            stream=True,
            headers={"X-Conversation-Id": conversation, "X-KVTier-Report": "1"},
        )
        after = prompt_tokens(p.base_url), prompt_tokens(d.base_url)
        messages.append({"role": "assistant", "content": answer.text})
        played = Played(
            p=after[0] - before[0],
            d=at_least_one_computed(after[1] - before[1]),
            first_token=answer.first_token_seconds or answer.seconds,
            answer=answer.text,
            reported=reported(answer.params),
        )
        show.turn(number, turn, played)
        yield played


def at_least_one_computed(counted: PromptTokens) -> PromptTokens:
    """vLLM counts a prompt that was pulled whole as pulled whole, and then computes its last token again."""
    if counted.computed or not counted.pulled:
        return counted
    return PromptTokens(computed=1, cached=counted.cached, pulled=counted.pulled - 1)


def reported(params: dict | None) -> dict[str, int]:
    """Tokens pulled by role, out of the proxy's report."""
    report = (params or {}).get("kvtier", {})
    return {
        role: counts["pulled_tokens"]
        for role, counts in report.items()
        if isinstance(counts, dict) and isinstance(counts.get("pulled_tokens"), int)
    }


class Columns:
    """Prints a table row by row, so that each turn is visible when it is done."""

    HEADS = (
        "turn",
        "P's cache",
        "prompt",
        "P->D",
        "D->P",
        "P computed",
        "D computed",
        "TTFT",
        "right",
        "answer",
    )
    WIDTHS = (4, 9, 6, 6, 6, 10, 10, 8, 5, 0)

    def __init__(self, must_recall: bool) -> None:
        self._no = "NO" if must_recall else "no"
        self._print(self.HEADS, "bold")

    def turn(self, number: int, turn: Turn, played: Played) -> None:
        right = "" if turn.code is None else "yes" if turn.code in played.answer else self._no
        cache = "lost" if turn.p_lost else "kept" if number > 1 else "empty"
        d, p = played.d, played.p
        cells = (number, cache, d.total, d.pulled, p.pulled, p.computed, d.computed)
        self._print(
            (*cells, f"{played.first_token * 1000:.0f} ms", right, " ".join(played.answer.split())[:48])
        )

    def _print(self, cells, style: str | None = None) -> None:
        texts = (str(cell).rjust(width) for cell, width in zip(cells, self.WIDTHS, strict=True))
        console.print(
            "  ".join(texts), style=style, markup=False, no_wrap=True, overflow="ignore", crop=False
        )


def judge(played: list[Played], bidirectional: bool, args: argparse.Namespace) -> list[str]:
    """The failures of a round, as sentences."""
    word = "on" if bidirectional else "off"
    problems = []
    for number, (turn, done) in enumerate(zip(CONVERSATION, played, strict=True), 1):
        where = f"bidirectional {word}, turn {number}:"
        if args.recalls and turn.code is not None and turn.code not in done.answer:
            problems.append(f"{where} {turn.user!r} was answered {done.answer!r}, the code is {turn.code}.")
        missing = done.d.total - done.d.cached
        if missing > args.pull_threshold and done.d.pulled == 0:
            problems.append(
                f"{where} the decode engine lacked {missing} of {done.d.total} prompt tokens and pulled none."
            )
        if done.p.total == 0:
            problems.append(f"{where} the prefill engine got no request.")
        for role, counted in (("prefill", done.p.pulled), ("decode", done.d.pulled)):
            reported = done.reported.get(role, counted)
            if abs(reported - counted) > 1:  # one: the last token, see at_least_one_computed
                problems.append(f"{where} {role} reports {reported} tokens pulled, vLLM counted {counted}.")
        if not bidirectional and done.p.pulled:
            problems.append(f"{where} the prefill engine pulled {done.p.pulled} tokens although these pulls are off.")
        # The whole blocks that the decode engine has of the earlier turns.
        known = played[number - 2].d.total if number > 1 else 0
        if bidirectional and turn.p_lost and done.p.pulled + done.p.cached < known - args.fit.block:
            problems.append(
                f"{where} the prefill engine had lost its cache and pulled only {done.p.pulled} of {known} tokens."
            )
    return problems


def compare_with_one_engine(
    args: argparse.Namespace, rounds: dict[bool, list[Played]], logs: Path
) -> list[str]:
    """Send the same requests, with their history, to a plain engine, and report answers that differ."""
    problems = []
    single = engine(args, "single", D_BLOCKS, args.gpus[:1], None, logs)
    try:
        bring_up([single], "one plain engine to compare with")
        for bidirectional, played in rounds.items():
            messages = [{"role": "system", "content": SYSTEM}]
            for number, (turn, done) in enumerate(zip(CONVERSATION, played, strict=True), 1):
                messages.append({"role": "user", "content": turn.user})
                expected = chat(single.base_url, messages, logprobs=True, top_logprobs=5)
                messages.append({"role": "assistant", "content": done.answer})
                tie = TIE if args.fit.prompt is None else STATES_TIE
                if expected.text != done.answer and not nearly_tied(expected, done.answer, tie):
                    word = "on" if bidirectional else "off"
                    problems.append(
                        f"bidirectional {word}, turn {number}: answered {done.answer!r}, "
                        f"and one plain engine answers {expected.text!r}."
                    )
    finally:
        single.kill()
    return problems


def nearly_tied(expected: Answer, given: str, tie: float = TIE) -> bool:
    """Whether the engine that answered ``expected`` found ``given``'s first other token nearly as likely."""
    before = ""
    for step in expected.logprobs or []:
        if not given.startswith(before + step["token"]):
            others = [o["logprob"] for o in step["top_logprobs"] if given.startswith(before + o["token"])]
            return bool(others) and step["logprob"] - max(others) <= tie
        before += step["token"]
    return False


def summary(rounds: dict[bool, list[Played]]) -> None:
    """Both rounds side by side."""
    table = Table(title="Bidirectional pulls off and on (* P lost its cache)")
    table.add_column("turn", justify="right")
    table.add_column("prompt", justify="right")
    for what in ("D->P", "P computed", "TTFT ms"):
        table.add_column(f"{what}\noff", justify="right", no_wrap=True)
        table.add_column(f"{what}\non", justify="right", no_wrap=True)
    for number, turn in enumerate(CONVERSATION, 1):
        off, on = rounds[False][number - 1], rounds[True][number - 1]
        row = [off.p.pulled, on.p.pulled, off.p.computed, on.p.computed]
        times = [f"{played.first_token * 1000:.0f}" for played in (off, on)]
        table.add_row(f"{number}{'*' if turn.p_lost else ' '}", *map(str, [off.d.total, *row]), *times)
    table.add_section()
    sums = [sum(getattr(t.p, f) for t in rounds[b]) for f in ("pulled", "computed") for b in (False, True)]
    times = [f"{sum(t.first_token for t in rounds[b]) * 1000:.0f}" for b in (False, True)]
    table.add_row("all", "", *map(str, sums), *times)
    console.print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

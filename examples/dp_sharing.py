#!/usr/bin/env python3
"""Two ranks that share their KV: each prefix is computed once, whichever rank gets the request.

Prompts with four documents as beginnings go to two ranks at random, as from a load balancer without prefix routing.
Each rank's cache holds two documents. All prompts run twice: without sharing, as in plain vLLM, and with the
connector's defaults. Then a rank copies a prefix from the other rank's cache (`peer_fetch`), or loads it from the
node's host memory if both have evicted it.

With two GPUs the ranks are those of one server (`--data-parallel-size 2`). Otherwise they are two `vllm serve` on one
node, which share in the same way and start sooner; `--one-server` makes them ranks of one server there too.

The engine reports the sources of prompt tokens in `kv_transfer_params`. The exit code is not 0 if an answer with
sharing differs from the one without (for other models than the shipped one, unless it is nearly a tie), if a code is
wrong (for the shipped model), if a document was computed more than once with sharing, if no block was copied from the
other rank, or if a block failed its checksum.

usage: dp_sharing.py [--model DIRECTORY_OR_HUB_NAME] [--gpus 0,1] [--requests 24] [--one-server] [--quick]
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _support import IDLE_SECONDS, PATIENT, arguments, as_command, engine, parser, run, tokens_of
from host_cache_demo import BLOCK, SUBJECTS, Failures, read_failures, same
from multiturn_demo import SYSTEM, bring_up, console, python_file
from rich import box
from rich.table import Table

from vllm_kvtier.devtools.clients import Answer, chat
from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.devtools.stores import StoreFailed

MAX_LEN = 2048
NUM_BLOCKS = 90  # a rank's: 2,880 tokens
FUNCTIONS = 18  # of a document: about 1,200 tokens
# By document, what the codes are for that it states; the shipped model recalls these, which it does of nine in ten.
STATED = (
    ("amber brook", "silver harbor"),
    ("quiet meadow", "violet bridge"),
    ("scarlet field", "winter orchard"),
    ("copper lantern", "hollow cedar"),
)
DOCUMENTS = len(STATED)
RANKS = 2
ALONE, SHARED = "alone", "shared"
ACQUAINTED_SECONDS = 60.0  # for the ranks to find each other


class Asked(NamedTuple):
    """One request: its question and rank, its prompt tokens by source, seconds to the answer."""

    document: int
    code: int  # which of the document's
    rank: int
    report: dict[str, Any]
    seconds: float
    answer: str
    prefix: int  # tokens of the document, which other requests share

    @property
    def name(self) -> str:
        return STATED[self.document][self.code]

    @property
    def own(self) -> int:
        return self.report["local_tokens"]

    @property
    def other(self) -> int:
        return self._pulled((self.report["pulled_from"] or "").startswith("gpu "))

    @property
    def host(self) -> int:
        return self._pulled(self.report["pulled_from"] == "host")

    @property
    def computed(self) -> int:
        return self.report["computed_tokens"]

    @property
    def computed_prefix(self) -> bool:
        """Whether most of the document was computed for this."""
        return (self.own + self.report["pulled_tokens"]) * 2 < self.prefix

    def _pulled(self, so: bool) -> int:
        return self.report["pulled_tokens"] if so else 0


class Played(NamedTuple):
    asked: list[Asked]
    failures: Failures
    referee: dict[int, Answer]  # by request; only where answers differ, and not of the shipped model


class Ranks:
    """Two ranks, of one server or each its own."""

    def __init__(self, args: argparse.Namespace, folder: Path, name: str):
        self.separate = not args.one_server
        sharing = {"store_size": "512MiB" if args.recalls else "8GiB", "store_idle_seconds": IDLE_SECONDS}
        extra = {
            **PATIENT,
            # Copy and load whatever is there, not only what is expected sooner than it would be computed: that depends
            # on the machine.
            "load_policy": "always",
            **(sharing if name == SHARED else {"peer_fetch": "off", "store": "off"}),
        }
        common = {"max_model_len": MAX_LEN, "num_blocks": NUM_BLOCKS, "worker_process": not self.separate}
        if self.separate:
            self.engines = [
                engine(
                    args, f"{name}-{n}", folder, gpus=args.gpus[n % len(args.gpus) :][:1] if args.gpus else [],
                    kv=kvtier({**extra, "endpoint_port": free_port()}), **common,
                )
                for n in range(RANKS)
            ]  # fmt: skip
        else:
            flags = ["--data-parallel-size", str(RANKS)]
            gpus = args.gpus[:RANKS]
            one = engine(args, name, folder, gpus=gpus, kv=kvtier(extra), flags=flags, tensor_parallel=1, **common)
            self.engines = [one]

    def ask(self, rank: int, messages: list[dict], **body: Any) -> Answer:
        """The answer reports the sources of its KV."""
        headers = {} if self.separate else {"X-data-parallel-rank": str(rank)}
        one = self.engines[rank if self.separate else 0]
        return chat(one.base_url, messages, headers=headers, kv_transfer_params={"kvtier": {}}, **body)

    @property
    def base_url(self) -> str:
        return self.engines[0].base_url


def main() -> int:
    return run(options(), play, "All answers the same; with sharing every document was computed once.")


def options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--requests", type=int, help="in all (24; 10 with --quick)")
    made.add_argument("--one-server", action="store_true", help="with --data-parallel-size 2 (default with two GPUs)")
    made.add_argument("--seed", type=int, default=0, help="of the assignment of requests to ranks (%(default)s)")
    args = arguments(made)
    args.requests = args.requests or (10 if args.quick else 24)
    args.one_server |= len(args.gpus) >= RANKS
    if args.one_server and len(args.gpus) == 1:
        made.error("two ranks of one server need two GPUs")
    if args.requests < 2 * DOCUMENTS:
        made.error(f"--requests must be {2 * DOCUMENTS} at least, twice the documents")
    return args


def play(args: argparse.Namespace, folder: Path) -> list[str]:
    played: dict[str, Played] = {}
    for name in [SHARED] if args.quick else [ALONE, SHARED]:
        played[name] = play_round(args, name, folder, played.get(ALONE))
    for name, each in played.items():
        console.print(requests_table(name, each.asked))
    console.print(sums_table(played))
    return judge(played, args.recalls)


def play_round(args: argparse.Namespace, name: str, folder: Path, before: Played | None) -> Played:
    """``before``: the other round; an engine is asked for the probabilities of answers that differ from it."""
    ranks = Ranks(args, folder, name)
    try:
        bring_up(ranks.engines, f"{RANKS} ranks, {name}")
        acquaint(ranks, name)
        asked = []
        with console.status("") as status:
            for number, (document, code, rank) in enumerate(plan(args.requests, args.seed), 1):
                status.update(f"{name}: request {number} of {args.requests}")
                asked.append(ask(ranks, document, code, rank))
        failures = [read_failures(one) for one in ranks.engines]
        sums = Failures(sum(f.integrity for f in failures), sum(f.loads for f in failures))
        pairs = zip(before.asked, asked, strict=True) if before is not None and not args.recalls else ()
        differ = [number for number, (a, b) in enumerate(pairs) if a.answer != b.answer]
        return Played(asked, sums, {number: referee(ranks, asked[number]) for number in differ})
    finally:
        kill_all(ranks.engines)


def referee(ranks: Ranks, asked: Asked) -> Answer:
    """The same request to an engine that computes it, with probabilities."""
    messages = messages_of(asked.document, asked.code)
    return ranks.ask(asked.rank, messages, cache_salt="referee", logprobs=True, top_logprobs=5)


def plan(requests: int, seed: int) -> list[tuple[int, int, int]]:
    """(document, code, rank) of each request: random, but each rank gets each document at least once."""
    rng = random.Random(seed)
    wanted = [(document, rank) for document in range(DOCUMENTS) for rank in range(RANKS)]
    wanted += [(rng.randrange(DOCUMENTS), rng.randrange(RANKS)) for _ in range(requests - len(wanted))]
    rng.shuffle(wanted)
    return [(document, rng.randrange(2), rank) for document, rank in wanted]


def acquaint(ranks: Ranks, name: str) -> None:
    """The first requests of a rank pay for much that later ones find ready, and so does the first copy. Raises
    StoreFailed where sharing ranks do not come to copy from each other."""
    deadline, number = time.monotonic() + ACQUAINTED_SECONDS, 0
    reached: set[int] = set()
    while len(reached) < RANKS:
        number += 1
        for rank in range(RANKS):
            messages = [{"role": "user", "content": f"{name} {number} {rank}: " + python_file(number, 3)}]
            ranks.ask(1 - rank, messages, max_tokens=2)
            report = ranks.ask(rank, messages, max_tokens=2).params["kvtier"]
            if name == ALONE or (report["pulled_from"] or "").startswith("gpu "):
                reached.add(rank)
        if time.monotonic() > deadline:
            raise StoreFailed(f"after {ACQUAINTED_SECONDS:g} s the ranks do not copy from each other: {report}")


def messages_of(document: int, code: int | None) -> list[dict[str, str]]:
    """A conversation that states the document's codes, reads it, and asks for one of them; None: its beginning."""
    names = STATED[document]
    told = " ".join(f"The code for {name} is {SUBJECTS[name]}." for name in names)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": told},
        {"role": "assistant", "content": f"Noted {len(names)} codes."},
        {"role": "user", "content": "Read this file:\n" + python_file(document, FUNCTIONS)},
        {"role": "assistant", "content": "Done reading."},
    ]
    return messages + ([] if code is None else [{"role": "user", "content": f"What is the code for {names[code]}?"}])


def ask(ranks: Ranks, document: int, code: int, rank: int) -> Asked:
    messages = messages_of(document, code)
    prefix = len(tokens_of(ranks.base_url, messages_of(document, None), add_generation_prompt=False))
    answer = ranks.ask(rank, messages)
    return Asked(document, code, rank, answer.params["kvtier"], answer.seconds, answer.text, prefix // BLOCK * BLOCK)


def computed_times(asked: Sequence[Asked]) -> dict[int, int]:
    """By document: for how many requests most of it was computed."""
    return {n: sum(a.computed_prefix for a in asked if a.document == n) for n in range(DOCUMENTS)}


def judge(played: dict[str, Played], recalls: bool) -> list[str]:
    """The failures, as sentences."""
    problems = []
    for name, each in played.items():
        for number, asked in enumerate(each.asked, 1):
            if recalls and SUBJECTS[asked.name] not in asked.answer:
                code = SUBJECTS[asked.name]
                problems.append(f"{name}, request {number}: answered {asked.answer!r}, the code is {code}.")
        if each.failures.integrity:
            problems.append(f"{name}: {each.failures.integrity} blocks came with a wrong checksum.")
        if each.failures.loads:
            problems.append(f"{name}: {each.failures.loads} loads from the node store failed.")
    shared = played[SHARED].asked
    for number, (alone, asked) in enumerate(zip(played.get(ALONE, played[SHARED]).asked, shared, strict=True), 1):
        if not same(alone.answer, asked.answer, played[SHARED].referee.get(number - 1)):
            problems.append(f"request {number}: answered {asked.answer!r} with sharing, {alone.answer!r} without.")
    for document, times in computed_times(shared).items():
        if times != 1:
            problems.append(f"document {document + 1} was computed {times} times with sharing.")
    if not sum(asked.other for asked in shared):
        problems.append("nothing was copied from the other rank's cache.")
    if ALONE in played:
        for document, times in computed_times(played[ALONE].asked).items():
            if times < RANKS:
                problems.append(f"document {document + 1} was computed {times} times by {RANKS} ranks without sharing.")
    return problems


def requests_table(name: str, asked: Sequence[Asked]) -> Table:
    table = Table(
        title=f"Ranks {name}: where each prompt's tokens came from", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    for head in ("request", "document", "rank", "prompt", "own\ncache", "other\nrank", "host", "computed", "ms"):
        table.add_column(head, justify="right", no_wrap=True)
    for number, a in enumerate(asked, 1):
        counts = (a.report["prompt_tokens"], a.own, a.other, a.host, a.computed, round(a.seconds * 1000))
        table.add_row(str(number), str(a.document + 1), str(a.rank), *(f"{n:,}" for n in counts))
    return table


def sums_table(played: dict[str, Played]) -> Table:
    """Everything summed up, and how often each document was computed."""
    table = Table(title="All requests", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("ranks", no_wrap=True)
    for head in ("prompt", "own\ncache", "other\nrank", "host", "computed", "seconds"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("documents\ncomputed", no_wrap=True)
    for name, each in played.items():
        a = each.asked
        sums = (
            sum(x.report["prompt_tokens"] for x in a), sum(x.own for x in a), sum(x.other for x in a),
            sum(x.host for x in a), sum(x.computed for x in a),
        )  # fmt: skip
        times = ", ".join(map(str, computed_times(a).values()))
        table.add_row(name, *(f"{n:,}" for n in sums), f"{sum(x.seconds for x in a):.1f}", f"{times} x")
    return table


if __name__ == "__main__":
    as_command(main)

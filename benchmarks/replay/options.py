"""The command line, and the loads that follow from it."""

import argparse
import shlex
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from serve import engines
from serve.conversations import Conversation
from serve.engines import Needs
from serve.lengths import FORMS, Lengths
from serve.load import Limits
from tiers import GIB, bytes_per_token

from . import ideal, trace
from .agents import Agents

HERE = Path(__file__).resolve().parent
SAMPLE = HERE / "data" / "conversation_sample.jsonl"
UNPUBLISHED = ("logs", "out", "plot", "python", "draw", "dir", "sample_to")  # where things lie on this machine
CACHE_SPARE = 64 + 2048  # tokens that the cache of an engine has room for beside the longest request
MANY = 4096  # requests at once: as many as the trace sends


def parse(argv: list[str] | None = None, doc: str = "") -> argparse.Namespace:
    """Exits with a sentence if the options do not fit together."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/replay", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_engines(parser.add_argument_group("engines"))
    _add_trace(parser.add_argument_group("trace"))
    _add_agents(parser.add_argument_group("agents", f"lengths: {FORMS}"))
    _add_output(parser.add_argument_group("measuring and output"))
    args = parser.parse_args(argv)
    if not (args.draw or args.sample_to) and (args.model is None or not (args.model / "config.json").exists()):
        parser.error("--model: a directory with a config.json is needed")
    if min([args.lengths, *args.rates, *args.agents]) <= 0:
        parser.error("--lengths, --rates and --agents are above 0")
    if args.longest + CACHE_SPARE > args.cache_tokens:
        parser.error(f"--cache-tokens {args.cache_tokens} is less than --longest {args.longest} and {CACHE_SPARE} more")
    # What `serve` asks of its own command line: one server of one rank.
    args.engines = args.data_parallel = args.ranks = 1
    args.see_all_gpus = False
    if not (args.draw or args.sample_to or args.plan):
        args.logs = args.logs or tempfile.mkdtemp(prefix="kvtier-replay-")
    return args


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", type=Path, help="directory with a config.json; weights and tokenizer if it has them")
    group.add_argument("--dummy", action="store_true", help="random weights")
    group.add_argument("--gpus", type=int, nargs="*", default=[], help="all engines are on these; none: CPU")
    group.add_argument(
        "--compare", nargs="+", default=["none", "kvtier", "offloading"], metavar="NAME=WHAT",
        help="the first is what the others are compared with: none, kvtier, memory (ours without disk), offloading "
        "(with its fs tier), lmcache, JSON with options of our connector or a whole --kv-transfer-config",
    )  # fmt: skip
    group.add_argument("--apart", action="store_true", help="one engine at a time, not all up at once")
    group.add_argument("--cache-tokens", type=int, default=40960, help="an engine's KV cache")
    group.add_argument("--host-gib", type=float, default=40.0, help="memory of each connector")
    group.add_argument("--disk-gib", type=float, default=20.0, help="disk of each connector; 0: none")
    group.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to use")
    group.add_argument("--step-tokens", type=int, default=0, help="vLLM's max_num_batched_tokens (default: its own)")
    group.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    group.add_argument("--ready", type=float, default=300, help="seconds an engine may take to start")
    group.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    group.add_argument("--logs", help="directory for the engines' logs (default: a temporary one)")


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace", type=Path, default=SAMPLE, metavar="FILE",
        help="Mooncake's format, .jsonl or .jsonl.xz (default: the sample of its conversation trace beside this file)",
    )  # fmt: skip
    group.add_argument(
        "--window", type=float, nargs=2, default=(10.0, 20.0), metavar="MINUTE", help="of the trace (default: 10 20)"
    )
    group.add_argument("--requests", type=int, help="of whole sessions, drawn from the window (default: all)")
    group.add_argument("--lengths", type=float, default=0.5, help="prompts, blocks and answers so many times as long")
    group.add_argument("--longest", type=int, default=24576, help="tokens of a prompt and its answer; prompts are cut")
    group.add_argument(
        "--rates", type=float, nargs="*", default=[4.0, 6.0], help="requests a second on average, a level each"
    )
    group.add_argument("--sample-to", type=Path, metavar="FILE", help="only write the sample that would be replayed")


def _add_agents(group: argparse._ArgumentGroup) -> None:
    length = Lengths.parse
    group.add_argument("--agents", type=int, nargs="*", default=[32, 128], help="sessions at once, a level each")
    group.add_argument("--system", type=int, default=1024, help="tokens that all sessions begin with")
    group.add_argument("--task", type=length, default=Lengths(128, 4096, 512, 0.7), help="(default: %(default)s)")
    group.add_argument("--tool", type=length, default=Lengths(32, 8192, 768, 1.0), help="(default: %(default)s)")
    group.add_argument("--answer", type=length, default=Lengths(8, 512, 64, 0.6), help="(default: %(default)s)")
    group.add_argument("--turns", type=length, default=Lengths(6, 6), help="prompts of a session (default: 6)")
    group.add_argument("--pause", type=float, default=2.0, help="mean seconds that a tool runs")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--p99", type=float, nargs="+", default=[1.0, 2.0, 5.0], help="limits of the p99 TTFT, seconds")
    group.add_argument("--level-seconds", type=float, default=90.0, help="no request is sent after so long in a level")
    group.add_argument("--seconds", type=float, default=480.0, help="no level is begun after so long")
    group.add_argument("--timeout", type=float, default=300, help="seconds that a server may be silent in an answer")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--plan", action="store_true", help="only print the loads, and what LRU caches would find")
    group.add_argument("--out", type=Path, help="JSON, written anew after each level")
    group.add_argument("--plot", type=Path, metavar="PNG")
    group.add_argument("--draw", type=Path, nargs="+", metavar="FILE", help="JSON [PNG]: only show what a run wrote")


# -- loads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One load. ``workload``: trace or agents; ``offered``: requests a second, or sessions."""

    workload: str
    offered: float
    conversations: list[Conversation]
    limits: Limits
    lru: dict[str, float]  # what LRU caches of the same sizes would find

    @property
    def name(self) -> str:
        return f"{self.offered:g} {'requests/s' if self.workload == 'trace' else 'sessions'}"


class Work:
    """The loads in the order in which they are measured. Each has tokens of its own: nothing of one is found in
    another, while caches stay as full as the one before left them. Raises NoTrace or ValueError."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.vocabulary = engines.vocabulary(args.model) if args.model else 0
        self.per_token = bytes_per_token(args.model) if args.model else 1

    @cached_property
    def sampled(self) -> list[trace.Request]:
        """The requests that are replayed, as long as in the trace."""
        args = self._args
        begin, end = args.window
        every = trace.window(trace.read(args.trace), 60 * begin, 60 * end)
        if not every:
            raise trace.NoTrace(f"{args.trace} has no request from minute {begin:g} to minute {end:g}")
        return trace.sample(every, args.requests or len(every), args.seed)

    @cached_property
    def scaled(self) -> list[trace.Request]:
        return trace.scaled(self.sampled, self._args.lengths, self._args.longest)

    @cached_property
    def levels(self) -> list[Level]:
        args = self._args
        return [self._agents(count) for count in args.agents] + [self._trace(rate) for rate in args.rates]

    def _trace(self, rate: float) -> Level:
        args = self._args
        salt = f"{args.seed} trace {rate}"
        made = trace.conversations(self.scaled, args.lengths, rate, self.vocabulary, salt)
        block = trace.block_tokens(args.lengths)
        prompts = [[(number, block) for number in request.ids] for request in self.scaled]
        return Level("trace", rate, made, self._limits(MANY), ideal.shares(prompts, **self.tiers()))

    def _agents(self, count: int) -> Level:
        args = self._args
        agents = Agents(args.system, args.task, args.tool, args.answer, args.turns, args.pause, args.longest)
        made = agents.sessions(count, self.vocabulary, f"{args.seed} agents {count}")
        return Level("agents", count, made, self._limits(count), ideal.shares(ideal.prompts_of(made), **self.tiers()))

    def _limits(self, concurrency: int) -> Limits:
        return Limits(concurrency, seconds=self._args.level_seconds)

    def tiers(self) -> dict[str, int]:
        """Tokens that each has room for."""
        args = self._args
        room = {"memory": args.host_gib, "disk": args.disk_gib}
        return {"gpu": args.cache_tokens, **{tier: int(gib * GIB / self.per_token) for tier, gib in room.items()}}

    def needs(self) -> Needs:
        args = self._args
        most = max([*args.agents, 64])
        return Needs(args.longest + 64, args.cache_tokens, 0, min(most, 256))


def settings(args: argparse.Namespace) -> dict:
    """What was asked for, without where things lie on this machine."""
    out = {name: value for name, value in vars(args).items() if name not in UNPUBLISHED}
    return {name: _plain(value) for name, value in out.items()}


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return value.name
    return str(value) if isinstance(value, Lengths) else value

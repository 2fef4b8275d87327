"""The command line, and what follows from it: the conversations, what engines need for them, the variants."""

import argparse
import json
import math
import shlex
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from . import engines, sources, variants
from .conversations import Conversation, Shape, synthetic
from .engines import Needs
from .lengths import FORMS, Lengths
from .load import Limits
from .targets import POLICIES
from .variants import Variant

VOCABULARY = 30_000  # of token ids sent to servers whose model is not known
CHAT_FACTOR = 3  # tokens that a word may take, with a tokenizer that knows little English
UNPUBLISHED = ("logs", "out", "plot", "python", "draw")  # of the settings: where things lie on this machine


def parse(argv: list[str] | None = None, doc: str = "") -> argparse.Namespace:
    """Exits with a sentence if the options do not fit together."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/serve", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_servers(parser.add_argument_group("servers"))
    _add_engines(parser.add_argument_group("engines started here"))
    _add_load(parser.add_argument_group("load", f"lengths: {FORMS}"))
    _add_measuring(parser.add_argument_group("measuring"))
    _add_output(parser.add_argument_group("output"))
    args = parser.parse_args(argv)
    if wrong := _wrong(args):
        parser.error(wrong)
    args.logs = args.logs or (None if args.draw else tempfile.mkdtemp(prefix="kvtier-serve-"))
    return args


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", action="append", default=[], metavar="URL", help="one that runs; several times")
    group.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each, asked for by vLLM's header")
    policies = "; ".join(f"{name}: {what}" for name, what in POLICIES.items())
    group.add_argument("--policy", choices=POLICIES, default="hop", help=policies)
    group.add_argument("--served-model", help="name in requests (default: the first that the server names)")
    group.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="of every request")
    group.add_argument("--timeout", type=float, default=300, help="seconds that a server may be silent in an answer")


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--engines", type=int, default=0, metavar="N", help="start N, each with the same model")
    group.add_argument("--data-parallel", type=int, default=1, metavar="RANKS", help="as servers of so many ranks each")
    group.add_argument("--model", type=Path, help="directory with a config.json; weights and tokenizer if it has them")
    group.add_argument("--dummy", action="store_true", help="random weights")
    group.add_argument("--gpus", type=int, nargs="*", default=[], help="shared out among the engines; none: CPU")
    group.add_argument("--see-all-gpus", action="store_true", help="each engine sees the others' GPUs, its own first")
    group.add_argument("--connector", default="kvtier", help="of all engines, where nothing is compared: see --compare")
    group.add_argument("--extra-config", type=json.loads, default={}, metavar="JSON", help="options of our connector")
    group.add_argument(
        "--compare", nargs="+", action="extend", default=[], metavar="NAME=WHAT",
        help="the same load on each; the first is what the others are compared with. WHAT: none, kvtier, offloading, "
        "JSON with options of our connector or a whole --kv-transfer-config, or URLs",
    )  # fmt: skip
    group.add_argument("--apart", action="store_true", help="variants one after the other, not all up at once")
    group.add_argument("--cache-tokens", type=int, default=0, help="an engine's KV cache (default: what is needed)")
    group.add_argument("--host-gib", type=float, help="host memory a variant (default: room for all of a round)")
    group.add_argument("--step-tokens", type=int, default=0, help="vLLM's max_num_batched_tokens (default: its own)")
    group.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    group.add_argument("--ready", type=float, default=300, help="seconds an engine may take to start")
    group.add_argument("--python", default=sys.executable, help="the interpreter that has vLLM")
    group.add_argument("--logs", help="directory for the engines' logs (default: a temporary one)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    length = Lengths.parse
    group.add_argument("--conversations", type=int, default=64, help="of a round")
    group.add_argument("--turns", type=length, default=Lengths(20, 20), help="of a conversation (default: 20)")
    group.add_argument("--system", type=int, default=256, help="tokens that all conversations begin with")
    group.add_argument("--context", type=length, default=Lengths(0, 0), help="a conversation's own before its turns")
    group.add_argument(
        "--input", type=length, default=Lengths(4, 1024, 80, 1.0), help="what a user says (default: %(default)s)"
    )
    group.add_argument(
        "--output", type=length, default=Lengths(8, 1024, 200, 0.8), help="an answer (default: %(default)s)"
    )
    group.add_argument("--max-len", type=int, default=0, help="conversations end before they grow beyond it")
    sources.add_arguments(group)
    group.add_argument("--concurrency", type=int, default=32, help="most requests at once")
    group.add_argument("--rate", type=float, default=0.0, help="requests a second, Poisson (default: closed loop)")
    group.add_argument("--active", type=int, default=0, help="conversations under way at once (default: as it comes)")
    group.add_argument("--duration", type=float, default=0.0, help="seconds of a pass after which no turn is asked")
    group.add_argument("--chat", action="store_true", help="chats of words instead of completions of token ids")
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--body", type=json.loads, default={}, metavar="JSON", help="added to every request")
    group.add_argument("--vocabulary", type=int, help="token ids are drawn below it (default: the model's)")
    group.add_argument("--seed", type=int, default=0)


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--passes", type=int, default=2, help="of the same prompts: cold, warm, ... (default: 2)")
    group.add_argument("--rounds", type=int, default=1, help="each with other conversations; intervals need three")
    group.add_argument("--reset", action="store_true", help="empty the engines' own prefix caches before each pass")
    group.add_argument("--warmup", type=int, default=4, help="prompts that each target gets unmeasured")
    group.add_argument("--probe", type=int, nargs="+", default=[], metavar="TOKENS", help="one prompt at a time")
    group.add_argument("--probe-repeats", type=int, default=7)
    group.add_argument("--probe-warmup", type=int, default=2, help="repetitions that are not counted")
    group.add_argument("--no-load", action="store_true", help="only what --probe or --floor ask for")
    group.add_argument("--floor", action="store_true", help="the client itself, on a server that computes nothing")
    group.add_argument("--seconds", type=float, default=0.0, help="no pass is begun after so long")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--out", type=Path, help="JSON, written anew after each step")
    group.add_argument("--requests", action="store_true", help="every request in it")
    group.add_argument("--plot", type=Path, metavar="PNG")
    group.add_argument("--draw", type=Path, nargs=2, metavar=("JSON", "PNG"), help="only draw what a run wrote")


def _wrong(args: argparse.Namespace) -> str:
    """What does not fit together, in a sentence."""
    if args.draw or (args.floor and args.no_load and not args.probe):
        return ""
    urls = bool(args.base_url) + any("=http" in text or text.startswith("http") for text in args.compare)
    if not args.engines and not urls:
        return "give --base-url for servers that run, or --engines N and --model to start some"
    if args.base_url and (args.engines or args.compare):
        return "--base-url is for servers alone; with --compare name them there: --compare off=http://... on=http://..."
    if args.engines and args.model is None:
        return "--engines needs --model"
    if args.engines and not (args.model / "config.json").exists():
        return f"--model: {args.model} has no config.json"
    if args.data_parallel < 1 or (args.engines and args.engines % args.data_parallel):
        return f"{args.engines} engines are no whole number of servers with {args.data_parallel} ranks each"
    if args.chat and (args.sharegpt or args.vllm_dataset):
        return "--chat sends words of its own; data sets are sent as token ids"
    if (args.sharegpt or args.vllm_dataset) and args.model is None:
        return "a data set's text needs a tokenizer: give --model"
    if min(args.passes, args.rounds, args.concurrency, args.conversations, args.ranks) < 1:
        return "--passes, --rounds, --concurrency, --conversations and --ranks are at least 1"
    if bad := [text for text in args.header if ":" not in text]:
        return f"--header {bad[0]!r}: write 'NAME: VALUE'"
    return ""


# -- what follows --------------------------------------------------------------------------------------------------


class Work:
    """The conversations of each round, drawn when they are first asked for. ``fresh(-1)``: to warm up with.

    Raises NoData or ValueError where there are none.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        known = args.model is not None and (args.model / "config.json").exists()
        self.vocabulary = args.vocabulary or (engines.vocabulary(args.model) if known else VOCABULARY)
        self.fresh = cache(self._draw)

    def _draw(self, number: int) -> list[Conversation]:
        args = self._args
        seed = args.seed * 1_000_003 + number
        if number < 0:
            # Synthetic always: what a file holds must not have been seen before it is measured.
            shape = Shape(0, args.context, Lengths(1, 1), Lengths(512, 512), Lengths(8, 8), args.max_len)
            return synthetic(shape, args.warmup, seed, self.vocabulary)
        if args.vllm_dataset:
            return sources.from_vllm(f"{args.vllm_dataset} --seed {seed % (1 << 31)}", _tokenizer(args.model))
        if args.sharegpt:
            tokenizer = _tokenizer(args.model)
            return sources.from_sharegpt(
                args.sharegpt, tokenizer, args.conversations, args.turns.high, args.max_len, seed
            )
        shape = Shape(args.system, args.context, args.turns, args.input, args.output, args.max_len)
        return synthetic(shape, args.conversations, seed, self.vocabulary)

    def needs(self) -> Needs:
        args = self._args
        rounds = [] if args.no_load else [self.fresh(number) for number in range(-1, args.rounds)]
        sizes = [conversation.tokens for said in rounds for conversation in said]
        if args.chat:
            sizes = [CHAT_FACTOR * size for size in sizes]
        longest = max([*sizes, *(length + 16 for length in args.probe)], default=64) + 64
        at_once = math.ceil(max(args.concurrency, args.active) / max(1, args.engines))
        mean = sum(sizes) / len(sizes) if sizes else 0
        held = max(longest + longest // 4, int(1.25 * at_once * mean))
        probed = 4 * max(args.probe, default=0)  # none is asked for when the next one was
        stored = max(probed, max((sum(c.tokens for c in said) for said in rounds), default=0))
        return Needs(longest, held, stored, args.concurrency)


@cache
def _tokenizer(model: Path) -> Any:
    return sources.tokenizer_of(str(model))


def chosen(args: argparse.Namespace, host: int) -> list[Variant]:
    """Raises argparse.ArgumentTypeError with a sentence."""
    if args.base_url:
        return [Variant("servers", urls=tuple(args.base_url))]
    words = args.compare or [args.connector]
    made = [variants.named(text, args.extra_config, host, max(1, args.engines)) for text in words]
    names = [variant.name for variant in made]
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"variants need different names: {', '.join(names)}")
    if any(not variant.urls for variant in made) and not args.engines:
        raise argparse.ArgumentTypeError("--compare with a connector needs --engines N")
    return made


def limits(args: argparse.Namespace) -> Limits:
    return Limits(args.concurrency, args.active, args.rate, args.duration)


def settings(args: argparse.Namespace, needs: Needs, host: int) -> dict[str, Any]:
    """What was asked for and what followed, without where things lie on this machine."""
    out = {name: value for name, value in vars(args).items() if name not in UNPUBLISHED}
    out |= {"needs": vars(needs), "host_bytes": host}
    out["header"] = [text.partition(":")[0] for text in args.header]  # what they say may be a secret
    return {name: _plain(value) for name, value in out.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return str(value) if isinstance(value, Lengths) else value

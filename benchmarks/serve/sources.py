"""Conversations out of data sets: vLLM's own loaders for those they know, and whole conversations of ShareGPT.

Importing vLLM takes seconds, and a tokenizer files: both only where a data set is asked for.
"""

import argparse
import json
import random
import shlex
from pathlib import Path
from typing import Any

from .conversations import Conversation, Turn


class NoData(RuntimeError):
    """A data set is not what was expected, or gives nothing."""


def tokenizer_of(model: str) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(model)


def from_vllm(flags: str, tokenizer: Any) -> list[Conversation]:
    """What ``vllm bench serve`` would send for these of its flags (--dataset-name, --num-prompts and so on): every
    request a conversation of one turn, asked at the trace's time if it is one (timed_trace).

    Raises NoData for multi-modal data, which has no token ids.
    """
    from vllm.benchmarks.datasets.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="--vllm-dataset", allow_abbrev=False)
    add_dataset_parser(parser)
    known = parser.parse_args(shlex.split(flags))
    known.backend = "openai"  # what the loaders ask for where only some backends will do
    known.request_id_prefix = ""
    made = []
    for number, sample in enumerate(get_samples(known, tokenizer)):
        if sample.multi_modal_data is not None:
            raise NoData(f"{flags!r} gives multi-modal requests; this benchmark sends token ids")
        turn = Turn(_ids(sample.prompt, tokenizer), max(1, sample.expected_output_len), sample.timestamp)
        made.append(Conversation(number, [], [turn]))
    return _not_empty(made, flags)


def from_sharegpt(
    path: Path, tokenizer: Any, count: int, most_turns: int, longest: int, seed: int
) -> list[Conversation]:
    """Whole conversations; vLLM's loader keeps only the first turn.

    The file: a list of ``{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}``. An answer may be as
    long as the one in the file. Picks ``count`` at random. Raises NoData if there is none that fits.
    """
    try:
        entries = [entry["conversations"] for entry in json.loads(path.read_text("utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise NoData(f"{path} is no list of objects with 'conversations' as ShareGPT's files are: {error!r}") from error
    random.Random(seed).shuffle(entries)
    made: list[Conversation] = []
    for entry in entries:
        if len(made) == count:
            break
        turns, total = [], 0
        for asked, answered in _pairs(entry):
            turn = Turn(_ids(asked, tokenizer), max(1, len(_ids(answered, tokenizer))))
            total += len(turn.new) + turn.output
            if len(turns) == most_turns or (longest and total > longest):
                break
            turns.append(turn)
        if turns:
            made.append(Conversation(len(made), [], turns))
    return _not_empty(made, str(path))


def _pairs(entry: list[dict[str, str]]) -> list[tuple[str, str]]:
    """Each question with its answer; what stands alone is left out."""
    said = [(part["from"] in ("human", "user"), part["value"]) for part in entry]
    return [(a, b) for (user, a), (again, b) in zip(said, said[1:], strict=False) if user and not again and a and b]


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    raise NoData(f"a prompt is neither text nor token ids but {str(prompt)[:80]!r}")


def _not_empty(made: list[Conversation], origin: str) -> list[Conversation]:
    if not made:
        raise NoData(f"{origin} gives no conversation")
    return made


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sharegpt", type=Path, metavar="FILE", help="whole conversations out of ShareGPT's JSON")
    group.add_argument(
        "--vllm-dataset", metavar="FLAGS",
        help="vLLM's data sets, with the flags that `vllm bench serve` takes for them: "
        '"--dataset-name prefix_repetition --num-prompts 100"; timed_trace is asked at its own times',
    )  # fmt: skip

"""Which GPUs a demo uses, by the names that CUDA_VISIBLE_DEVICES takes: index, or the UUID of a GPU or MIG device."""

import argparse
import os
import re
from itertools import takewhile

_NAME = re.compile(r"\d+|(GPU|MIG)-.+")


def visible() -> list[str] | None:
    """Those of this process: of CUDA_VISIBLE_DEVICES up to what is no name, as CUDA reads it ("-1": none). None: all of
    the machine."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if given is None else list(takewhile(_NAME.fullmatch, map(str.strip, given.split(","))))


def chosen(words: str) -> list[str]:
    """``words``: an argument, with commas. An index is one into the visible devices, as in a program that CUDA gives
    these. Raises ArgumentTypeError for what is no name, or an index of none."""
    found, names = visible(), []
    for word in filter(None, map(str.strip, words.split(","))):
        if not _NAME.fullmatch(word):
            raise argparse.ArgumentTypeError(f"{word!r} is no device: an index, GPU-... or MIG-...")
        if word.isdigit() and found is not None:
            if int(word) >= len(found):
                raise argparse.ArgumentTypeError(f"no device {word}: CUDA_VISIBLE_DEVICES names {len(found)}")
            word = found[int(word)]
        names.append(word)
    return names

"""Keeps a folder within a size: the files that were not used for the longest time go first.

    python benchmarks/replay/trim.py FOLDER BYTES

vLLM's fs tier never deletes a file. Runs in a process of its own, beside the engine, until its standard input ends.
"""

import argparse
import os
import select
import sys
from contextlib import suppress
from pathlib import Path

EVERY_SECONDS = 1.0
DOWN_TO = 0.95  # of the size: not every new file is another walk


def trim(folder: Path, size: int) -> int:
    """Bytes that were deleted."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # renamed or deleted meanwhile
                if name.endswith(".bin"):  # blocks: the tier's own description is small and must stay
                    stat = os.stat(path := os.path.join(root, name))
                    found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    over = sum(nbytes for _, nbytes, _ in found) - size
    if over <= 0:
        return 0
    over += int((1 - DOWN_TO) * size)
    gone = 0
    for _, nbytes, path in sorted(found):
        if gone >= over:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        gone += nbytes
    return gone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("bytes", type=int)
    args = parser.parse_args()
    while not select.select([sys.stdin], [], [], EVERY_SECONDS)[0]:
        trim(args.folder, args.bytes)


if __name__ == "__main__":
    sys.exit(main())

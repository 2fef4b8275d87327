"""How copies are done on a device: which way, how many programs, how large the pieces. Each constant with its reason.

``benchmarks/copy --tune`` measures this machine and writes :func:`cache_file`, which is then used in place of the
defaults here.
"""

import json
import os
from pathlib import Path
from typing import Literal

import msgspec

from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.tuning")

Way = Literal["direct", "staged", "mixed"]

# A DMA engine takes what is next of the stream it is at until that stream has nothing for it. Whatever else leaves the
# GPU waits: the tokens of every step, 4 bytes each, waited 19 ms on an H200 while pieces of 64 MiB were stored, and for
# as long as there were any with smaller ones. With a pause after so much they wait 0.12 ms, and stores make 46 to 51
# GB/s instead of 54. (Event waits between two streams are no pause.)
TURN = 8 << 20


class Choice(msgspec.Struct, frozen=True):
    """How blocks of some size go in one direction.

    direct   a kernel reads or writes the slots over the link: no gap between blocks, but in packets of 128 bytes,
             which is 0.93 of what the DMA engines reach with 256
    staged   a kernel between the cache and a ring on the GPU, DMA engines between the ring and the slots: full
             packets, and some microseconds for each copy, so for large or adjacent slots
    mixed    both at once, each on a share of the blocks: the kernel uses the link while the engines set up. Only
             where slots are scattered and nothing goes the other way, else staged
    """

    way: Way = "staged"
    programs: int = 8  # SMs of the kernel in this direction; where mixed, of both kernels
    warps: int = 8
    piece_bytes: int = 64 << 20  # of one buffer of the ring, and about what one call should bring
    ring: int = 2
    dma_streams: int = 1
    turn_bytes: int = TURN  # staged stores: of one DMA stream, before other streams have their turn
    direct_share: float = 0.5  # mixed: of the blocks
    direct_programs: int = 8  # mixed: of the programs
    numbers: int = 0  # coded: of a tile of the kernel; 0: tiles and warps as its format says
    stages: int = 1  # coded: tiles that a program has under way


class Rule(msgspec.Struct, frozen=True):
    """``choice`` holds for parts of less than ``below`` bytes (None: any), unless an earlier rule does."""

    below: int | None
    choice: Choice


# Of coded parts, on an H200 (benchmarks/codec): 16 programs keep up with the link in stores (formats that take more to
# encode take more of them by themselves), 24 in loads, which somebody waits for: 3.51 of memcpy for int4 and 3.69 for
# rot4 instead of 3.45 and 3.37. Half as large pieces as for raw parts, since they hold two to four
# times as much to be coded before the first of a call can leave, and a third buffer: loads of int4 run at 0.99 of the
# link so, and at 0.92 with 64 MiB x 2. Parts of less than 1 MiB in scattered slots lose the 0.6 us a copy that raw ones
# lose; a kernel that wrote a share of the rows from the ring to the slots gained 0.03 with fp8 and lost with 4 bits.
CODED = Choice(programs=16, piece_bytes=32 << 20, ring=3)
CODED_LOAD = msgspec.structs.replace(CODED, programs=24)


class Tuning(msgspec.Struct, frozen=True):
    """Rules for the two directions, smallest sizes first; the last of each has ``below`` None. ``part_bytes`` of coded
    parts are those of what is kept; they are always staged."""

    device: str
    store: tuple[Rule, ...]
    load: tuple[Rule, ...]
    coded_store: tuple[Rule, ...] = (Rule(None, CODED),)
    coded_load: tuple[Rule, ...] = (Rule(None, CODED_LOAD),)

    def choose(self, gather: bool, part_bytes: int, coded: bool = False) -> Choice:
        if coded:
            rules = self.coded_store if gather else self.coded_load
        else:
            rules = self.store if gather else self.load
        return next(r.choice for r in rules if r.below is None or part_bytes < r.below)


def fixed(store: Choice, load: Choice, device: str = "fixed") -> Tuning:
    """The same choices for every size, coded or not."""
    raw = [(Rule(None, choice),) for choice in (store, load)]
    coded = [(Rule(None, msgspec.structs.replace(choice, way="staged")),) for choice in (store, load)]
    return Tuning(device, *raw, *coded)


def changed(tuning: Tuning, **values: object) -> Tuning:
    """The same with these fields of every choice for coded parts changed (for measurements)."""
    rules = {
        name: tuple(Rule(r.below, msgspec.structs.replace(r.choice, **values)) for r in getattr(tuning, name))
        for name in ("coded_store", "coded_load")
    }
    return msgspec.structs.replace(tuning, **rules)


DEFAULT = fixed(Choice(), Choice(), "default")
# By the name that torch gives the device. H200 on PCIe 5 (benchmarks/copy, shares of memcpy): staged reaches 0.97 to
# 0.99 into the GPU at any size with 16 programs (0.90 with 8: the check needs them), and out of it from 1 MiB on with
# 8; 64 MiB pieces cost the host half of what 32 MiB cost. Scattered parts of less than 1 MiB lose some 0.6 us each on
# the way out: 0.88 at 288 KiB, with half of the blocks by a kernel meanwhile 0.95. More DMA streams gain nothing.
_SMALL_STORES = Choice("mixed", programs=16, direct_share=0.6, direct_programs=8)
MEASURED: dict[str, Tuning] = {
    "NVIDIA H200": Tuning(
        "NVIDIA H200", (Rule(1 << 20, _SMALL_STORES), Rule(None, Choice())), (Rule(None, Choice(programs=16)),)
    )
}


def cache_file(device: str) -> Path:
    """Where this user keeps what was measured for a device of this name."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    return home / "vllm-kvtier" / f"copies-{name}.json"


def for_device(device: str) -> Tuning:
    """Measured on this machine, else measured on such a device, else the default.

    A file that cannot be used costs speed and no more: a warning says so.
    """
    file = cache_file(device)
    try:
        return _checked(msgspec.json.decode(file.read_bytes(), type=Tuning))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        words = "kvtier: %s does not say how to copy (%s) and is not used: delete it, or run benchmarks/copy --tune"
        logger.warning(words, file, error)
    return MEASURED.get(device, DEFAULT)


def save(tuning: Tuning) -> Path:
    """Writes the file that :func:`for_device` prefers; returns its path."""
    file = cache_file(_checked(tuning).device)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(msgspec.to_builtins(tuning), indent=1) + "\n")
    draft.replace(file)
    return file


def _checked(tuning: Tuning) -> Tuning:
    for name in ("store", "load", "coded_store", "coded_load"):
        rules = getattr(tuning, name)
        if not rules or rules[-1].below is not None:
            raise ValueError(f"the last {name} rule must hold for every size")
        for choice in (r.choice for r in rules):
            counts = (
                choice.programs, choice.warps, choice.piece_bytes, choice.ring, choice.dma_streams, choice.turn_bytes,
            )  # fmt: skip
            shared = 0 <= choice.direct_share <= 1 and 0 < choice.direct_programs < choice.programs
            tile = choice.numbers & (choice.numbers - 1) or choice.stages < 1
            coded = name.startswith("coded") and choice.way != "staged"
            if min(counts) < 1 or (choice.way == "mixed" and not shared) or tile or coded:
                raise ValueError(f"no such way to {name}: {choice}")
    return tuning

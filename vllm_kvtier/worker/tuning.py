"""How copies run on a device: the way, the number of programs, the size of the pieces. Each constant has its reason.

``benchmarks/copy --tune`` measures this machine and writes :func:`cache_file`, which replaces the defaults here.
"""

import json
import os
from pathlib import Path
from typing import Literal

import msgspec

from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

Way = Literal["direct", "staged", "mixed"]

# Bytes after which a store pauses its DMA stream. A DMA engine stays with one stream until that stream has no work for
# it, and everything else that leaves the GPU waits. On an H200 the tokens of a step, 4 bytes each, waited 19 ms while
# pieces of 64 MiB were stored, and for the whole store with smaller pieces. With these pauses they wait 0.12 ms, and
# stores run at 46 to 51 GB/s instead of 54. (Event waits between two streams are no pause.)
PAUSE_BYTES = 8 << 20


class Choice(msgspec.Struct, frozen=True):
    """How blocks of some size are copied in one direction.

    direct   a kernel reads or writes the slots over the link: no gap between blocks, but in packets of 128 bytes,
             which is 0.93 of what the DMA engines reach with 256
    staged   a kernel between the cache and a ring on the GPU, DMA engines between the ring and the slots: full
             packets, but some microseconds for each copy; for large or adjacent slots
    mixed    both at once, each on a share of the blocks: the kernel uses the link while the engines set up. Only
             where slots are scattered and nothing is copied in the other direction, else staged
    """

    way: Way = "staged"
    programs: int = 8  # SMs of the kernel in this direction; where mixed, of both kernels
    warps: int = 8
    piece_bytes: int = 64 << 20  # of one buffer of the ring, and about what one call should bring
    ring: int = 2
    dma_streams: int = 1
    pause_bytes: int = PAUSE_BYTES  # staged stores: of one DMA stream between pauses
    direct_share: float = 0.5  # mixed: of the blocks
    direct_programs: int = 8  # mixed: of the programs
    on_model_stream: bool = False  # raw, staged or mixed stores: see MODEL_STREAM_PROGRAMS
    numbers: int = 0  # encoded: of a tile of the kernel; 0: tiles and warps of the format
    stages: int = 1  # encoded: tiles that a program has under way


class Rule(msgspec.Struct, frozen=True):
    """``choice`` holds for parts of less than ``below`` bytes (None: any), unless an earlier rule does."""

    below: int | None
    choice: Choice


# Encoded parts, on an H200 (benchmarks/codec). In stores 16 programs keep up with the link; formats that are slower to
# encode take more by themselves. In loads, which requests wait for, 24: 3.51 times memcpy for int4 and 3.69 for rot4,
# instead of 3.45 and 3.37. Pieces are half as large as for raw parts, since they hold two to four times as much to
# encode before the first piece of a call can leave; with a third buffer loads of int4 run at 0.99 of the link, and at
# 0.92 with 64 MiB x 2. Parts of less than 1 MiB in scattered slots lose 0.6 us a copy, as raw parts do. A kernel that
# wrote a share of the rows from the ring to the slots gained 0.03 with fp8 and lost with 4 bits.
ENCODED = Choice(programs=16, piece_bytes=32 << 20, ring=3)
ENCODED_LOAD = msgspec.structs.replace(ENCODED, programs=24)


class Tuning(msgspec.Struct, frozen=True):
    """Rules for the two directions, smallest sizes first; the last rule of each has ``below`` None. For encoded parts
    ``part_bytes`` is the encoded size; they are always staged."""

    device: str
    store: tuple[Rule, ...]
    load: tuple[Rule, ...]
    encoded_store: tuple[Rule, ...] = (Rule(None, ENCODED),)
    encoded_load: tuple[Rule, ...] = (Rule(None, ENCODED_LOAD),)

    def choose(self, gather: bool, part_bytes: int, encoded: bool = False) -> Choice:
        if encoded:
            rules = self.encoded_store if gather else self.encoded_load
        else:
            rules = self.store if gather else self.load
        return next(r.choice for r in rules if r.below is None or part_bytes < r.below)


def fixed(store: Choice, load: Choice, device: str = "fixed") -> Tuning:
    """The same choices for every size, encoded or not."""
    raw = [(Rule(None, choice),) for choice in (store, load)]
    encoded = [(Rule(None, msgspec.structs.replace(choice, way="staged")),) for choice in (store, load)]
    return Tuning(device, *raw, *encoded)


def changed(tuning: Tuning, *names: str, **values: object) -> Tuning:
    """The same with these fields of every choice of the rules ``names`` changed (for measurements); without names: of
    those for encoded parts."""
    rules = {
        name: tuple(Rule(r.below, msgspec.structs.replace(r.choice, **values)) for r in getattr(tuning, name))
        for name in names or ("encoded_store", "encoded_load")
    }
    return msgspec.structs.replace(tuning, **rules)


DEFAULT = fixed(Choice(), Choice(), "default")
# Hopper, measured on an H200 with PCIe 5 (benchmarks/copy, shares of memcpy): into the GPU, staged copies reach 0.97 to
# 0.99 at any size with 16 programs (0.90 with 8: the check needs them); out of it, from 1 MiB on with 8. Pieces of 64
# MiB cost the host half of what 32 MiB cost. Scattered parts of less than 1 MiB lose some 0.6 us each on the way out:
# 0.88 at 288 KiB, and 0.95 if a kernel copies half of the blocks. More DMA streams gain nothing.
STORE_PROGRAMS, LOAD_PROGRAMS, DIRECT_PROGRAMS = 8, 16, 8
_STORES = Choice(programs=STORE_PROGRAMS, on_model_stream=True)
_SMALL_STORES = msgspec.structs.replace(
    _STORES, way="mixed", programs=STORE_PROGRAMS + DIRECT_PROGRAMS, direct_share=0.6, direct_programs=DIRECT_PROGRAMS
)
_HOPPER = Tuning(
    "Hopper",
    (Rule(1 << 20, _SMALL_STORES), Rule(None, _STORES)),
    (Rule(None, Choice(programs=LOAD_PROGRAMS)),),
)
# By torch's name of the device.
MEASURED: dict[str, Tuning] = {
    name: msgspec.structs.replace(_HOPPER, device=name)
    for name in ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL")
}
# Of the copies' streams. Before the model's kernels (0): behind a prefill, whose kernels each fill the GPU for
# milliseconds, copies reached 3.4 GB/s on an H200.
STORE_PRIORITY, LOAD_PRIORITY = -1, -2
# Once a process has run a kernel on a second stream, an H200 mostly begins each kernel of the first 0.42 us behind the
# one before it instead of 0.07, also when the second one is empty again, and until chance ends it: 0.19 ms of a decode
# step of 530 kernels (benchmarks/kernel_gaps.py). With ``on_model_stream`` stores gather there, two programs for each
# SM, as much at a time as the ring has room for: 0.993 of vLLM alone while decoding instead of 0.968. What is older
# than MODEL_STREAM_SECONDS since its step ended, because steps are long or too many blocks were computed, is gathered
# beside the model.
MODEL_STREAM_PROGRAMS = 264
MODEL_STREAM_SECONDS = 0.2


def cache_file(device: str, home: Path | None = None) -> Path:
    """The file of measurements for devices of this name in ``home``, by default the user's cache."""
    # Raises nothing for a user without a home directory, as in some containers.
    home = home or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = "".join(c if c.isalnum() else "-" for c in device.lower()).strip("-")
    return home / "vllm-kvtier" / f"copies-{name}.json"


def for_device(device: str) -> Tuning:
    """The tuning measured on this machine, else the one for such a device, else the default. A file that cannot be
    used is logged and ignored."""
    file = cache_file(device)
    try:
        return _checked(msgspec.json.decode(file.read_bytes(), type=Tuning))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        words = "kvtier: copy: %s is not a tuning (%s) and is ignored; delete it, or run benchmarks/copy --tune"
        logger.warning(words, file, error)
    return MEASURED.get(device, DEFAULT)


def save(tuning: Tuning, home: Path | None = None) -> Path:
    """Write the file that :func:`for_device` prefers (``home``: as in ``cache_file``); returns its path."""
    file = cache_file(_checked(tuning).device, home)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(msgspec.to_builtins(tuning), indent=1) + "\n")
    draft.replace(file)
    return file


def _checked(tuning: Tuning) -> Tuning:
    for name in ("store", "load", "encoded_store", "encoded_load"):
        rules = getattr(tuning, name)
        if not rules or rules[-1].below is not None:
            raise ValueError(f"the last {name} rule must have below=None")
        for choice in (r.choice for r in rules):
            counts = (
                choice.programs, choice.warps, choice.piece_bytes, choice.ring, choice.dma_streams, choice.pause_bytes,
            )  # fmt: skip
            shared = 0 <= choice.direct_share <= 1 and 0 < choice.direct_programs < choice.programs
            tile = choice.numbers & (choice.numbers - 1) or choice.stages < 1
            encoded = name.startswith("encoded") and choice.way != "staged"
            if min(counts) < 1 or (choice.way == "mixed" and not shared) or tile or encoded:
                raise ValueError(f"an impossible choice for {name}: {choice}")
    return tuning

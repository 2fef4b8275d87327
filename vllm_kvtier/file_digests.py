"""Digests of files of weights: by samples of every tensor, remembered for as long as a file is not written to.

A file of 5 GiB cannot be read whole at each start, and evenly spaced samples miss small tensors (scales, norms). Where
each tensor lies is written in the file, in safetensors, GGUF and PyTorch's zip format alike. So all tensors of up to
``WHOLE`` bytes are read whole; of larger ones the first and the last page, and pages between them at most ``STRIDE``
apart, ``FEWEST`` at least. A tensor that was trained, scaled or quantized anew differs nearly everywhere and is
noticed, as is any run of ``STRIDE`` bytes. What is not: a few numbers in the middle of a large tensor, as one row of an
embedding.

That is some 5,000 reads for a model of 16 GB and 230,000 for one of 700 GB with 45,000 experts, ``THREADS`` at a time.
"""

import hashlib
import json
import os
import queue
import struct
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.fingerprint")

PAGE = 4 << 10
WHOLE = 64 << 10
STRIDE = 4 << 20
FEWEST = 4
BLIND_STRIDE = 32 << 10  # where a file does not say where its tensors lie
THREADS = 8
CHUNK = 1 << 20  # bytes a read, at most
MAX_HEADER = 100 << 20  # safetensors' own limit
MOST_REMEMBERED = 8192  # files
# A file system's clock ticks every few milliseconds: a second change within a tick leaves the times as they are. Where
# the change time has whole seconds only, nothing is remembered.
SETTLED_NS = 2_000_000_000
_VERSION = 1  # of what a digest is made of, and of the file that remembers them

_MALFORMED = (
    ValueError, KeyError, TypeError, AttributeError, RecursionError, NotImplementedError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip

Span = tuple[int, int]  # first byte, and the one after the last


class Changed(OSError):
    """A file was written to while it was read."""


def file_digests(files: Sequence[Path]) -> list[str]:
    """32 hexadecimal digits a file, which say nothing of its name. Raises OSError for what cannot be read, or changes
    meanwhile."""
    remembered = _load(_memory())
    before = [os.stat(file) for file in files]
    keys = [_key(state) for state in before]
    missing = [i for i, key in enumerate(keys) if key not in remembered]
    if not missing:
        return [remembered[key] for key in keys]
    made = dict(zip(missing, _digests([files[i] for i in missing]), strict=True))
    for i in missing:
        if _key(os.stat(files[i])) != keys[i]:
            raise Changed(f"{files[i]} was written to while it was read")
    old = time.time_ns() - SETTLED_NS
    times = {i: (before[i].st_mtime_ns, before[i].st_ctime_ns) for i in made}
    settled = {keys[i]: d for i, d in made.items() if max(times[i]) < old and times[i][1] % 1_000_000_000}
    if settled:
        _remember(_memory(), settled)
    return [made[i] if i in made else remembered[key] for i, key in enumerate(keys)]


def _key(state: os.stat_result) -> str:
    """The change time is the kernel's own: tools that set the modification time back cannot set that."""
    return f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"


def _digests(files: list[Path]) -> list[str]:
    """By threads that do not keep the interpreter from exiting, as those of an executor: a file system may hang."""
    left: queue.SimpleQueue[tuple[int, Path]] = queue.SimpleQueue()
    for each in enumerate(files):
        left.put(each)
    found, errors = [""] * len(files), []

    def work() -> None:
        try:
            while not errors:
                i, file = left.get_nowait()
                found[i] = _digest(file)
        except queue.Empty:
            return
        except Exception as error:
            errors.append(error)

    count = min(THREADS, len(files))
    threads = [threading.Thread(target=work, name="kvtier-digests", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(f"{_VERSION}|{size}|".encode())
        for start, end in _joined(_samples(stream, size)):
            while start < end:
                data = os.pread(stream.fileno(), min(CHUNK, end - start), start)
                if not data:
                    raise Changed(f"{file} became shorter while it was read")
                digest.update(data)
                start += len(data)
    return digest.hexdigest()


# -- which bytes are read --------------------------------------------------------------------------------------------


def _samples(stream: BinaryIO, size: int) -> Iterator[Span]:
    """In rising order; they may touch. A file that is not what it seems to be is sampled blindly."""
    for read in (_safetensors, _zip, _gguf):
        try:
            tensors = read(stream, size)
        except _MALFORMED:
            continue
        head = min((start for start, _ in tensors), default=size)
        yield 0, head
        for start, end in tensors:
            yield from _pages(start, end, STRIDE)
        yield max((end for _, end in tensors), default=size), size
        return
    yield from _pages(0, size, BLIND_STRIDE)


def _pages(start: int, end: int, stride: int) -> Iterator[Span]:
    """Of one tensor."""
    if end - start <= WHOLE:
        yield start, end
        return
    last = end - PAGE
    gaps = max(FEWEST - 1, -(-(last - start) // stride))
    for i in range(gaps + 1):
        at = start + (last - start) * i // gaps
        yield at, at + PAGE


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Thousands of small tensors in a row are read together."""
    first = after = 0
    for start, end in spans:
        if start > after:
            if after > first:
                yield first, after
            first = start
        after = max(after, end)
    if after > first:
        yield first, after


def _ordered(tensors: list[Span], size: int) -> list[Span]:
    """Raises ValueError unless they lie in the file."""
    tensors = sorted(span for span in tensors if span[0] != span[1])
    if any(not (isinstance(start, int) and 0 <= start < end <= size) for start, end in tensors):
        raise ValueError("tensors beyond the file's end")
    return tensors


def _safetensors(stream: BinaryIO, size: int) -> list[Span]:
    """Its length (8 bytes) and a header of JSON: name -> "data_offsets", from the header's end."""
    stream.seek(0)
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > min(size - 8, MAX_HEADER):
        raise ValueError("not a header of safetensors")
    header = json.loads(stream.read(length))
    offsets = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return _ordered([(8 + length + start, 8 + length + end) for start, end in offsets], size)


def _zip(stream: BinaryIO, size: int) -> list[Span]:
    """As torch.save writes: a zip archive, not compressed, a file in it for each storage."""
    stream.seek(0)
    if stream.read(2) != b"PK":
        raise ValueError("not a zip archive")
    with zipfile.ZipFile(stream) as archive:
        places = sorted({member.header_offset for member in archive.infolist()})
        return _ordered(list(zip(places, [*places[1:], archive.start_dir], strict=True)), size)


_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # value type -> bytes
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def _gguf(stream: BinaryIO, size: int) -> list[Span]:
    """https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3; a tensor ends where the next one
    begins."""

    def number(form: str) -> int:
        return struct.unpack("<" + form, stream.read(struct.calcsize(form)))[0]

    def skip(nbytes: int) -> None:
        if stream.tell() + nbytes > size:
            raise ValueError("a value beyond the file's end")
        stream.seek(nbytes, os.SEEK_CUR)

    def value(kind: int) -> int | None:
        if kind == 4:
            return number("I")
        if kind == _GGUF_STRING:
            skip(number("Q"))
        elif kind == _GGUF_ARRAY:
            inner, count = number("I"), number("Q")
            if inner in _GGUF_SIZES:
                skip(_GGUF_SIZES[inner] * count)
            else:
                for _ in range(count):
                    value(inner)
        else:
            skip(_GGUF_SIZES[kind])
        return None

    stream.seek(0)
    if stream.read(4) != b"GGUF" or number("I") not in (2, 3):
        raise ValueError("not GGUF")
    tensors, pairs = number("Q"), number("Q")
    alignment = 32
    for _ in range(pairs):
        key = stream.read(min(number("Q"), size))
        found = value(number("I"))
        if key == b"general.alignment" and found:
            alignment = found
    offsets = []
    for _ in range(tensors):
        skip(number("Q"))
        skip(8 * number("I"))
        number("I")  # its type
        offsets.append(number("Q"))
    data = -(-stream.tell() // alignment) * alignment
    places = sorted({data + offset for offset in offsets})
    return _ordered(list(zip(places, [*places[1:], size], strict=True)), size)


# -- what is remembered ----------------------------------------------------------------------------------------------


def _memory() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(folder) / "vllm-kvtier" / "digests.json"


def _load(file: Path) -> dict[str, str]:
    """Whatever is wrong with it: then nothing is remembered."""
    try:
        found = json.loads(file.read_bytes())
        digests = found["digests"]
        good = all(len(bytes.fromhex(digest)) == 16 for digest in digests.values())
        return digests if found["version"] == _VERSION and good else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("kvtier: digests of weights are made anew, %s cannot be used: %s", file, error)
        return {}


def _remember(file: Path, new: dict[str, str]) -> None:
    """As a whole or not at all; of two processes that write at once, what one adds may be missing."""
    digests = _load(file) | new
    kept = dict(list(digests.items())[-MOST_REMEMBERED:])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as stream:
            json.dump({"version": _VERSION, "digests": kept}, stream)
        os.replace(stream.name, file)
    except OSError as error:
        logger.info("kvtier: digests of weights are made at each start, %s cannot be written: %s", file, error)

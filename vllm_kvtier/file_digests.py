"""Digests of files of weights, from samples of every tensor; cached until a file is written to. Any thread.

A file of 5 GiB cannot be read whole at each start, and evenly spaced samples miss small tensors (scales, norms). But
safetensors, GGUF and PyTorch's zip format list the position of each tensor. So tensors of up to ``WHOLE_BYTES`` are
read whole. Of larger ones the first and the last page are read, and pages between them at most ``STRIDE_BYTES`` apart,
at least ``MIN_SAMPLES``. A tensor that was trained, scaled or quantized anew differs nearly everywhere and is noticed,
as is any run of ``STRIDE_BYTES``. A few numbers in the middle of a large tensor, such as one row of an embedding, are
not.

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

logger = get_logger(__name__)

PAGE = 4 << 10
WHOLE_BYTES = 64 << 10
STRIDE_BYTES = 4 << 20
MIN_SAMPLES = 4
BLIND_STRIDE_BYTES = 32 << 10  # for files without a list of tensors
THREADS = 8
READ_BYTES = 1 << 20  # bytes a read, at most
MAX_HEADER = 100 << 20  # safetensors' own limit
MAX_REMEMBERED = 8192  # files
# Age of a file's last change before its digest is cached: a file system's clock ticks every few milliseconds, and a
# second change within a tick does not change the times. Where change times have whole seconds only, nothing is cached.
SETTLED_NS = 2_000_000_000
_VERSION = 1  # of the digests and of the cache file

_MALFORMED = (
    ValueError, KeyError, TypeError, AttributeError, RecursionError, NotImplementedError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip

Span = tuple[int, int]  # first byte, and the one after the last


class Changed(OSError):
    """A file was written to while it was read."""


def file_digests(files: Sequence[Path]) -> list[str]:
    """A digest of 32 hexadecimal digits per file, independent of its name. Raises OSError for a file that cannot be
    read or changes meanwhile."""
    memory = _memory()
    remembered = _load(memory) if memory else {}
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
    if memory and settled:
        _remember(memory, settled)
    return [made[i] if i in made else remembered[key] for i, key in enumerate(keys)]


def _key(state: os.stat_result) -> str:
    """Contains the change time, which no tool can set, unlike the modification time."""
    return f"{state.st_dev}:{state.st_ino}:{state.st_size}:{state.st_mtime_ns}:{state.st_ctime_ns}"


def _digests(files: list[Path]) -> list[str]:
    """On daemon threads, because an executor's would keep the interpreter from exiting if a file system hangs."""
    left: queue.SimpleQueue[tuple[int, Path]] = queue.SimpleQueue()
    for each in enumerate(files):
        left.put(each)
    found = [""] * len(files)
    errors: list[Exception] = []

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
                data = os.pread(stream.fileno(), min(READ_BYTES, end - start), start)
                if not data:
                    raise Changed(f"{file} became shorter while it was read")
                digest.update(data)
                start += len(data)
    return digest.hexdigest()


# -- which bytes are read --------------------------------------------------------------------------------------------


def _samples(stream: BinaryIO, size: int) -> Iterator[Span]:
    """In rising order; they may touch. JSON is read whole. Any other format is sampled at even distances."""
    for read in (_safetensors, _zip, _gguf):
        try:
            tensors = read(stream, size)
        except _MALFORMED:
            continue
        head = min((start for start, _ in tensors), default=size)
        yield 0, head
        for start, end in tensors:
            yield from _pages(start, end, STRIDE_BYTES)
        yield max((end for _, end in tensors), default=size), size
        return
    if size <= MAX_HEADER and os.pread(stream.fileno(), 1, 0) == b"{":  # JSON may differ in one word
        yield 0, size
    else:
        yield from _pages(0, size, BLIND_STRIDE_BYTES)


def _pages(start: int, end: int, stride: int) -> Iterator[Span]:
    """Samples of one tensor."""
    if end - start <= WHOLE_BYTES:
        yield start, end
        return
    last = end - PAGE
    gaps = max(MIN_SAMPLES - 1, -(-(last - start) // stride))
    for i in range(gaps + 1):
        at = start + (last - start) * i // gaps
        yield at, at + PAGE


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Merge adjacent samples: thousands of small tensors are read together."""
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
    """Sorted, without empty ones. Raises ValueError unless all are within the file."""
    tensors = sorted(span for span in tensors if span[0] != span[1])
    if any(not (isinstance(start, int) and 0 <= start < end <= size) for start, end in tensors):
        raise ValueError("tensors beyond the file's end")
    return tensors


def _safetensors(stream: BinaryIO, size: int) -> list[Span]:
    """The header's length (8 bytes), then JSON: name -> "data_offsets", counted from the header's end."""
    stream.seek(0)
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > min(size - 8, MAX_HEADER):
        raise ValueError("not a header of safetensors")
    header = json.loads(stream.read(length))
    offsets = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return _ordered([(8 + length + start, 8 + length + end) for start, end in offsets], size)


def _zip(stream: BinaryIO, size: int) -> list[Span]:
    """As torch.save writes: an uncompressed zip archive with a file for each storage."""
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
        value: int = struct.unpack("<" + form, stream.read(struct.calcsize(form)))[0]
        return value

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


# -- the cache file --------------------------------------------------------------------------------------------------


def _memory() -> Path | None:
    """None for a user without a home directory, as in some containers: "~" stays as it is."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "vllm-kvtier" / "digests.json" if os.path.isabs(folder) else None


def _load(file: Path) -> dict[str, str]:
    """Empty if the file is missing or malformed."""
    try:
        found = json.loads(file.read_bytes())
        digests = found["digests"]
        good = all(len(bytes.fromhex(digest)) == 16 for digest in digests.values())
        return digests if found["version"] == _VERSION and good else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("kvtier: file digests: cache %s is unusable (%s); weights are read again", file, error)
        return {}


def _remember(file: Path, new: dict[str, str]) -> None:
    """Replace the file atomically. If two processes write at once, the additions of one may be lost."""
    digests = _load(file) | new
    kept = dict(list(digests.items())[-MAX_REMEMBERED:])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # nothing is left of it on a full disk
            draft = Path(folder, file.name)
            draft.touch(0o600)
            draft.write_text(json.dumps({"version": _VERSION, "digests": kept}))
            os.replace(draft, file)
    except OSError as error:
        logger.info(
            "kvtier: file digests: cache %s cannot be written (%s); weights are read at each start", file, error
        )

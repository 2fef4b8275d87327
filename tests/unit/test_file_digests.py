"""What a digest of weights notices in files of real size, how much is read for it, and what is remembered."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvtier import file_digests, fingerprint
from vllm_kvtier.file_digests import file_digests as digests_of

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-kvtier" / "digests.json"


def test_file_digests_hung_file_system_does_not_block_exit(tmp_path):
    script = """
import threading, sys
from pathlib import Path
from vllm_kvtier import file_digests
hangs = threading.Event()
file_digests._digest = lambda file: hangs.set() or threading.Event().wait()
threading.Thread(target=file_digests.file_digests, args=([Path(sys.argv[1])],), daemon=True).start()
hangs.wait()
"""
    (tmp_path / "a").write_bytes(b"a")
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], timeout=60, check=True)


def test_file_digests_keep_order_and_raise_errors(tmp_path):
    files = [tmp_path / str(i) for i in range(3 * file_digests.THREADS)]
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 100)
    assert digests_of(files) == [digests_of([file])[0] for file in files]
    with pytest.raises(OSError):
        file_digests._digests([*files, tmp_path / "absent"])


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Lengths of what is read of files' content."""
    done: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, at: int) -> bytes:
        done.append(length)
        return pread(fd, length, at)

    monkeypatch.setattr(file_digests.os, "pread", counted)
    return done


def safetensors(path: Path, sizes: dict[str, int]) -> dict[str, int]:
    """A sparse file of zeros; where each tensor begins."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)
    return {name: 8 + len(text) + tensor["data_offsets"][0] for name, tensor in header.items()}


def write(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def age(*files: Path) -> None:
    """They were written long ago, as far as their times show: a change time cannot be set."""
    file_digests.SETTLED_NS, settled = -(1 << 62), file_digests.SETTLED_NS
    try:
        digests_of(files)
    finally:
        file_digests.SETTLED_NS = settled


def test_file_digests_change_with_any_tensor_of_large_file(tmp_path):
    path = tmp_path / "model.safetensors"
    sizes = {f"{i}.{name}": size for i in range(40) for name, size in [("w", 128 * MIB), ("norm", 8192), ("scale", 4)]}
    at = safetensors(path, sizes)
    seen = {digests_of([path])[0]}
    for place, data in [
        (at["7.norm"] + 4000, b"\x01"),
        (at["8.scale"], b"\x02"),
        (at["9.w"] + 21 * MIB + 12345, b"\x03" * (4 * MIB)),
        (at["39.w"], b"\x04" * (80 * MIB)),
    ]:
        write(path, place, data)
        seen.add(digests_of([path])[0])
    assert len(seen) == 5


def test_file_digests_of_many_experts_take_few_reads(tmp_path, reads):
    """The start must not wait for what would be minutes on a slow disk: reads are what counts there."""
    path = tmp_path / "model.safetensors"
    safetensors(path, {f"{i}.{name}": size for i in range(4000) for name, size in [("w", 14 * MIB), ("scale", 3584)]})
    digests_of([path])
    assert len(reads) <= 5.1 * 4000 and sum(reads) < 110e6, "of 56 GB"


def test_file_digests_are_cached_until_file_changes(tmp_path, reads, cache):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    at = safetensors(first, {"w": MIB})
    safetensors(second, {"w": 2 * MIB})
    before = digests_of([first, second])
    age(first, second)
    assert oct(cache.stat().st_mode & 0o777) == "0o600" and list(cache.parent.iterdir()) == [cache]
    reads.clear()
    assert digests_of([first, second]) == before and not reads
    state = first.stat()
    write(first, at["w"], b"\x01")
    os.utime(first, ns=(state.st_atime_ns, state.st_mtime_ns))  # as rsync and cp -p do
    after = digests_of([first, second])
    assert after[0] != before[0] and after[1] == before[1] and reads


def test_file_digests_of_just_written_file_are_not_cached(tmp_path, cache):
    """Its times may be the same after a second change, within a tick of the file system's clock."""
    path = tmp_path / "a.safetensors"
    safetensors(path, {"w": MIB})
    digests_of([path])
    assert not cache.exists()


def test_file_digests_with_coarse_change_times_are_not_cached(tmp_path, cache, monkeypatch):
    """A file that is written to twice in one second looks the same."""
    stat = os.stat

    def coarse(file):
        state = stat(file)
        times = dict.fromkeys(("st_mtime_ns", "st_ctime_ns"), state.st_ctime_ns // 10 ** 9 * 10 ** 9)
        return SimpleNamespace(**{name: getattr(state, name) for name in ("st_dev", "st_ino", "st_size")}, **times)

    file = tmp_path / "w.bin"
    file.write_bytes(b"w" * 5000)
    monkeypatch.setattr(file_digests.os, "stat", coarse)
    age(file)
    monkeypatch.undo()
    assert not cache.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"version": 1}', b'{"version": 1, "digests": []}', b'{"version": 1, "digests": {"x": 5}}',
        b'{"version": 1, "digests": {"x": "zz"}}', b'{"version": 99, "digests": {}}', b"[" * 100000, b"\xff",
    ],
)  # fmt: skip
def test_file_digests_corrupt_cache_is_replaced(tmp_path, cache, reads, content):
    path = tmp_path / "a.safetensors"
    safetensors(path, {"w": MIB})
    before = digests_of([path])
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(content)
    assert digests_of([path]) == before
    age(path)
    reads.clear()
    assert digests_of([path]) == before and not reads


def test_file_digests_that_cannot_be_cached_leave_no_file(tmp_path, cache, monkeypatch):
    def full(source, target):
        raise OSError("no space left")

    path = tmp_path / "a.safetensors"
    safetensors(path, {"w": MIB})
    monkeypatch.setattr(os, "replace", full)
    age(path)
    assert digests_of([path]) and not list(cache.parent.iterdir())


def test_file_digests_without_cache_folder_are_recomputed(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "a.safetensors"
    safetensors(path, {"w": MIB})
    age(path)
    assert digests_of([path]) == digests_of([path])


def test_file_digests_cache_is_bounded(tmp_path, monkeypatch, cache):
    monkeypatch.setattr(file_digests, "MAX_REMEMBERED", 3)
    files = [tmp_path / f"{i}.safetensors" for i in range(5)]
    for i, path in enumerate(files):
        safetensors(path, {"w": i + 1})
        age(path)
    assert len(json.loads(cache.read_bytes())["digests"]) == 3


def test_file_digests_of_file_changed_during_read_raise(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    at = safetensors(path, {"w": MIB})
    digest = file_digests._digest

    def slow(file: Path) -> str:
        found = digest(file)
        write(path, at["w"], b"\x01")
        os.utime(path, ns=(1, 1))  # whatever the clock's tick
        return found

    monkeypatch.setattr(file_digests, "_digest", slow)
    with pytest.raises(file_digests.Changed):
        digests_of([path])
    with pytest.raises(OSError):
        digests_of([tmp_path / "absent"])


def test_fingerprint_of_files_covers_all_kinds_of_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.gguf", "model.pt", "model.bin"):
        (tmp_path / name).write_bytes(b"1" * 100000)
        before = fingerprint.of_files(str(tmp_path))
        (tmp_path / name).write_bytes(b"1" * 50000 + b"2" * 50000)
        assert before and fingerprint.of_files(str(tmp_path)) not in (before, None), name

"""The files of a directory that several stores share: which are removed, when, and by whose turn."""

import os
import time
from pathlib import Path

import pytest

from vllm_kvtier.store.tiers.objects import shared_directory
from vllm_kvtier.store.tiers.objects.object_names import FORMAT, parse_url
from vllm_kvtier.store.tiers.objects.shared_directory import (
    LEFT_SECONDS,
    MAX_PAUSE,
    STAMP,
    TURN_SECONDS,
    SharedDirectory,
)
from vllm_kvtier.store.tiers.request_pool import Trouble

SIZE = 1000


@pytest.fixture
def place(tmp_path):
    (tmp_path / ".kvtier").write_bytes(FORMAT)
    return parse_url(f"file://{tmp_path}")


def store_of(place, size: int = 10 * SIZE) -> SharedDirectory:
    """One that scans whenever it may."""
    return SharedDirectory(place, size, scan_seconds=0.0)


def key_of(place, number: int) -> str:
    return place.key(b"n" * 16, 0, number.to_bytes(16, "big"))


def have(tmp_path, place, number: int, age: float = 0.0, suffix: str = ""):
    path = tmp_path / (key_of(place, number) + suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(SIZE))
    used = time.time() - age
    os.utime(path, (used, used))
    return path


def allow_turn(tmp_path):
    """The pause after the last scan is over."""
    os.utime(tmp_path / STAMP, (1.0, 1.0))


def test_scan_removes_least_recently_used_files_above_the_size(tmp_path, place):
    paths = [have(tmp_path, place, number, age=1000 * (number + 1)) for number in range(12)]
    store = store_of(place)
    store.was_used(key_of(place, 11), paths[11].stat().st_mtime)  # the oldest one, until now
    assert store.scan_if_due() == (9 * SIZE, 3)
    assert [number for number, path in enumerate(paths) if not path.exists()] == [8, 9, 10]
    allow_turn(tmp_path)
    have(tmp_path, place, 12)
    assert store.scan_if_due() == (10 * SIZE, 0), "it is not above the size"


def test_scan_of_files_of_one_second_removes_only_the_excess(tmp_path, place):
    paths = [have(tmp_path, place, number) for number in range(20)]
    same = time.time() - 5
    for path in paths:
        os.utime(path, (same, same))
    assert store_of(place).scan_if_due() == (9 * SIZE, 11)
    assert sum(path.exists() for path in paths) == 9


def test_scan_keeps_files_of_others_and_removes_what_killed_writers_left(tmp_path, place):
    other = tmp_path / "notes#1"
    other.write_bytes(bytes(50 * SIZE))
    os.utime(other, (1, 1))
    old = have(tmp_path, place, 1, age=2 * LEFT_SECONDS, suffix="#1")
    new = have(tmp_path, place, 2, suffix="#12")
    block = have(tmp_path, place, 3, age=2 * LEFT_SECONDS)
    assert store_of(place).scan_if_due() == (SIZE, 0)
    assert other.exists() and new.exists() and block.exists() and not old.exists()
    assert (tmp_path / ".kvtier").read_bytes() == FORMAT


@pytest.mark.parametrize(
    "name",
    [
        f"{'a' * 32}",
        f"cache/{'a' * 32}",
        f"{'b' * 32}/0/aa/{'a' * 32}/{'a' * 32}",
        f"{'b' * 32}/0/cc/{'a' * 32}",
        f"{'b' * 32}/x/aa/{'a' * 32}",
        f"cache/{'a' * 32}#1",
    ],
)
def test_scan_keeps_files_of_others_that_are_named_by_a_hash(tmp_path, place, name):
    other = tmp_path / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(bytes(50 * SIZE))
    os.utime(other, (1, 1))
    block = have(tmp_path, place, 3, age=2 * LEFT_SECONDS)
    assert store_of(place).scan_if_due() == (SIZE, 0)
    assert other.exists() and block.exists()


def test_scan_removes_folders_that_have_been_empty_for_long(tmp_path, place):
    """Each namespace has hundreds, and every scan lists them all."""
    used, other = have(tmp_path, place, 1).parent, tmp_path / "others" / "0" / "00"
    new, old = ((tmp_path / place.key(name * 16, 0, bytes(16))).parent for name in (b"o", b"p"))
    for folder in new, old, other:
        folder.mkdir(parents=True)
    store = store_of(place)
    for _ in range(3):
        for folder in filter(os.path.exists, (used, old, old.parent, old.parent.parent, other)):
            os.utime(folder, (1, 1))
        store.scan_if_due()
        allow_turn(tmp_path)
    assert used.exists() and new.exists() and other.exists() and not old.parent.parent.exists()


def test_only_one_store_scans_and_others_do_not_repeat_it(tmp_path, place):
    stores = [SharedDirectory(place, 10 * SIZE, scan_seconds=3600.0) for _ in range(3)]
    have(tmp_path, place, 1)
    assert [store.scan_if_due() for store in stores] == [None] * 3, "not due"
    stores[0].was_written(SIZE)
    assert stores[0].scan_if_due() == (SIZE, 0), "it has written a part of the size"
    stores[1].was_written(SIZE)
    assert stores[1].scan_if_due() is None, "what it wrote was counted by the other's scan"
    assert not [name for name in os.listdir(tmp_path) if "#" in name]


def test_turn_of_a_killed_store_ends_by_itself(tmp_path, place):
    have(tmp_path, place, 1)
    store, other = store_of(place), store_of(place)
    assert store._take_turn()  # and is killed
    assert other.scan_if_due() is None and not other._take_turn()
    assert (tmp_path / STAMP).stat().st_mtime == pytest.approx(time.time() + TURN_SECONDS, abs=5)
    allow_turn(tmp_path)
    assert other.scan_if_due() == (SIZE, 0)
    future = time.time() + 1e6  # a clock that was wrong
    os.utime(tmp_path / STAMP, (future, future))
    assert other._take_turn()


@pytest.mark.parametrize("full", [False, True])
def test_turn_does_not_wait_for_a_clock_that_was_set_back(tmp_path, place, full, monkeypatch):
    """By an hour and a half: as long no store scanned. Without room for it the file does not say the pause."""
    have(tmp_path, place, 1)
    store, other = store_of(place), store_of(place)
    if full:
        monkeypatch.setattr(Path, "write_text", lambda path, text: os.truncate(path, 0) or os.write(-1, b""))
    assert store.scan_if_due() == (SIZE, 0)
    assert not full or not (tmp_path / STAMP).read_text()
    store._end_turn(100.0)
    assert not other._take_turn()
    turn = time.time() + 100.0 + (MAX_PAUSE if full else 5400.0)
    os.utime(tmp_path / STAMP, (turn, turn))
    assert other._take_turn()


def test_turn_is_kept_during_a_long_scan(tmp_path, place, monkeypatch):
    have(tmp_path, place, 1)
    store = store_of(place)
    assert store._take_turn()
    allow_turn(tmp_path)
    list(store._files())
    assert (tmp_path / STAMP).stat().st_mtime == 1.0, "it was short"
    monkeypatch.setattr(shared_directory, "TURN_SECONDS", 0.0)  # also the time after which a scan renews its turn
    list(store._files())
    assert (tmp_path / STAMP).stat().st_mtime > 1.0


def test_full_file_system_removes_files_below_the_size(tmp_path, place, monkeypatch):
    paths = [have(tmp_path, place, number, age=1000 * number) for number in range(10)]
    store = SharedDirectory(place, 100 * SIZE, scan_seconds=3600.0)
    store.is_full()
    assert store.scan_if_due() == (9 * SIZE, 1) and not paths[9].exists()
    allow_turn(tmp_path)
    store.scan_if_due()
    assert store.scan_if_due() is None, "once for a failure"

    def no_space(*arguments):
        raise OSError(28, "No space left on device")

    store.is_full()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_space)
        assert store.scan_if_due() == (8 * SIZE, 1), "it makes room without a turn"


def test_missing_marker_is_reported(tmp_path, place):
    store = store_of(place)
    store.check()
    (tmp_path / ".kvtier").unlink()
    with pytest.raises(Trouble, match="is the file system mounted"):
        store.check()


def test_failing_file_server_is_a_trouble_of_writes_and_no_error_of_scans(place, monkeypatch):
    store = store_of(place)

    def stale(path, **options):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(type(store._root), "stat", stale)
    assert store.scan_if_due() is None
    with pytest.raises(Trouble, match="Stale file handle"):
        store.check()


def test_recent_use_is_not_recorded_again(tmp_path, place):
    path = have(tmp_path, place, 1, age=30)
    before = path.stat().st_mtime
    store_of(place).was_used(key_of(place, 1), before)
    assert path.stat().st_mtime == before
    store_of(place).was_used(key_of(place, 1), 0.0)
    assert path.stat().st_mtime > before
    store_of(place).was_used(key_of(place, 2), 0.0)  # removed meanwhile


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_recent_use_is_not_recorded_again_by_a_node_with_a_wrong_clock(tmp_path, place, monkeypatch, ahead):
    """At each read of a block it set the time of its file."""
    path, now, utime, touched = have(tmp_path, place, 1, age=30), time.time, os.utime, []
    monkeypatch.setattr(time, "time", lambda: now() + ahead)
    monkeypatch.setattr(os, "utime", lambda *arguments: touched.append(arguments) or utime(*arguments))
    store = store_of(place)
    for _ in range(3):
        store.was_used(key_of(place, 1), path.stat().st_mtime)
    assert len(touched) <= 1, "until it knows the file server's time"
    utime(path, (now() - 3600, now() - 3600))
    store.was_used(key_of(place, 1), path.stat().st_mtime)
    assert path.stat().st_mtime > now() - 5

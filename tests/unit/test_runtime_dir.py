"""The directory of this user's sockets: where it is, and what happens where none can be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.runtime_dir import runtime_dir
from vllm_kvtier.store.launcher import store_path
from vllm_kvtier.wire.link import link_path

NAME = f"kvtier-{os.getuid()}"


@pytest.fixture
def temporary(run_dir, monkeypatch):
    """The directory of temporary files, empty. As an environment variable for other processes, too."""
    folder = run_dir / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)  # until it is asked for
    return folder


def spoil(base: Path, way: str) -> None:
    """No socket of ours can be in ``base``, for root neither."""
    folder = base / NAME
    if way == "a file":
        folder.write_text("")
    elif way == "another's":
        folder.mkdir()
        folder.chmod(0o755)
    else:
        folder.symlink_to(base)


WAYS = ["a file", "another's", "a link"]


@pytest.mark.parametrize("way", WAYS)
def test_runtime_dir_unusable_is_replaced_by_temporary_one(run_dir, temporary, way, caplog):
    """Of another user, as after `su` without `-`."""
    spoil(run_dir, way)
    for _ in range(2):
        assert runtime_dir() == temporary / NAME and (temporary / NAME).stat().st_mode & 0o777 == 0o700
    said = [record.getMessage() for record in caplog.records if str(run_dir / NAME) in record.getMessage()]
    assert len(said) == 1 and str(temporary / NAME) in said[0]


def test_runtime_dir_that_refuses_is_replaced_by_temporary_one(temporary, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")
    assert Path(store_path()).parent == Path(link_path("e", "i")).parent == temporary / NAME


def test_runtime_dir_that_does_not_exist_is_not_spoken_of(run_dir, temporary, monkeypatch, caplog):
    """Containers often name one."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir / "nowhere"))
    assert runtime_dir() == temporary / NAME and not caplog.records


@pytest.mark.parametrize("way", WAYS)
def test_no_usable_runtime_dir_raises_with_paths(run_dir, temporary, way):
    spoil(run_dir, way)
    spoil(temporary, way)
    with pytest.raises(KVTierError) as raised:
        link_path("e", "i")
    assert all(str(base / NAME) in str(raised.value) for base in (run_dir, temporary))


def test_runtime_dir_stays_in_a_full_directory_of_temporary_files(temporary, monkeypatch):
    """tempfile takes another one then, and an engine that starts finds no store, link or peer of this node."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert runtime_dir() == temporary / NAME


def test_no_directory_of_temporary_files_raises(monkeypatch):
    def refuse():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", refuse)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(KVTierError, match="No usable temporary directory"):
        runtime_dir()


def test_tools_name_directories_that_they_cannot_use(run_dir, temporary, root):
    spoil(run_dir, "a file")
    spoil(temporary, "a file")
    for command in (["stats"], ["doctor"], ["store"], ["top", "--once"], ["clear", "--all"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code in (1, 2) and isinstance(done.exception, SystemExit), (command, done)
        assert all(str(base / NAME) in done.output for base in (run_dir, temporary)), (command, done.output)
    done = subprocess.run([sys.executable, "-m", "vllm_kvtier.store"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2 and str(temporary / NAME) in done.stderr and "Traceback" not in done.stderr

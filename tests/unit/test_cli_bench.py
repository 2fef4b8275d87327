"""`kvtier bench`: each bench moves what it says, right bytes, and says why where it cannot."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from support import eventually, interruptible
from typer.testing import CliRunner

from vllm_kvtier import codecs
from vllm_kvtier.bench import copies, disk
from vllm_kvtier.bench.row import Row, rates, repeat
from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.bench import _ended_by_signals
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan.pays import from_bench
from vllm_kvtier.worker.device.cuda_driver import CudaError

pytestmark = pytest.mark.timeout(180)  # on a machine whose cores are busy otherwise


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "--seconds", "0.2", "--device", "cpu", *map(str, arguments)])


def test_bench_rounds_alternate_between_cases():
    seen = []

    def way(name, rate):
        return lambda seconds: (seen.append(name), (rate, 1.0))[1]

    assert rates({"a": way("a", 10), "b": way("b", 20)}, 0.1) == {"a": 10, "b": 20}
    assert seen == ["a", "b"] * 3
    assert repeat(lambda: 5, 0.0)[0] == 5
    assert Row("x", "y", 5.0, 10.0).share == 0.5 and Row("x", "y", 5.0).share is None


def test_bench_copies_are_byte_exact():
    """What was stored and loaded into other blocks equals what it was made of."""
    torch.manual_seed(2)
    on = copies.scene(cuda=False, encoded=True)
    for row in on.memory.view(torch.int64).split(1 << 20):
        row.copy_(torch.randint(1 << 40, row.shape))
    mover = copies.CopyRunner(on, "raw")
    try:
        moved, took = mover.load(0.01)
        count = mover.count
        assert moved % copies.BLOCK_BYTES == 0 and took > 0
        while mover._at:  # until each block was loaded
            mover.load(0.0)
        pages = on.memory.view(copies.LAYERS, 2 * on.blocks, -1)
        stored, loaded = (torch.from_numpy(mover._blocks[way][:count]) for way in ("store", "load"))
        assert torch.equal(pages[:, stored], pages[:, loaded])
    finally:
        mover.close()


def test_bench_wrong_checksum_raises():
    on = copies.scene(cuda=False, encoded=True)
    mover = copies.CopyRunner(on, "raw")
    try:
        mover.load(0.0)
        mover._keys += 1
        with pytest.raises(KVTierError, match="wrong checksum"):
            mover.load(0.01)
    finally:
        mover.close()


def test_bench_copy_and_codec_print_rates(tmp_path):
    result = bench("copy", "codec", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["failed"] == {}
    rows = {(row["bench"], row["name"]): row for row in found["rows"]}
    named = {f"{name} {way}" for name in codecs.names() if name != "raw" for way in ("store", "load")}
    assert set(rows) == {("copy", "store"), ("copy", "load")} | {("codec", name) for name in named}
    assert all(row["bytes_per_second"] > 1e6 and row["limit"] > 1e7 for row in found["rows"])
    assert from_bench(found)["memory"] == rows["copy", "load"]["bytes_per_second"], "what `kvtier plan` reads"


def test_bench_disk_prints_rates(tmp_path):
    result = bench("disk", "--disk", tmp_path / "there", "--disk-mib", 64, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["name"] for row in found["rows"]] == ["read", "write"]
    assert all(row["bytes_per_second"] > 1e6 and row["limit"] > 1e6 for row in found["rows"])
    assert "disk" in from_bench(found)
    assert list(tmp_path.iterdir()) == [], "nothing is left there"


def test_bench_disk_makes_no_folder_above_the_one_it_is_given(tmp_path):
    """Its disk may not be mounted. A tier makes only its own folder, for its user alone."""
    result = bench("disk", "--disk", tmp_path / "disk" / "kvtier", "--disk-mib", 64)
    assert result.exit_code == 1 and "mount its disk, or make it" in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_bench_disk_folder_is_its_users_alone_and_stays_if_used(tmp_path, monkeypatch):
    modes = []

    def fail(own, nbytes):
        modes.append(own.parent.parent.stat().st_mode & 0o777)
        (own.parent.parent / "lock").touch()  # a store opens its tier there
        raise KVTierError("stopped")

    monkeypatch.setattr(disk, "DiskTierClient", fail)
    with pytest.raises(KVTierError, match="stopped"):
        disk.measure(0.1, tmp_path / "there")
    assert modes == [0o700] and [each.name for each in (tmp_path / "there").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("begun", "number"), [("tier", signal.SIGTERM), ("tier/slots", signal.SIGTERM), ("tier/slots", signal.SIGHUP)]
)
def test_bench_disk_removes_its_files_when_it_is_terminated(tmp_path, begun, number):
    command = [sys.executable, "-m", "vllm_kvtier.cli.__main__", "bench", "disk", "--seconds", "60", "--disk-mib", "64"]
    command += ["--disk", tmp_path / "there"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=interruptible)
    eventually(lambda: list(tmp_path.glob(f"there/*/{begun}")), 60)
    for _ in range(2):  # as at the end of a terminal, by the kernel and by the shell
        process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_bench_keeps_what_ignores_hangups():
    """nohup kvtier bench."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(SystemExit):
                signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_bench_disk_unusable_path_fails_with_cause(tmp_path):
    (tmp_path / "file").write_text("")
    result = bench("disk", "--disk", tmp_path / "file")
    assert result.exit_code == 1 and "disk: " in result.stderr and "cannot be written to" in result.stderr
    with pytest.raises(KVTierError, match="the disk tier cannot use"):
        disk.DiskTierClient(tmp_path / "file" / "below", 64 << 20)


def pull_in_a_process(*arguments: str):
    """In this one, NIXL would crash at the end."""
    command = [sys.executable, "-m", "vllm_kvtier.cli", "bench", "pull", "--seconds", "0.2", "--device", "cpu"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


def test_bench_pull_prints_rates_and_exits_with_status_0():
    result = pull_in_a_process()
    assert result.returncode == 0, result.stderr
    assert "in order" in result.stdout and "scattered" in result.stdout and "memcpy on one core" in result.stdout


def test_bench_pull_missing_backend_fails_with_cause():
    result = pull_in_a_process("--nixl-backend", "CARRIER_PIGEON")
    assert result.returncode == 1 and "none of the backends CARRIER_PIGEON" in result.stderr.replace("\n", " ")


def test_bench_failure_keeps_other_benches(tmp_path):
    (tmp_path / "file").write_text("")
    result = bench("copy", "disk", "--disk", tmp_path / "file", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and list(found["failed"]) == ["disk"] and len(found["rows"]) == 2


def test_bench_error_of_a_driver_keeps_other_benches(tmp_path, monkeypatch):
    """A GPU that another process has all memory of, for example: CudaError and torch's errors are RuntimeErrors."""

    def fail(*_):
        raise CudaError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")

    monkeypatch.setattr(copies, "measure", fail)
    monkeypatch.setattr(torch.cuda, "is_available", fail)
    result = CliRunner().invoke(app, ["bench", "copy", "disk", "--seconds", "0.2", "--disk-mib", "64", "--json"])
    assert result.exit_code == 0, result.exception
    found = json.loads(result.stdout)
    assert found["failed"].keys() == {"copy"} and "CUDA_ERROR_OUT_OF_MEMORY" in found["failed"]["copy"]
    assert {row["bench"] for row in found["rows"]} == {"disk"} and "out of memory" in found["machine"]["device"]


def test_bench_plot_writes_picture_or_names_matplotlib(tmp_path, monkeypatch):
    file = tmp_path / "bench.png"
    try:
        import matplotlib  # noqa: F401

        result = bench("copy", "--plot", file)
        assert result.exit_code == 0 and file.read_bytes().startswith(b"\x89PNG")
    except ModuleNotFoundError:
        pass
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("copy", "--plot", file)
    assert result.exit_code == 1 and "a plot needs matplotlib" in result.stderr


def test_bench_wrong_options_exit_with_message():
    for arguments in (["zip"], ["--device", "abacus"]):
        assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["bench", "copy", "--device", "cuda"])
        assert result.exit_code == 1 and "this machine has no CUDA device" in result.stderr

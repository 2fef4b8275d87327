"""Imports that nothing else tries: of benchmarks, examples and tools, and of test files by their names."""

import ast
import importlib
from collections import Counter

FOLDERS = ("benchmarks", "examples", "tools")


def test_benchmarks_examples_and_tools_import_names_that_exist(root):
    missing, known = [], 0
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm_kvtier"):
                continue
            module = importlib.import_module(node.module)
            for name in (each.name for each in node.names):
                known += 1
                if not hasattr(module, name):
                    try:
                        importlib.import_module(f"{node.module}.{name}")
                    except ModuleNotFoundError:
                        missing.append(f"{path.relative_to(root)}: {node.module}.{name}")
    assert known > 100 and missing == []


def test_no_two_test_files_have_one_name(root):
    """Plain ``pytest`` collects all levels at once, and imports a test file by its name alone."""
    names = Counter(path.name for path in (root / "tests").glob("*/test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []

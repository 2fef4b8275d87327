"""What benchmarks, examples and tools import of the package is there: nothing else runs most of them."""

import ast
import importlib

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

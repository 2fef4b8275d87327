"""What nothing else tries: imports and calls of benchmarks, examples and tools, and the names of test files."""

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


def test_benchmarks_examples_and_tools_call_functions_that_no_variable_hides(root):
    hidden = []
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            set_here = {name.id for name in names if isinstance(name.ctx, ast.Store)}
            called = {node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and node.func in names}
            hidden += [f"{path.name}: {function.name}: {name}" for name in set_here & called & functions]
    assert hidden == []

"""Constructors take a few objects, and not a dozen collaborators (for example ``scheduler/context.py``)."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_PARAMETERS = 6
EXCEPT = {"Engine"}  # devtools: the options of an engine process, all by keyword


def constructors(tree: ast.AST) -> dict[str, int]:
    """Class -> parameters of its ``__init__``, without ``self``."""
    found = {}
    for node in ast.walk(tree):
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                arguments = each.args
                found[node.name] = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
    return found


def test_constructor_parameters_are_counted():
    tree = ast.parse("class A:\n    def __init__(self, a, b=1, *, c): pass\nclass B: pass")
    assert constructors(tree) == {"A": 3}


def test_constructors_have_few_parameters():
    found = {}
    for folder in ("vllm_kvtier", "csrc_triton"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= constructors(ast.parse(path.read_text("utf-8")))
    assert {"RequestMatcher", "Passthrough", "Demotion", "EncodedPageCopier"} <= found.keys()
    assert {name for name, count in found.items() if count > MAX_PARAMETERS} == EXCEPT

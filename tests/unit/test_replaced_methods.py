"""Methods of vLLM that this package replaces take all arguments that vLLM passes, also those of later releases."""

import ast

import pytest

from vllm_kvtier.vllm_compat.hooks import local_hits


class Manager:
    """A KV cache manager of vLLM 0.33, where both lookups have one more argument."""

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        return "of all", 16, max_cache_hit_length

    def get_computed_blocks_for_connector(self, request, max_cache_hit_length=None):
        return "of attention", 32, max_cache_hit_length, True


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((48,), {}), ((), {"max_cache_hit_length": 48})])
def test_replaced_lookup_passes_on_arguments_that_later_releases_have(args, kwargs):
    most = 48 if args or kwargs else None
    for longest, want in ((32, ("of attention", 32, most, True)), (0, ("of all", 16, most, False))):
        manager = Manager()
        local_hits.limit(manager, lambda request, longest=longest: longest)
        assert manager.get_computed_blocks_for_connector("request", *args, **kwargs) == want


def test_functions_put_in_place_of_vllms_take_any_arguments(root):
    """Every function that is assigned to an attribute, or returned by what is, of another object than ``self``."""
    found = []
    for path in sorted((root / "vllm_kvtier" / "vllm_compat").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        makers, names = set(), set()  # functions whose result is put in place; functions that are
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                value, owner = node.value, node.targets[0].value
                if isinstance(owner, ast.Name) and owner.id == "self":
                    continue
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
                value = node.args[2]
            else:
                continue
            if isinstance(value, ast.Name):
                names.add(value.id)
            elif isinstance(value, ast.Call):
                makers.add(value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", ""))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for outer in functions:
            nodes = list(ast.walk(outer))[1:]
            inner = {each.name: each for each in nodes if isinstance(each, ast.FunctionDef)}
            values = [each.value for each in nodes if isinstance(each, ast.Return)]
            returned = {value.id for value in values if isinstance(value, ast.Name)}
            wanted = names & set(inner) | (returned & set(inner) if outer.name in makers else set())
            for name in wanted:
                found.append((path.name, name, bool(inner[name].args.vararg and inner[name].args.kwarg)))
    replaced = {name for _, name, _ in found}
    assert {"get_computed_blocks_for_connector", "notify", "looking", "holding"} <= replaced, replaced
    assert [each for each in found if not each[2]] == []

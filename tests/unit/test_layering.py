"""The layers of the package: what each part may import. The tables are the layout; a new package is a new row."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Part -> other parts of ``vllm_kvtier`` that it may import, at any time and for type checkers too. All may import those
# of ``FREE``.
ALLOWED = {
    "kernels": set(),
    "cache_kinds": set(),
    "errors": set(),
    "ewma": set(),
    "logs": set(),
    "renamed": set(),
    "runtime_dir": set(),
    "file_digests": set(),
    "fingerprint": set(),
    "containment": {"telemetry"},
    "config": {"store"},  # its options are those of a store that an engine starts
    "wire": set(),
    "shapes": {"wire"},
    "jobs": {"wire"},
    "codecs": {"wire", "kernels", "quality"},  # ``codec: auto`` reads the record of quality
    "quality": {"codecs"},
    "remote_store": {"wire", "store"},
    "store": {"wire", "remote_store"},
    "telemetry": {"store", "proxy"},  # the table of all metrics
    "worker": {"wire", "shapes", "codecs", "kernels", "jobs", "store", "vllm_compat", "containment"},
    "vllm_compat": {"wire", "jobs", "worker", "telemetry", "containment"},
    "scheduler": {
        "wire", "shapes", "codecs", "config", "containment", "jobs", "store", "telemetry", "vllm_compat",
    },
    "connector": {
        "wire", "codecs", "config", "containment", "jobs", "scheduler", "worker", "vllm_compat", "telemetry",
    },
    "dynamo": set(),
    "plugin": {"vllm_compat", "dynamo"},
    "proxy": {"wire", "cli"},  # ``python -m vllm_kvtier.proxy`` runs the command
    "plan": {"wire", "codecs", "store"},
    "bench": {"wire", "codecs", "store", "worker"},
    "doctor": {"wire", "shapes", "store", "vllm_compat"},
    "cli": {"wire", "store", "bench", "doctor", "plan", "proxy", "quality"},
    "devtools": {"store", "plugin", "doctor"},
}
FREE = {"", "cache_kinds", "errors", "ewma", "logs", "renamed", "runtime_dir", "fingerprint", "file_digests"}

# (importer, imported): packages or modules, without what is below ``vllm_kvtier``, that must not meet.
FORBIDDEN = [
    ("scheduler.matching", "scheduler.offload"),
    ("scheduler.planner", "scheduler.sources"),
    ("scheduler.planner", "scheduler.leases"),
    ("scheduler.planner", "scheduler.offload"),
    ("scheduler.integrity", "scheduler.leases"),
    ("scheduler.integrity", "scheduler.offload"),
    *((f"scheduler.{part}", f"scheduler.{top}") for top in ("connector_scheduler", "wiring") for part in (
        "matching", "sources", "planner", "integrity", "leases", "offload", "admin",
    )),
    *((f"scheduler.{part}", "scheduler.admin") for part in (
        "matching", "sources", "planner", "integrity", "leases", "offload",
    )),
    *((f"worker.{part}", "worker.connector_worker") for part in (
        "integrity", "store", "copy", "peer_fetch", "nixl_pull", "device",
    )),
    *(("worker.copy", f"worker.{part}") for part in (
        "store", "peer_fetch", "nixl_pull", "integrity",
    )),
    *(("worker.device", f"worker.{part}") for part in (
        "store", "peer_fetch", "nixl_pull", "integrity", "copy",
    )),
    *((f"worker.{part}", f"worker.{other}") for part in ("store", "integrity") for other in (
        "peer_fetch", "nixl_pull", "device",
    )),
    ("worker.integrity", "worker.store"),
    *((f"worker.{part}", "worker.store") for part in ("nixl_pull", "peer_fetch")),
    *(("worker", f"vllm_compat.{part}") for part in (  # what the probe grants is all that it asks there
        "hooks", "layout", "engine_info", "connector_types", "namespace", "requests",
    )),
    ("vllm_compat", "worker.connector_worker"),
    ("scheduler", "store.server"),
    ("scheduler", "store.index"),
    ("scheduler", "store.tiers"),
    ("worker", "store.server"),
    ("worker", "store.index"),
    ("worker", "store.tiers"),
    ("remote_store", "store.server"),
    ("remote_store", "store.client"),
    ("store.index", "store.server"),
    ("store.index", "store.client"),
    ("store.index", "store.tiers"),
    ("store.eviction", "store.server"),
    ("store.eviction", "store.memory"),
    ("store.eviction", "store.tiers"),
    ("store.memory", "store.server"),
    ("store.tiers", "store.server"),
    ("store.tiers", "store.client"),
    ("store.server", "store.client"),
    *((f"store.tiers.{part}", f"store.tiers.{other}") for part in ("disk", "objects", "nodes", "mooncake", "process")
      for other in ("disk", "objects", "nodes", "mooncake") if part != other),
    *(("proxy.messages", f"proxy.{part}") for part in ("engines", "routing", "routes", "core", "app")),
    *(("proxy.engines", f"proxy.{part}") for part in ("routing", "routes", "core", "app")),
    *(("proxy.routing", f"proxy.{part}") for part in ("routes", "core", "app")),
    *(("proxy.routes", f"proxy.{part}") for part in ("app", "server", "reloading")),
    ("doctor.engines", "doctor.machine"),
    *((f"doctor.{part}", f"doctor.{other}") for part in ("machine", "engines") for other in ("examine", "prompt")),
]  # fmt: skip

# Part -> packages of others that it must not import; within a function, where it may never run, neither.
FOREIGN = {
    "kernels": {"vllm", "zmq", "nixl"},
    "cache_kinds": {"vllm", "torch"},
    "jobs": {"vllm", "torch"},
    "wire": {"vllm", "torch"},
    "shapes": {"vllm", "torch"},
    "store": {"vllm", "torch"},
    "remote_store": {"vllm", "torch"},
    "scheduler.planner": {"vllm", "torch"},
    "worker": {"vllm"},
    "codecs": {"vllm"},
    "proxy": {"vllm", "torch"},
    "plan": {"vllm", "torch"},
}


def _modules() -> dict[str, Path]:
    """Dotted name below ``vllm_kvtier`` -> file; "" is the package itself."""
    found = {}
    for folder, prefix in ((ROOT / "vllm_kvtier", ""), (ROOT / "csrc_triton", "kernels")):
        for path in folder.rglob("*.py"):
            parts = [*filter(None, [prefix]), *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


MODULES = _modules()


def _imports(name: str) -> set[str]:
    """Absolute names that a module imports anywhere: modules of ours without ``vllm_kvtier.``, others as they are."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(filter(None, ["vllm_kvtier", *above, base]))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if _ours(full) in MODULES else base)
    return {_ours(module) for module in found}


def _ours(module: str) -> str:
    package, _, rest = module.partition(".")
    return rest if package == "vllm_kvtier" else module


@cache  # in the process that runs these tests, not in each that collects them
def _all_imports() -> dict[str, set[str]]:
    return {name: _imports(name) for name in MODULES}


@cache
def _edges() -> dict[str, set[str]]:
    found = _all_imports().items()
    return {name: {other for other in others if other in MODULES and other != name} for name, others in found}


def _within(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def test_layering_every_part_has_a_row():
    parts = {name.split(".")[0] for name in MODULES} - {""}
    assert parts - set(ALLOWED) == set(), "new parts need a row in ALLOWED"


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_layering_part_imports_only_allowed_parts(part):
    allowed = ALLOWED[part] | FREE | {part}
    wrong = [
        f"{name} imports {other}"
        for name, others in _edges().items()
        if _within(name, part)
        for other in others
        if other.split(".")[0] not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize(("importer", "imported"), FORBIDDEN, ids=" to ".join)
def test_layering_forbidden_imports_do_not_exist(importer, imported):
    assert any(_within(name, importer) for name in MODULES), f"{importer} is no package any more"
    assert any(_within(name, imported) for name in MODULES), f"{imported} is no package any more"
    wrong = [
        f"{name} imports {other}"
        for name, others in _edges().items()
        if _within(name, importer)
        for other in others
        if _within(other, imported)
    ]
    assert wrong == []


@pytest.mark.parametrize("part", sorted(FOREIGN))
def test_layering_part_imports_no_forbidden_third_party_package(part):
    assert any(_within(name, part) for name in MODULES)
    wrong = [
        f"{name} imports {other}"
        for name, others in _all_imports().items()
        if _within(name, part)
        for other in others
        if other.split(".")[0] in FOREIGN[part]
    ]
    assert wrong == []


def _packages() -> dict[str, list[str]]:
    """Folder below ``vllm_kvtier`` -> its modules."""
    found: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def test_layering_folder_has_at_most_12_modules():
    assert {package: len(names) for package, names in _packages().items() if len(names) > 12} == {}


def test_layering_every_package_has_a_docstring():
    packages = set(_packages()) | {name for name, path in MODULES.items() if path.name == "__init__.py"}
    without = [
        name
        for name in packages
        if name not in MODULES or not ast.get_docstring(ast.parse(MODULES[name].read_text("utf-8")))
    ]
    assert without == []


def test_layering_docstrings_of_sides_and_store_have_thread_and_imports():
    without = [
        f"{name}: {what}"
        for name, path in MODULES.items()
        if path.name == "__init__.py" and name.split(".")[0] in ("scheduler", "worker", "store")
        for what in ("thread|process", "[Ii]mport")
        if not re.search(what, ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
    ]
    assert without == []


def test_layering_package_does_not_import_connector():
    assert {name for name, others in _edges().items() if "connector" in others} == set()


def _cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            at = stack.index(module)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    for module in edges:
        if module not in index:
            visit(module)
    return found


def test_layering_cycle_search_finds_cycles():
    assert _cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_layering_import_graph_has_no_cycle():
    found = _cycles(_edges())
    assert found == []

"""Everything of vLLM that the sources use is in the probe's table: a new use of vLLM fails here until it has a row."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import vllm_kvtier
from vllm_kvtier.vllm_compat.probe import features, trials

PACKAGE = Path(vllm_kvtier.__file__).parent
COMPAT = PACKAGE / "vllm_compat"

CONFIG = "vllm.config"
VLLM = f"{CONFIG}:VllmConfig"
REQUEST = "vllm.v1.request:Request"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ENGINE = "vllm.v1.engine.core:EngineCoreProc"
POOL = "vllm.v1.core.block_pool:BlockPool"
BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
CACHE = "vllm.v1.kv_cache_interface"
SPEC = f"{CACHE}:"  # any class of it
OUTPUT = "vllm.v1.core.sched.output"
LORA = "vllm.lora.request:LoRARequest"
NONE = ""  # not vLLM's, or looked at in a way that nothing hangs on

# What an attribute of one class is.
NESTED = {
    (VLLM, "parallel_config"): f"{CONFIG}:ParallelConfig",
    (VLLM, "model_config"): f"{CONFIG}:ModelConfig",
    (VLLM, "cache_config"): f"{CONFIG}:CacheConfig",
    (VLLM, "scheduler_config"): f"{CONFIG}:SchedulerConfig",
    (VLLM, "kv_transfer_config"): f"{CONFIG}:KVTransferConfig",
    (VLLM, "ec_transfer_config"): f"{CONFIG}:ECTransferConfig",
    (VLLM, "kv_events_config"): f"{CONFIG}:KVEventsConfig",
    (VLLM, "load_config"): f"{CONFIG}:LoadConfig",
    (VLLM, "device_config"): f"{CONFIG}:DeviceConfig",
    (VLLM, "compilation_config"): f"{CONFIG}:CompilationConfig",
    (VLLM, "observability_config"): f"{CONFIG}:ObservabilityConfig",
    (VLLM, "kernel_config"): f"{CONFIG}:KernelConfig",
    (POOL, "blocks"): BLOCK,
    (REQUEST, "lora_request"): LORA,
    (ENGINE, "scheduler"): SCHEDULER,
    (SCHEDULER, "requests"): REQUEST,
    (SCHEDULER, "running"): REQUEST,
    (SCHEDULER, "kv_cache_manager"): MANAGER,
    (SCHEDULER, "kv_event_publisher"): "vllm.distributed.kv_events:EventPublisher",
    (f"{CACHE}:KVCacheConfig", "kv_cache_groups"): f"{CACHE}:KVCacheGroupSpec",
    (f"{CACHE}:KVCacheConfig", "kv_cache_tensors"): f"{CACHE}:KVCacheTensor",
    (f"{CACHE}:KVCacheGroupSpec", "kv_cache_spec"): SPEC,
    (SPEC, "kv_cache_specs"): SPEC,
    (f"{OUTPUT}:SchedulerOutput", "scheduled_new_reqs"): f"{OUTPUT}:NewRequestData",
    (f"{OUTPUT}:SchedulerOutput", "scheduled_cached_reqs"): f"{OUTPUT}:CachedRequestData",
}
# By file: what its names are that hold vLLM's objects. Every parameter of ``vllm_compat`` without a type is here.
ROOTS = {
    "connector.py": {
        "vllm_config": VLLM, "request": REQUEST, "connector_output": "vllm.v1.outputs:KVConnectorOutput",
        "blocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    },
    "vllm_compat/adapters.py": {"lora": LORA},
    "vllm_compat/layout/cpu_page_layout.py": {},
    "vllm_compat/hooks/admission.py": {"scheduler": SCHEDULER, "self.scheduler": SCHEDULER},
    "vllm_compat/hooks/block_pool.py": {"pool": POOL, "self._pool": POOL, "block": BLOCK, "found": BLOCK},
    "vllm_compat/hooks/local_hits.py": {"manager": MANAGER, "request": NONE},
    "vllm_compat/hooks/mm_embeddings.py": {"config": VLLM, "vllm_config": VLLM},
    "vllm_compat/hooks/replaced_connector.py": {
        "config": VLLM, "VllmConfig": VLLM, "transfer": f"{CONFIG}:KVTransferConfig",
    },
    "vllm_compat/hooks/idle_hook.py": {"engine": ENGINE, "connector": NONE, "scheduler": NONE},
    "vllm_compat/kv_events.py": {
        "vllm_config": VLLM, "kv_cache_config": f"{CACHE}:KVCacheConfig", "scheduler": SCHEDULER,
    },
    "vllm_compat/engine_info.py": {
        "vllm_config": VLLM, "self.config": VLLM, "config": NONE, "kv_cache_config": f"{CACHE}:KVCacheConfig",
    },
    "vllm_compat/layout/groups.py": {
        "kv_cache_config": f"{CACHE}:KVCacheConfig", "group": f"{CACHE}:KVCacheGroupSpec", "spec": SPEC,
    },
    "vllm_compat/layout/kv_fields.py": {"spec": SPEC, "module": NONE},
    "vllm_compat/layout/kv_layout.py": {
        "kv_cache_config": f"{CACHE}:KVCacheConfig", "vllm_config": VLLM, "group": f"{CACHE}:KVCacheGroupSpec",
        "spec": SPEC, "module": "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
        "self.module": NONE, "owner": NONE,
    },
    "vllm_compat/layout/token_scale.py": {
        "vllm_config": VLLM, "impl": "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
    },
    "vllm_compat/namespace.py": {
        "vllm_config": VLLM, "model": f"{CONFIG}:ModelConfig",
        "self._model": f"{CONFIG}:ModelConfig", "self._load": f"{CONFIG}:LoadConfig",
    },
    "vllm_compat/options.py": {"vllm_config": VLLM, "part": NONE, "option": NONE, "value": NONE},
    "vllm_compat/requests.py": {"request": REQUEST, "lora": LORA, "hash_fn": NONE},
    "vllm_compat/sleep.py": {"vllm_config": VLLM, "method": NONE, "self": NONE},
    "vllm_compat/stats.py": {"child": NONE, "vllm_config": VLLM},
    "vllm_compat/hooks/scheduler_lock.py": {"scheduler": NONE},
     # methods by name; the row "scheduler's methods" has them
    "vllm_compat/connector_types.py": {
        "scheduler": SCHEDULER, "request": REQUEST, "output": "vllm.v1.outputs:KVConnectorOutput",
    },
    "vllm_compat/hooks/rollback.py": {
        "scheduler": SCHEDULER, "connector": NONE, "request": REQUEST, "other": REQUEST, "outer": NONE,
        "scheduler_output": f"{OUTPUT}:SchedulerOutput", "model_runner_output": "vllm.v1.outputs:ModelRunnerOutput",
    },
    "vllm_compat/weights.py": {"engine": NONE, "method": NONE, "lora_request": NONE},
    "vllm_compat/worker_info.py": {
        "vllm_config": VLLM, "tp": "vllm.distributed.parallel_state:GroupCoordinator",
    },
    "scheduler/offload/block_tables.py": {
        "output": f"{OUTPUT}:SchedulerOutput", "new": f"{OUTPUT}:NewRequestData", "state.request": REQUEST,
        "cached": f"{OUTPUT}:CachedRequestData",
    },
    "scheduler/planner/step_timer.py": {"output": f"{OUTPUT}:SchedulerOutput"},
    "scheduler/connector_scheduler.py": {"output": f"{OUTPUT}:SchedulerOutput", "request": REQUEST},
    "scheduler/matching/source_selector.py": {"request": REQUEST, "state.request": REQUEST},
    "scheduler/leases/export_builder.py": {"request": REQUEST, "state.request": REQUEST},
    "scheduler/integrity/sync_load.py": {"state.request": REQUEST},
    "scheduler/matching/request_matcher.py": {"request": REQUEST, "state.request": REQUEST},
    "scheduler/offload/offloader.py": {"request": REQUEST},
    "scheduler/matching/lookup_prefetch.py": {"request": REQUEST},
    "scheduler/offload/kv_events.py": {"request": REQUEST},
}  # fmt: skip


@cache
def covered() -> frozenset[str]:
    return frozenset(path for row in features.rows() for path in row.covers())


def is_covered(owner: str, name: str) -> bool:
    if owner == SPEC:
        return any(path.startswith(SPEC) and path.endswith(f".{name}") for path in covered())
    return f"{owner}.{name}" in covered()


def sources() -> list[Path]:
    """All of the package but the probe itself."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("probe")]


def imports(tree: ast.AST) -> Iterator[str]:
    """"module:name" of what is imported from vLLM, and of what is used of its modules that are."""
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    yield f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            assert not [alias for alias in node.names if alias.name.split(".")[0] == "vllm"], "import names from vLLM"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}:{node.attr}"
        if by_name(node) and isinstance(node.args[0], ast.Name) and node.args[0].id in modules:
            yield f"{modules[node.args[0].id]}:{node.args[1].value}"


def by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")


MODULES = {
    "vllm._custom_ops", "vllm.v1.core.kv_cache_utils", "vllm.distributed.kv_transfer.kv_connector.v1.base",
}  # fmt: skip


class Uses(ast.NodeVisitor):
    """(class, attribute) of each use of an object that a name of ``roots`` holds."""

    def __init__(self, roots: dict[str, str]):
        self.roots, self.found, self.seen = dict(roots), set(), set()

    def owner(self, node: ast.AST) -> str:
        if isinstance(node, ast.Subscript):
            return self.owner(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "values"):
            return self.owner(node.func.value)
        if isinstance(node, ast.Name | ast.Attribute) and (name := ast.unparse(node)) in self.roots:
            self.seen.add(name)
            return self.roots[name]
        if isinstance(node, ast.Attribute):
            return NESTED.get((self.owner(node.value), node.attr), NONE)
        return NONE

    def visit_Assign(self, node: ast.Assign) -> None:
        pairs = [(node.targets[0], node.value)]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
        for target, value in pairs:
            if isinstance(target, ast.Name) and (owner := self.owner(value)):
                self.roots[target.id] = owner
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if owner := self.owner(node.value):
            self.found.add((owner, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if by_name(node) and isinstance(node.args[1], ast.Constant) and (owner := self.owner(node.args[0])):
            self.found.add((owner, node.args[1].value))
        self.generic_visit(node)


# Methods of what a name may hold besides: of dicts and lists of vLLM's objects.
PLAIN = {"get", "values", "remove", "append", "discard", "add", "items", "keys"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_probe_has_rows_of_vllm_imports(path):
    missing = set(imports(ast.parse(path.read_text()))) - covered()
    assert not missing, f"{path.name} uses {sorted(missing)}: add a row to vllm_compat/probe/rows.py"


@pytest.mark.parametrize("name", ROOTS)
def test_probe_has_rows_of_vllm_attributes(name):
    uses = Uses(ROOTS[name])
    uses.visit(ast.parse((PACKAGE / name).read_text()))
    missing = {(owner, attr) for owner, attr in uses.found if not is_covered(owner, attr) and attr not in PLAIN}
    assert not missing, f"{name} uses {sorted(missing)}: add a row to vllm_compat/probe/rows.py"
    unused = {root for root, owner in ROOTS[name].items() if owner} - uses.seen
    assert not unused, f"{name} has no {unused} any more"


@pytest.mark.parametrize("path", [p for p in sources() if p.parent == COMPAT], ids=lambda path: path.name)
def test_probe_roots_declare_untyped_parameters(path):
    """A parameter typed Any is vLLM's object: what is read of it is looked at above."""
    known = set(ROOTS.get(f"vllm_compat/{path.name}", ()))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = {a.arg for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "Any"}
            assert untyped <= known, f"{path.name}: {node.name}() takes {untyped - known}: say in ROOTS what it is"


def test_probe_walker_finds_uses_without_row():
    uses = Uses({"request": REQUEST, "self._pool": POOL})
    lines = "x = request", "x.lora_request.secret", "self._pool.blocks[3].hidden", "getattr(request, 'other', 0)"
    uses.visit(ast.parse("\n".join(lines)))
    assert {(LORA, "secret"), (BLOCK, "hidden"), (REQUEST, "other")} <= uses.found
    tree = ast.parse("from vllm.a import b\nfrom vllm import _custom_ops as ops\nops.new_operator()")
    assert set(imports(tree)) == {"vllm.a:b", "vllm._custom_ops:new_operator"}


def test_probe_compares_every_connector_method():
    tree = ast.parse((PACKAGE / "connector.py").read_text())
    [cls] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    taken = {
        node.name: tuple(a.arg for a in node.args.args[1:])
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not any(
            ast.unparse(each) == "property" for each in node.decorator_list
        )
    }
    compared = {name: arguments for name, arguments in trials.METHODS.items()}
    assert set(taken) == set(compared)
    assert {name: taken[name] for name in taken if compared[name] is not None} == {
        name: arguments for name, arguments in compared.items() if arguments is not None
    }

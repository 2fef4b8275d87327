"""The probe's table against vLLMs that differ in one thing: its row fails, its feature is off, and nothing else is."""

import abc
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import logging
import sys
import types
from types import SimpleNamespace

import msgspec
import pytest
from support import Uncontained

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.vllm_compat import version
from vllm_kvtier.vllm_compat.hooks.idle_hook import EngineThread
from vllm_kvtier.vllm_compat.probe import checks, trials
from vllm_kvtier.vllm_compat.probe import features as probe
from vllm_kvtier.vllm_compat.probe.features import NEEDS, State
from vllm_kvtier.vllm_compat.probe.row import Absence, Feature, Side

ROWS = {row.name: row for row in probe.rows()}
HASHES = "vllm.v1.core.kv_cache_utils"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
POOL = "vllm.v1.core.block_pool:BlockPool"
REQUEST = "vllm.v1.request:Request"
CORE = "vllm.v1.engine.core:EngineCoreProc"
CONFIG = "vllm.config:VllmConfig"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MAKE_SCALES = "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl._ensure_scale_caches"
FAILED_LOADS = f"{SCHEDULER}.failed_recving_kv_req_ids"


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Nothing is remembered from before, nor afterwards of what a test did to vLLM."""
    for row in ROWS.values():  # as vLLM is; also imports all that is patched
        probe.result(row)
    monkeypatch.setattr(probe, "_results", {})
    monkeypatch.setattr(probe, "_logged", set())
    checks.clear()
    yield
    checks.clear()


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("WARNING")
    name = "vllm.kvtier.vllm_compat.probe.features"
    return lambda: [record.getMessage() for record in caplog.records if record.name == name]


def off(features) -> set[Feature]:
    """These, and what needs them."""
    return {each for each in Feature if each in features or set(NEEDS.get(each, ())) & set(features)}


ABSENT = {row.feature for row in ROWS.values() if probe.result(row).state is State.ABSENT}  # from this very version


class Vllm:
    """Changes to the vLLM of this process; a path is as in the table."""

    def __init__(self, monkeypatch):
        self.patch = monkeypatch

    def owner(self, path):
        module, _, name = path.partition(":")
        outer, _, name = name.rpartition(".")
        return checks.find(f"{module}:{outer}"), name

    def put(self, path, value):
        owner, name = self.owner(path)
        self.patch.setattr(owner, name, value, raising=False)

    def remove(self, path):
        owner, name = self.owner(path)
        if isinstance(owner, type) and name in getattr(owner, "__members__", ()):
            rest = {each: owner[each] for each in owner.__members__ if each != name}
            self.put(path.rpartition(".")[0], SimpleNamespace(**rest))
        elif isinstance(owner, type):
            for each in owner.__mro__:
                if name in vars(each):
                    self.patch.delattr(each, name)
        else:
            self.patch.delattr(owner, name)

    def remove_field(self, path):
        owner, name = self.owner(path)
        if issubclass(owner, msgspec.Struct):
            rest = [each for each in owner.__struct_fields__ if each != name]
            plain = type(owner.__name__, (), dict.fromkeys(rest))
            made = plain if name == "__struct_fields__" else msgspec.defstruct(owner.__name__, rest)
            self.put(path.rpartition(".")[0], made)
            return
        if dataclasses.is_dataclass(owner) and name in owner.__dataclass_fields__:
            self.patch.delitem(owner.__dataclass_fields__, name)
        self.remove(path)
        self.rename_in_init(path)

    def rename_in_init(self, path):
        """``__init__`` and ``__post_init__`` set another attribute instead."""
        owner, name = self.owner(path)
        for each, maker in itertools.product(owner.__mro__, ("__init__", "__post_init__")):
            old = inspect.unwrap(vars(each).get(maker, object.__init__))
            if name in getattr(getattr(old, "__code__", None), "co_names", ()):
                names = tuple("_gone_" if known == name else known for known in old.__code__.co_names)
                code = old.__code__.replace(co_names=names)
                changed = types.FunctionType(code, old.__globals__, maker, old.__defaults__, old.__closure__)
                changed.__kwdefaults__ = old.__kwdefaults__
                self.patch.setattr(each, maker, changed)



@pytest.fixture
def vllm(monkeypatch):
    return Vllm(monkeypatch)


def cases():
    """(row, what, path) of every single name, call and field in the table that this vLLM has."""
    for row in ROWS.values():
        if probe.result(row).state is State.ABSENT:
            continue
        yield from ((row.name, "remove", path) for path in row.names)
        yield from ((row.name, "call", path) for path, *_ in row.calls)
        for of, what in ((row.fields, "field"), (row.sets, "init")):
            yield from ((row.name, what, f"{owner}.{name}") for owner, names in of.items() for name in names.split())
        for path, absence in row.optional.items():
            if not absence.fits(probe.release()):
                yield row.name, "field", path


def assert_only(row: probe.Row, path: str = "") -> None:
    """Just this row's feature is off, with what needs it, or nothing starts. Of a ``path`` that older releases need for
    another feature, that may be off as well."""
    found = probe.result(row)
    assert found.state is State.FAILED and found.reason
    if row.feature is Feature.ALL:
        with pytest.raises(UnsupportedVLLM, match="vllm-kvtier cannot work with vLLM"):
            probe.start(row.side if row.side is not Side.BOTH else Side.SCHEDULER)
    else:
        found = {each for each in Feature if not probe.granted(each)}
        shared = {each.feature for each in ROWS.values() if path in each.covers()}
        assert off({row.feature} | ABSENT) <= found <= off({row.feature} | ABSENT | shared)


@pytest.mark.parametrize(("name", "what", "path"), list(cases()), ids=lambda value: value.rpartition(":")[2])
def test_probe_row_fails_for_changed_name_signature_or_field(vllm, name, what, path):
    if what == "remove":
        vllm.remove(path)
    elif what == "call":
        vllm.put(path, lambda a, b, c, d, e, f, g, h, *, only_this: None)
    elif what == "field":
        vllm.remove_field(path)
    else:
        vllm.rename_in_init(path)
    assert_only(ROWS[name], path)


def new_abstract_method(vllm):
    vllm.put(f"{BASE}:KVConnectorBase_V1.__abstractmethods__", frozenset({"a_new_method"}))


def another_parameter(vllm):
    vllm.put(f"{BASE}:KVConnectorBase_V1.reset_cache", lambda self, hard: None)


def abstract_metadata(vllm):
    vllm.put(f"{BASE}:KVConnectorMetadata.a_new_method", abc.abstractmethod(lambda self: None))
    vllm.put(f"{BASE}:KVConnectorMetadata.__abstractmethods__", frozenset({"a_new_method"}))


def partial_blocks_without_keys(vllm):
    real = checks.find(f"{HASHES}:generate_block_hash_extra_keys")

    def generate(request, start, end, medium):
        keys, medium = real(request, start, end, medium)
        return (keys if (end - start) % 4 == 0 else None), medium

    vllm.put(f"{HASHES}:generate_block_hash_extra_keys", generate)


def deeper_hashes(vllm):
    real = checks.find(f"{HASHES}:get_request_block_hasher")
    changed = lambda hash_block_size, caching_hash_fn, depth=0: real(hash_block_size, caching_hash_fn)  # noqa: E731
    vllm.put(f"{HASHES}:get_request_block_hasher", changed)


def names_of_requests(vllm):
    """What vLLM hashes of an adapter is not what it says without a request."""
    keys, lora = checks.find(f"{HASHES}:_gen_lora_extra_hash_keys"), trials._LORA

    def other(request):
        return keys(SimpleNamespace(lora_request=lora) if type(request) is SimpleNamespace else request)

    vllm.put(f"{HASHES}:_gen_lora_extra_hash_keys", other)


def other_hashes(vllm):
    real = checks.find(f"{HASHES}:get_request_block_hasher")

    @functools.wraps(real)
    def hasher(*args, **options):
        return lambda request: [hashlib.sha256(each).digest() for each in real(*args, **options)(request)]

    vllm.put(f"{HASHES}:get_request_block_hasher", hasher)


def no_way_for_failures(vllm):
    if hasattr(importlib.import_module(BASE), "KVConnectorTransferResults"):
        vllm.remove(f"{BASE}:KVConnectorTransferResults")
    vllm.rename_in_init(FAILED_LOADS)


def events_of_another_form(vllm):
    if not hasattr(importlib.import_module(HASHES), "to_event_extra_keys"):
        pytest.skip("extra keys have no tags in this version")
    vllm.put(f"{HASHES}:to_event_extra_keys", lambda keys: [("something else",)])


def schedule_by_groups(scheduler):
    if len(scheduler.running) < scheduler.max_num_running_reqs:
        return scheduler.kv_cache_manager.coordinator.find_longest_cache_hit_per_group()


def evicts_more(vllm):
    vllm.put(f"{POOL}.evict_blocks", lambda self, ids: self.cached_block_hash_to_block._cache.clear())


def scales_set_twice(vllm):
    real = checks.find(MAKE_SCALES)

    def make(self, kv_cache):
        self._k_scale_cache = None
        real(self, kv_cache)

    vllm.put(MAKE_SCALES, make)


def scales_beside_the_cache(vllm):
    real = checks.find(MAKE_SCALES)
    vllm.put(MAKE_SCALES, lambda self, kv_cache: real(self, kv_cache.clone()))


def tokens_in_a_copy(vllm):
    vllm.put("vllm.v1.request:ConstantList", list)


def session_keeps_hashes(vllm):
    """As up to 0.31."""
    real = checks.find(f"{SCHEDULER}._update_request_as_session")

    def update(self, session, added):
        kept = list(session.block_hashes)
        real(self, session, added)
        session.block_hashes[: len(kept)] = kept

    vllm.put(f"{SCHEDULER}._update_request_as_session", update)


BEHAVIOUR = [
    ("connector interface", new_abstract_method),
    ("connector interface", another_parameter),
    ("connector interface", lambda vllm: vllm.remove(f"{BASE}:KVConnectorBase_V1.bind_gpu_block_pool")),
    ("connector metadata", abstract_metadata),
    ("request", lambda vllm: vllm.put(f"{REQUEST}.num_tokens", property(lambda self: 0))),
    ("request", lambda vllm: vllm.rename_in_init(f"{REQUEST}.num_output_placeholders")),
    ("request", lambda vllm: vllm.rename_in_init(f"{REQUEST}.resumable")),
    ("end of a prompt", tokens_in_a_copy),
    ("block hashes", lambda vllm: vllm.put(f"{HASHES}:hash_block_tokens", lambda *a, **k: bytes(32))),
    ("block pool", lambda vllm: vllm.put(f"{POOL}.touch", lambda self, blocks: None)),
    ("block pool", lambda vllm: vllm.put(f"{POOL}.free_blocks", lambda self, blocks: None)),
    ("block pool", lambda vllm: vllm.put(f"{POOL}.get_cached_block", lambda self, block_hash, groups: None)),
    ("block pool", lambda vllm: vllm.put(f"{POOL}.get_num_free_blocks", lambda self: 3)),
    ("reset of the prefix cache", lambda vllm: vllm.put(f"{POOL}.reset_prefix_cache", lambda self: True)),
    ("eviction of single blocks", lambda vllm: vllm.put(f"{POOL}.evict_blocks", lambda self, ids: None)),
    ("eviction of single blocks", evicts_more),
    ("KV cache groups", lambda vllm: vllm.put("vllm.v1.kv_cache_interface:KVCacheTensor", object)),
    ("what is hashed beside tokens", partial_blocks_without_keys),
    ("hashes that look ahead", deeper_hashes),
    ("failed loads by request", no_way_for_failures),
    ("hits of all groups", lambda vllm: vllm.put(f"{SCHEDULER}.schedule", schedule_by_groups)),
    ("idle hook", lambda vllm: vllm.put(f"{CORE}._process_input_queue", lambda self: self.input_queue.get())),
    ("pause after an empty step", lambda vllm: vllm.put(f"{CORE}._process_engine_step", lambda self: self.step_fn())),
    ("loop over waiting requests", lambda vllm: vllm.put(f"{SCHEDULER}.schedule", lambda self: None)),
    ("wake-up of the engine", lambda vllm: vllm.put(f"{CORE}._handle_client_request", lambda self, kind, request: 0)),
    ("preemption", lambda vllm: vllm.rename_in_init(f"{REQUEST}.drop_stale_output")),
    ("sessions", session_keeps_hashes),
    ("KV events", events_of_another_form),
    ("hashes of a plain prompt", other_hashes),
    ("adapters in block hashes", names_of_requests),
    ("inputs of embeddings", lambda vllm: vllm.put(f"{CONFIG}._resolve_mm_embedding_inputs", lambda self: None)),
    ("virtual blocks", lambda vllm: vllm.put(f"{HASHES}:resolve_kv_cache_block_sizes", lambda *of: (24, 24))),
    ("scales per token and head", scales_set_twice),
    ("scales per token and head", scales_beside_the_cache),
    ("Triton's compiled kernels", lambda vllm: vllm.remove("triton.compiler:CompiledKernel._init_handles")),
]


@pytest.mark.parametrize(("name", "change"), BEHAVIOUR, ids=lambda value: value if isinstance(value, str) else "")
def test_probe_row_fails_for_changed_behaviour(vllm, name, change):
    if probe.result(ROWS[name]).state is State.ABSENT:
        pytest.skip("not in this version")
    probe.clear()
    change(vllm)
    shared = {no_way_for_failures: FAILED_LOADS, tokens_in_a_copy: f"{REQUEST}._all_token_ids"}
    assert_only(ROWS[name], shared.get(change, ""))


def test_probe_every_trial_has_a_failing_case():
    assert {row.name for row in ROWS.values() if row.trial} == {name for name, _ in BEHAVIOUR}


def test_probe_of_installed_vllm_has_no_failed_row():
    assert not [found for found in probe.table() if found.state is State.FAILED]


def test_probe_trials_leave_no_hash_seed(monkeypatch):
    """vLLM makes its own later in an engine's start: one of ours would separate engines."""
    hashes = importlib.import_module(HASHES)
    monkeypatch.delattr(hashes, "NONE_HASH", raising=False)  # as in an engine that starts
    probe.start(Side.SCHEDULER)
    assert not hasattr(hashes, "NONE_HASH")
    monkeypatch.setattr(hashes, "NONE_HASH", hashes.BlockHash(b"7" * 32), raising=False)
    probe.clear()
    probe.start(Side.SCHEDULER)
    assert hashes.NONE_HASH == b"7" * 32


# -- what becomes of a result ------------------------------------------------------------------------------------------


def test_probe_trials_leave_no_line_in_vllms_log(caplog, monkeypatch):
    """A reset that the probe wants to fail was a warning at every start."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO")
    trials.reset()
    assert not caplog.records


def test_probe_start_logs_disabled_feature_once(vllm, warnings):
    vllm.remove(f"{CORE}._notify_idle_state_callbacks")
    probe.start(Side.SCHEDULER)
    probe.start(Side.SCHEDULER)
    (line,) = warnings()
    assert "idle hook" in line and "_notify_idle_state_callbacks is missing" in line
    assert "peer fetch" in line and "synchronous loads" in line


def test_probe_start_on_newer_vllm_warns(monkeypatch, warnings):
    monkeypatch.setattr(version, "installed_version", lambda: "0.41.0")
    monkeypatch.setattr(probe, "installed_version", lambda: "0.41.0")
    probe.start(Side.WORKER)
    assert not [line for line in warnings() if "newer" in line]  # one process says it
    probe.start(Side.SCHEDULER)
    assert len([line for line in warnings() if "vLLM 0.41.0 is newer than the releases" in line]) == 1


@pytest.mark.parametrize("release", ["0.1.dev1+gdeadbee", "unknown", "0.41.0"])
def test_probe_start_on_unknown_vllm_disables_missing_feature(vllm, monkeypatch, warnings, release):
    """What an old release may lack, a build without a number may not."""
    monkeypatch.setattr(version, "installed_version", lambda: release)
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    probe.start(Side.SCHEDULER)
    assert not probe.granted(Feature.HIT_SOURCES)
    assert [line for line in warnings() if "sources of cache hits" in line]


def test_probe_start_on_old_vllm_logs_no_absent_feature(monkeypatch, warnings):
    monkeypatch.setattr(version, "installed_version", lambda: "0.31.0")
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    probe.start(Side.SCHEDULER)
    assert not probe.granted(Feature.HIT_SOURCES) and not warnings()
    assert probe.result(ROWS["sources of cache hits"]).state is State.ABSENT


def test_probe_value_of_missing_field_is_default_or_raises(monkeypatch):
    old, path = SimpleNamespace(), "KVCacheGroupSpec.enable_kv_transfer"
    assert probe.value(SimpleNamespace(enable_kv_transfer=False), path) is False
    monkeypatch.setattr(version, "installed_version", lambda: "0.28.0")
    assert probe.value(old, path) is True
    for release in ("0.30.0", "0.41.0", "unknown"):
        monkeypatch.setattr(version, "installed_version", lambda release=release: release)
        with pytest.raises(UnsupportedVLLM, match="no enable_kv_transfer"):
            probe.value(old, path)


def test_probe_absence_fits_named_versions_only():
    since, until = Absence(None, since=(0, 30, 0)), Absence(None, until=(0, 28, 0))
    assert [since.fits(each) for each in ((0, 29, 9), (0, 30, 0), version.UNKNOWN)] == [True, False, False]
    assert [until.fits(each) for each in ((0, 27, 1), (0, 28, 0), version.UNKNOWN)] == [False, True, True]


def refuse(monkeypatch, feature: Feature) -> None:
    row = next(row for row in ROWS.values() if row.feature is feature)
    monkeypatch.setitem(probe._results, row.name, probe.Result(row, State.FAILED, "it is gone"))


def test_engine_thread_without_idle_hook_wraps_no_method(monkeypatch):
    from vllm.v1.engine.core import EngineCoreProc

    before = EngineCoreProc._notify_idle_state_callbacks
    refuse(monkeypatch, Feature.IDLE)
    thread = EngineThread(lambda: None, Uncontained())
    thread.wake()
    assert EngineCoreProc._notify_idle_state_callbacks is before and thread.scheduler is None
    assert not thread.scheduler_lock.known


def test_hashes_without_granted_feature_match_nothing(monkeypatch):
    from support import make_request

    from vllm_kvtier.vllm_compat import requests

    request = make_request("r", list(range(11)), 4)
    assert requests.tail_hash(request, 11, 4) == requests.tail_hash(request, 11, 4)
    refuse(monkeypatch, Feature.HANDOFFS)
    refuse(monkeypatch, Feature.PROMPTS)
    assert requests.tail_hash(request, 11, 4) != requests.tail_hash(request, 11, 4)
    info = SimpleNamespace(hash_lookahead=0, hash_function=lambda: None)
    assert requests.hash_prompt(info, list(range(11)), "", 4) == []


def test_hit_sources_without_granted_feature_are_empty(monkeypatch):
    from vllm_kvtier.vllm_compat.connector_types import hit_sources

    refuse(monkeypatch, Feature.HIT_SOURCES)
    assert hit_sources({"host": 32}) == {}


def test_hidden_metrics_without_granted_feature_have_no_series(monkeypatch):
    from metrics_harness import vllm_config
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from vllm_kvtier.telemetry.stats import OLD_NAMES
    from vllm_kvtier.vllm_compat.stats import PREFIX, KVTierPromMetrics

    def old_series(config) -> set[str]:
        registry = CollectorRegistry()
        types = {sort: functools.partial(sort, registry=registry) for sort in (Counter, Gauge, Histogram)}
        KVTierPromMetrics(config, types, ["engine"], {0: ["0"]})
        return {family.name.removeprefix(PREFIX) for family in registry.collect()} & set(OLD_NAMES.values())

    assert old_series(vllm_config(show_hidden_metrics=True)) == set(OLD_NAMES.values())
    refuse(monkeypatch, Feature.HIDDEN_METRICS)
    lacking = vllm_config()
    del lacking.observability_config
    assert old_series(lacking) == set()


def test_kernel_launcher_without_granted_feature_is_none(monkeypatch):
    from vllm_kvtier.worker.device.cuda_driver import Driver

    driver = object.__new__(Driver)
    assert driver.launcher == driver.launch
    refuse(monkeypatch, Feature.LAUNCHER)
    assert driver.launcher is None

"""Weights that are changed while the engine runs: which parts learn it, and which requests' KV is not shared from then
on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from matcher_harness import World
from source_fakes import bare_identity
from support import Uncontained, make_request
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool as VllmPool
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllm.v1.engine import core
from vllm.v1.request import RequestStatus

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.connector import KVTierConnector
from vllm_kvtier.containment import Containment
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.matching import provenance as provenance_module
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.scheduler.peer_access import PeerAccess
from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import adapters as adapters_module
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat import weights
from vllm_kvtier.vllm_compat.adapters import Adapters
from vllm_kvtier.vllm_compat.hooks.admission import Admission
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.waiting_loop import WaitingLoop
from vllm_kvtier.wire.link import ClearChecksums

HASH_BLOCK_SIZE = 4


class Listener:
    def __init__(self):
        self.heard: list[str] = []

    def weights_changed(self, how: str) -> None:
        self.heard.append(how)

    def encoder_reset(self) -> None:
        self.heard.append("encoder reset")


@pytest.fixture
def listener(monkeypatch) -> Listener:
    """Of a stand-in for vLLM's engine core."""

    class EngineCore:
        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            if method == "fails":
                raise ValueError
            return [method]

        def sleep(self, level=1, mode="abort"):
            return level, mode

        def add_lora(self, lora_request):
            return lora_request

        def reset_encoder_cache(self):
            listener.heard.append("resets")

    monkeypatch.setattr(core, "EngineCore", EngineCore)
    listener = Listener()
    weights.watch(listener)
    weights.watch(listener)  # another half in this process: nothing is wrapped twice
    return listener


def test_weights_pushed_by_any_method_are_reported(listener):
    engine = core.EngineCore()
    assert engine.collective_rpc("update_weights", kwargs={}) == ["update_weights"]
    engine.collective_rpc("any name that a worker extension has", None, (1,))
    engine.collective_rpc(method="reload_weights")
    engine.collective_rpc(print)
    with pytest.raises(ValueError):
        engine.collective_rpc("fails")
    assert len(listener.heard) == 5 and listener.heard[0] == "update_weights"


def test_weights_unchanged_are_not_reported(listener):
    engine = core.EngineCore()
    for method in weights.HARMLESS:
        engine.collective_rpc(method)
    assert engine.sleep() == (1, "abort") and engine.sleep(level=1, mode="wait") == (1, "wait")
    assert not listener.heard
    assert engine.sleep(2) == (2, "abort") and engine.sleep(level=2) == (2, "abort")
    assert len(listener.heard) == 2


def test_weights_encoder_cache_reset_is_reported_afterwards(listener):
    core.EngineCore().reset_encoder_cache()
    assert listener.heard == ["resets", "encoder reset"]


def test_weights_listener_error_does_not_affect_engine(listener, monkeypatch, caplog):
    monkeypatch.setattr(listener, "weights_changed", lambda how: 1 / 0)
    assert core.EngineCore().collective_rpc("update_weights") == ["update_weights"]
    assert "ZeroDivisionError" in caplog.text


def test_weights_adapter_loaded_by_vllm_is_known(listener, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "ADAPTERS", adapters := Adapters())
    request = LoRARequest("style", 1, str(tmp_path))
    assert core.EngineCore().add_lora(request) is request and adapters._known


# -- what becomes of requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps, resumable, admitted", [(False, True, False), (False, False, True), (True, True, True)])
def test_sessions_whose_kv_vllm_miscounts_are_private(keeps, resumable, admitted):
    """With drafts, tokens behind a session's stop counted as computed: their KV was stored under its next tokens."""
    provenance = Provenance(None, keeps_sessions=keeps)
    request = make_request("r", list(range(9)), HASH_BLOCK_SIZE)
    request.resumable = resumable
    assert provenance.would_admit(request) is admitted
    assert provenance.admit(request, True) is admitted and provenance.admit(request, True) is admitted
    assert provenance.remove(request) is admitted


class Running:
    """A scheduler side around a real block pool and matcher; ``how`` its requests end is not its matter."""

    def __init__(self, prefix_caching=True, encoder=None, **options):
        self.sent = []  # to the workers, and None: leases were revoked
        self.pool = VllmPool(num_gpu_blocks=8, enable_caching=prefix_caching, hash_block_size=HASH_BLOCK_SIZE)
        self.world = World([(HASH_BLOCK_SIZE, None)])
        self.half = half = KVTierConnectorScheduler.__new__(KVTierConnectorScheduler)
        pool = BlockPool(self.pool)
        half._config, half._pool, half._matcher = KVTierConfig(**options), pool, self.world.matcher
        half._provenance = Provenance(pool, prefix_caching, encoder)
        half._info = SimpleNamespace(unsupported=None, groups=self.world.load.engine.geometry.groups)
        half._questions, half._geometry = SimpleNamespace(waiting=[]), self.world.load.engine.geometry
        half._run_jobs, half._identity = lambda: None, bare_identity(namespace=object())
        half._pool = SimpleNamespace(free_count=lambda: 99)
        half._contain, half._passive = Uncontained(), False
        half._exporter = SimpleNamespace(drain=lambda: None)
        half._events = half._offloader = half._sharing = None
        revoke = lambda seconds: self.sent.append(None)  # noqa: E731
        half._exports = SimpleNamespace(clear=lambda: None, revoke=revoke, has_freed=lambda: False)
        half._checksum_index = half._tables = SimpleNamespace(clear=lambda: None)
        half._clearing = clearing = ChecksumClearing(self.sent.append)
        half._sync_load = SimpleNamespace(unpin=lambda: None, pin_again=lambda: None, verification_pending=False)
        half._engine = SimpleNamespace(
            paused_scheduler=None, scheduler_lock=SimpleNamespace(held=lambda method: method),
            waiting_loop=WaitingLoop(), admission=Admission(),
        )  # fmt: skip
        self.namespaces = NamespaceIds()
        self.namespaces.base = b"base"
        half._store = SimpleNamespace(renew=self.namespaces.renew)
        self.told = []
        engine = SimpleNamespace(
            info=SimpleNamespace(), identity=half._identity,
            reactor=SimpleNamespace(call_soon=lambda job: job()),
        )
        half._access = PeerAccess(engine, SimpleNamespace(close=self.told.append), None, None, None, clearing)
        pool.around_reset(half._before_reset, half._after_reset, half._contain)

    def request(self, name: str, lora: LoRARequest | None = None):
        request = make_request(name, list(range(16)), HASH_BLOCK_SIZE)
        request.lora_request = lora
        return request

    def admitted(self, request) -> bool:
        self.half.match(request, 0)
        return self.half._provenance.may_share(SimpleNamespace(request=request))


def test_weights_changed_starts_new_namespace_and_refuses_peers():
    running = Running()
    before = running.namespaces.of(b"")
    assert running.admitted(running.request("before"))
    running.half.weights_changed("update_weights")
    assert running.namespaces.of(b"") != before and "model_fingerprint" in running.told[0]
    assert running.admitted(running.request("after")), "vLLM's cache was empty"
    assert not running.admitted(running.request("before")), "it has KV of both"
    running.half._provenance.remove(running.request("before"))
    named = Running(model_fingerprint="mine")
    named.half.weights_changed("update_weights")
    assert not named.told and named.namespaces.of(b"") != before
    named.half._exporter = SimpleNamespace(step=1, urgent=False)
    work = named.half.step_work()
    assert named.sent == [None, ClearChecksums(work.generation)] and work.generation, "after leased reads"


def test_weights_changed_with_cached_blocks_shares_after_reset():
    running = Running()
    blocks = running.pool.get_new_blocks(1)
    running.half.weights_changed("update_weights")
    assert not running.admitted(running.request("one"))
    assert not running.half._provenance.would_admit(running.request("one"))
    assert not running.pool.reset_prefix_cache(), "a request holds a block"
    assert not running.admitted(running.request("two"))
    running.pool.free_blocks(blocks)
    assert running.pool.reset_prefix_cache()
    assert running.admitted(running.request("three"))
    assert not running.admitted(running.request("two")), "for life"


def with_encoder(prefix_caching=True) -> tuple[Running, EncoderCacheManager]:
    """Of a multimodal model; vLLM keeps the outputs for an image, also when its request has ended."""
    manager = EncoderCacheManager(cache_size=100)
    scheduler = SimpleNamespace(encoder_cache_manager=manager)
    running = Running(prefix_caching, lambda: weights.encoder_is_empty(scheduler))
    image = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=0, length=8))
    request = SimpleNamespace(request_id="r", mm_features=[image], get_num_encoder_embeds=lambda i: 8)
    manager.allocate(request, 0)
    manager.free(request)
    return running, manager


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_weights_changed_with_encoder_cache_shares_after_reset(prefix_caching):
    """New KV is made from them, and vLLM's reset of its prefix cache leaves them there."""
    running, manager = with_encoder(prefix_caching)
    running.half.weights_changed("update_weights")
    assert running.pool.reset_prefix_cache() and not running.admitted(running.request("one"))
    manager.reset()
    running.half.encoder_reset()
    assert running.admitted(running.request("two"))
    running.half.weights_changed("update_weights")
    assert running.admitted(running.request("three")), "nothing of the old ones was left"


def test_weights_changed_needs_both_caches_empty_at_once():
    running, manager = with_encoder()
    blocks = running.pool.get_new_blocks(1)
    running.half.weights_changed("update_weights")
    manager.reset()
    running.half.encoder_reset()
    assert not running.admitted(running.request("one")), "a block was made from them"
    running.pool.free_blocks(blocks)
    assert running.pool.reset_prefix_cache() and running.admitted(running.request("two"))
    assert not weights.encoder_is_empty(None), "vLLM's scheduler is not known"
    assert not weights.encoder_is_empty(SimpleNamespace(encoder_cache_manager=EncoderDecoderCacheManager(8)))


def test_weights_adapter_replaced_with_encoder_cache_is_not_shared(tmp_path, adapters):
    running, manager = with_encoder()
    lora = LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    assert ended(running, matched(running, running.request("before", lora)))
    adapter_files(tmp_path / "one", b"others")
    adapters.load(LoRARequest("one", 1, lora.lora_path, load_inplace=True), lambda: None)
    assert running.pool.reset_prefix_cache()
    assert not ended(running, matched(running, running.request("after", lora)))
    manager.reset()
    running.half.encoder_reset()
    assert ended(running, matched(running, running.request("reset", lora)))


def test_weights_changed_with_failed_reset_shares_nothing():
    running = Running()
    running.half.reset = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        running.half.weights_changed("update_weights")
    assert not running.admitted(running.request("one"))


def test_weights_without_name_request_is_not_shared():
    running = Running()
    running.half._identity.namespace = None
    request = running.request("early")
    assert not running.admitted(request)
    running.half._identity.namespace = object()
    assert not running.admitted(request) and running.admitted(running.request("late"))
    running.half._sync_load.verification_pending = True
    assert running.half.match(request, 0) == (None, False), "vLLM's cache has blocks that may be wrong"
    assert running.half._provenance.remove(request) is False
    assert running.half._provenance.remove(running.request("late")) is True and not running.half._provenance._admitted


def test_weights_changed_without_prefix_caching_shares_later_requests():
    """No reset ever comes there, and no request gets what another one has computed."""
    running = Running(prefix_caching=False)
    running.pool.get_new_blocks(1)
    assert running.admitted(running.request("before"))
    running.half.weights_changed("update_weights")
    assert not running.admitted(running.request("before")) and running.admitted(running.request("after"))


@pytest.mark.parametrize("part", ["_run_jobs", "resolve_namespace", "matcher", "admit", "scheduler not found"])
def test_weights_request_with_failed_matching_is_not_shared(part):
    """It was computed on what vLLM's cache had of the old ones, and stored as the new ones'."""
    running = Running()
    half, connector = running.half, KVTierConnector.__new__(KVTierConnector)
    half._engine.scheduler = None
    connector.containment, connector._scheduler = Containment(Counters()), half
    connector._marks_failures = part == "scheduler not found"
    request = running.request("one")
    if part == "admit":
        half._provenance.admit = lambda *_: 1 / 0
    elif part == "matcher":
        half._matcher.match = lambda *_: 1 / 0
    elif not connector._marks_failures:
        half._questions.waiting.append("a question")
        setattr(half if part == "_run_jobs" else half._identity, part, lambda *_: 1 / 0)
    shares, t = half._provenance.may_share, SimpleNamespace(request=request)
    assert not shares(t), "it was not looked at yet"
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False) and not shares(t)
    assert bool(connector.containment.errors) != connector._marks_failures


def test_weights_ended_request_leaves_no_state():
    """Neither if its end failed, nor if it ended while the workers still load for it."""
    running = Running()
    half, requests = running.half, [running.request(name) for name in ("ends", "fails", "abandoned")]
    assert all(running.admitted(request) for request in requests)
    half._tables.remove = half._exports.end_export = lambda name: None
    assert half._provenance.remove(requests[0]) and half._provenance.remove(requests[2])
    half.release(requests[1])
    half.weights_changed("update_weights")
    assert not half._provenance._admitted


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    adapters = Adapters()
    for module in (vr, provenance_module):
        monkeypatch.setattr(module, "ADAPTERS", adapters)
    for limit in ("READ_SECONDS", "LOOK_SECONDS", "SLOW_SECONDS", "SHORT_SECONDS"):
        monkeypatch.setattr(adapters_module, limit, 60.0)  # however slow this machine is
    return adapters


def adapter_files(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.bin").write_bytes(weights)
    return folder


def matched(running, request):
    while request.request_id not in running.half._provenance._admitted:  # its files are being read
        running.half.match(request, 0)  # what the store would answer is not waited for
    return request


def ended(running, request) -> bool:
    """Whether what it wrote may leave this engine."""
    request.status = RequestStatus.FINISHED_STOPPED
    return running.half._provenance.remove(request)


def test_weights_adapter_replaced_ends_sharing_of_its_requests(tmp_path, adapters):
    running = Running()
    loras = {}
    for number, name in enumerate(("one", "two"), 1):
        loras[name] = LoRARequest(name, number, str(adapter_files(tmp_path / name, name.encode())))
        adapters.load(loras[name], lambda: None)
    one, two = (matched(running, running.request(f"of {name}", loras[name])) for name in loras)
    adapter_files(tmp_path / "one", b"new")
    again = LoRARequest("one", 1, loras["one"].lora_path, load_inplace=True)
    adapters.load(again, lambda: None)
    assert not ended(running, one) and ended(running, two)
    later = matched(running, running.request("later", again))
    assert not ended(running, later), "vLLM's cache may have the old one's KV"


def test_weights_adapter_files_changed_during_request_are_unknown(tmp_path, adapters):
    """Nothing tells the engine that its workers have read them anew."""
    running, lora = Running(), LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    requests = [matched(running, running.request(name, lora)) for name in ("ends before", "runs")]
    t = SimpleNamespace(request=requests[1])
    assert running.half._provenance.is_admitted(t) and not running.half._provenance.may_share(t), "not before its end"
    assert ended(running, requests[0])
    adapter_files(tmp_path / "one", b"others")
    assert not ended(running, requests[1])


def test_weights_adapter_replaced_while_request_waits_is_used(tmp_path, adapters):
    running, lora = Running(), LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    request = running.request("waits", lora)
    running.half._provenance.would_admit(request)
    adapter_files(tmp_path / "one", b"others")
    assert ended(running, matched(running, request))
    assert vr.lora_fingerprint(request) == adapters.current(lora).digest


@pytest.mark.parametrize("cause", ["stale", "not named", "failed"])
def test_weights_adapter_loaded_by_private_request_is_unknown_later(tmp_path, adapters, cause):
    """Its workers have read them for it, whatever it is private for."""
    running, lora = Running(), LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    blocks = running.pool.get_new_blocks(1)
    request = running.request("private", lora)
    if cause == "stale":
        running.half.weights_changed("update_weights")
    if cause == "failed":
        running.half.compute(request)
    running.half._identity.namespace = None if cause == "not named" else object()
    assert not ended(running, matched(running, request))
    running.half._identity.namespace = object()
    adapter_files(tmp_path / "one", b"others")
    running.pool.free_blocks(blocks)
    assert running.pool.reset_prefix_cache()
    assert not ended(running, matched(running, running.request("later", lora)))


def test_weights_adapter_replaced_needs_reset_of_own_cache(tmp_path, adapters):
    engines, lora = [Running(), Running()], LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    assert ended(engines[0], matched(engines[0], engines[0].request("before", lora)))
    adapter_files(tmp_path / "one", b"others")
    lora = LoRARequest("one", 2, lora.lora_path)
    adapters.load(lora, lambda: None)
    for engine, shared in ((engines[1], False), (engines[0], True)):
        assert engine.pool.reset_prefix_cache()
        assert ended(engines[0], matched(engines[0], engines[0].request(f"after {shared}", lora))) is shared


def test_weights_adapter_loaded_inplace_in_one_of_two_engines_is_unknown(tmp_path, adapters):
    """The workers of the others have what they had, under the same name and number."""
    engines = [Running(), Running(prefix_caching=False)]
    lora = LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    assert ended(engines[0], matched(engines[0], engines[0].request("before", lora)))
    again = LoRARequest("one", 1, lora.lora_path, load_inplace=True)
    adapters.load(again, lambda: None)
    assert ended(engines[0], matched(engines[0], engines[0].request("as before", lora))), "the same files"
    adapter_files(tmp_path / "one", b"others")
    adapters.load(again, lambda: None)
    assert engines[0].pool.reset_prefix_cache()
    for i, engine in enumerate(engines):
        assert not ended(engine, matched(engine, engine.request(f"after {i}", lora)))


def test_weights_rpc_that_may_load_adapters_makes_them_unknown_until_inplace_load(
    tmp_path, adapters, listener, monkeypatch
):
    """Trainers call the workers' own ``add_lora``, which vLLM's engine core does not see."""
    monkeypatch.setattr(weights, "ADAPTERS", adapters)
    running, engine = Running(), core.EngineCore()
    loras = [LoRARequest(name, i, str(adapter_files(tmp_path / name))) for i, name in enumerate(("one", "two"), 1)]
    for i, lora in enumerate(loras):
        if not i:
            assert ended(running, matched(running, running.request("before", lora)))
        engine.collective_rpc("add_lora", args=(lora,))
        adapter_files(tmp_path / lora.lora_name, b"others")
        engine.add_lora(lora)  # it has this number
        assert running.pool.reset_prefix_cache()
        assert not ended(running, matched(running, running.request(f"of {lora.lora_name}", lora)))
        engine.add_lora(LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path, load_inplace=True))
        assert running.pool.reset_prefix_cache()
        assert ended(running, matched(running, running.request(f"in place {lora.lora_name}", lora)))
    engine.collective_rpc("list_loras")
    assert ended(running, matched(running, running.request("after", loras[1])))
    engine.sleep(2)
    assert not ended(running, matched(running, running.request("slept", loras[1])))


@pytest.mark.parametrize("tokens", [0, 1])
def test_weights_adapter_answer_that_is_aborted_is_shared(tmp_path, adapters, tokens):
    """As at a stop string. Before its first token was read, the adapter may not have been loaded for it."""
    running, lora = Running(), LoRARequest("one", 1, str(adapter_files(tmp_path / "one")))
    adapters.load(lora, lambda: None)
    request = matched(running, running.request("stopped", lora))
    request.append_output_token_ids([1] * tokens)
    request.status = RequestStatus.FINISHED_ABORTED
    assert running.half._provenance.remove(request) is bool(tokens)


@pytest.mark.parametrize("how", ["aborted", "private", "not looked at"])
def test_weights_adapter_folder_exchanged_meanwhile_is_unknown(tmp_path, adapters, how):
    """What a request computed meanwhile stays in vLLM's prefix cache, and the next one would store it as its own."""
    current, lora = adapter_files(tmp_path / "current"), LoRARequest("one", 1, str(tmp_path / "current"))
    adapter_files(tmp_path / "new", b"others")
    running = Running()
    assert ended(running, matched(running, running.request("before", lora)))
    running.half._identity.namespace = None if how == "private" else object()
    request = matched(running, running.request("meanwhile", lora))
    current.rename(tmp_path / "old")
    (tmp_path / "new").rename(current)
    request.status = RequestStatus.FINISHED_ABORTED
    assert how == "not looked at" or not running.half._provenance.remove(request)
    assert how == "not looked at" or adapters.current(lora) is None, "found when it ended"
    current.rename(tmp_path / "new")
    (tmp_path / "old").rename(current)
    running.half._identity.namespace = object()
    assert not ended(running, matched(running, running.request("after", lora)))

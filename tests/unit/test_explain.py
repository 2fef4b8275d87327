"""What an engine says when it is asked about a prompt: what it would find, what it would do, its identity."""

from types import SimpleNamespace

import pytest
from cache_groups import cache_groups, mamba
from doctor_fakes import ranks
from engine_configs import engine_config
from source_fakes import load_context
from support import FakePool, eventually, make_request
from tier_fakes import FakePending
from vllm.lora.request import LoRARequest

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.doctor import removal_text
from vllm_kvtier.scheduler.admin.explain import Explainer, spans_in_tokens
from vllm_kvtier.scheduler.admin.gpu_prefix import gpu_prefix
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import Adapters
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.wire import messages as m

HASH_BLOCK_SIZE = 4
TOKENS = list(range(42))  # 10 blocks and a bit


class World:
    """An Explainer over a tier whose answers the test gives, and a planner that has measured."""

    def __init__(self, tier: bool = True, **options):
        self.pool = FakePool(100, HASH_BLOCK_SIZE)
        self.planner = LoadPlanner({"host": 1e6, "peer_gpu": 1e9}, known=0)
        self.asked: list[tuple[list[bytes], bytes]] = []
        self.pending = FakePending(1)
        self.tier = SimpleNamespace(
            explain=self._explain, instance="life", problem="", load_bytes=lambda tokens: tokens * 1000,
            namespace=lambda lora_fingerprint: "5" * 32,
        )  # fmt: skip
        make_request("r", TOKENS, HASH_BLOCK_SIZE)  # makes vLLM's seed
        info = {"max_tokens": 1000}
        load = load_context(
            [(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, config=KVTierConfig(**options), pool=BlockPool(self.pool),
            planner=self.planner, info=info, identity={"bytes_for": lambda tokens: tokens * 1000},
        )  # fmt: skip
        self.jobs = []
        exports = SimpleNamespace(longest_prefix=lambda block_hashes, lora_fingerprint: 4)
        self.explainer = Explainer(load, exports, self.tier if tier else None, self.jobs.append)

    def _explain(self, block_hashes, lora_fingerprint):
        self.asked.append((block_hashes, lora_fingerprint))
        return self.pending

    def cache(self, blocks: int) -> None:
        for number, name in enumerate(make_request("r", TOKENS, HASH_BLOCK_SIZE).block_hashes[:blocks], 1):
            self.pool.cached[bytes(name), 0] = number

    def explain(self, outcome=None, **question) -> m.Explanation:
        said = []
        self.explainer.ask(m.Explain(3, TOKENS, **question), said.append)
        if self.asked and self.pending.outcome is None:
            assert not said and not self.jobs, "the store has not answered"
            self.pending.resolve(outcome)
        for job in self.jobs:
            job()
        return said.pop()


def holding(num_hash_blocks: int, spans=(), **more) -> sm.Explained:
    return sm.Explained(1, num_hash_blocks, [num_hash_blocks], [list(spans)], known=60.0, seconds=60.0, **more)


def measured(planner: LoadPlanner, token_seconds: float) -> None:
    for _ in range(30):
        for tokens in (8, 32, 128):
            planner.observe_step(0.001 + tokens * token_seconds, [(tokens, 0)], 0)


def test_explain_reports_tiers():
    world = World()
    world.cache(2)
    spans = [sm.Span(5, "memory"), sm.Span(2, "disk"), sm.Span(3, "", int(RemovalReason.EVICTED), 5.0, 9.0)]
    tiers = [sm.TierReach("disk", "ready", "", 7), sm.TierReach("nodes", "unavailable", "no net", None)]
    found = world.explain(holding(5, spans, tiers=tiers, holders=[sm.Holder("h", 7, "i", 6)]))
    assert (found.question, found.prompt, found.hash_block_size) == (3, 42, HASH_BLOCK_SIZE)
    assert (found.gpu_cache, found.exported, found.stored) == (8, 4, 20)
    assert [(s.start, s.end, s.tier, s.removal_reason) for s in found.spans] == [
        (0, 20, "memory", 0), (20, 28, "disk", 0), (28, 40, "", RemovalReason.EVICTED)
    ]  # fmt: skip
    assert found.tiers == [m.Source("disk", 28, "ready"), m.Source("nodes", None, "unavailable", "no net")]
    assert found.peers == [m.Source("h:7", 24)] and found.store == "life" and found.problem == ""
    assert found.namespace == "5" * 32
    assert world.asked[0][0] == [bytes(each) for each in make_request("r", TOKENS, HASH_BLOCK_SIZE).block_hashes]


@pytest.mark.parametrize(
    ("token_seconds", "policy", "load", "reason"),
    [(0.1, "auto", True, "faster"), (1e-6, "auto", False, "slower"), (1e-6, "always", True, "policy_always")],
)
def test_explain_reports_load_decision(token_seconds, policy, load, reason):
    world = World(load_policy=policy)
    measured(world.planner, token_seconds)
    before = world.planner._cost("host").slow
    (weighed,) = world.explain(holding(10)).load_decisions
    assert (weighed.source, weighed.start, weighed.end, weighed.load, weighed.reason) == ("host", 0, 40, load, reason)
    assert weighed.load_seconds == pytest.approx(0.04, rel=0.2) and weighed.compute_seconds is not None
    assert world.planner._cost("host").slow == before, "a question is no decision"


def test_explain_reports_peer_gpu():
    world = World(pull_threshold=16)
    holder = sm.Holder("h", 7, "i", 10)
    (weighed,) = world.explain(holding(0, holders=[holder])).load_decisions
    assert (weighed.source, weighed.end, weighed.load, weighed.reason) == ("peer_gpu", 40, True, "not_measured")
    world = World(pull_threshold=64)
    (weighed,) = world.explain(holding(0, holders=[holder])).load_decisions
    assert not weighed.load and weighed.reason == "below_threshold"
    world = World()
    world.cache(10)
    assert not world.explain(holding(10, holders=[holder])).load_decisions, "its prefix cache has it all"


def test_explain_reports_obstacles():
    assert "store: off" in World(tier=False).explain().problem
    world = World()
    found = world.explain(Failed("it hangs"))
    assert found.problem == "it hangs" and found.stored == 0 and not found.spans
    world = World()
    world.explainer._info.max_tokens = 16
    assert "at most 16" in world.explain(holding(0)).problem and len(world.asked[0][0]) == 4


def test_explain_uses_salt_and_adapter_in_block_hashes(monkeypatch, tmp_path):
    """As vLLM's own requests do with them."""
    lora = LoRARequest("style", 1, str(tmp_path))
    for name in ("adapter_config.json", "adapter_model.bin"):
        (tmp_path / name).write_bytes(b"{}")
    monkeypatch.setattr(vr, "ADAPTERS", adapters := Adapters())
    monkeypatch.setattr("vllm_kvtier.scheduler.admin.explain.ADAPTERS", adapters)
    unknown = World()
    assert "no request to this engine has used an adapter 'style'" in unknown.explain(adapter="style").problem
    assert not unknown.asked, "what it does not know it cannot ask for"
    adapters.load(lora, lambda: None)
    lora_fingerprint = eventually(lambda: vr.lora_fingerprint(SimpleNamespace(lora_request=lora)))
    for salt in ("", "tenant"):
        request = make_request("r", TOKENS, HASH_BLOCK_SIZE, salt=salt or None)
        request.lora_request = lora
        del request.block_hashes[:]
        request.update_block_hashes()
        world = World()
        world.explain(holding(0), adapter="style", cache_salt=salt)
        assert world.asked == [([bytes(each) for each in request.block_hashes], lora_fingerprint)]


def test_explain_names_no_hashes_that_cover_tokens_behind_their_blocks():
    world = World()
    world.explainer._info.hash_lookahead = 1
    world.cache(4)
    found = world.explain()
    assert not world.asked and found.gpu_cache == 0 and "cover tokens behind their blocks" in found.problem


def test_explain_reports_only_lookup_windows():
    full, sliding = cache_groups([(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, 8)])
    rows = [[sm.Span(6, "memory"), sm.Span(4, "", int(RemovalReason.CLEARED))], [sm.Span(3, ""), sm.Span(7, "memory")]]
    told = spans_in_tokens(rows, [full, sliding], 40)
    assert [(s.group, s.start, s.end, s.tier) for s in told] == [
        (0, 0, 24, "memory"), (0, 24, 40, ""), (1, 12, 40, "memory")
    ], "what the window before token 24 does not reach is no cause of anything"  # fmt: skip
    rows[1] = [sm.Span(5, "memory"), sm.Span(5, "")]
    gone = [s for s in spans_in_tokens(rows, [full, sliding], 40) if s.group and not s.tier]
    assert [(s.start, s.end) for s in gone] == [(20, 40)]
    rows[1] = [sm.Span(6, "memory"), sm.Span(4, "")]
    assert [(s.start, s.end) for s in spans_in_tokens(rows, [full, sliding], 40) if s.group] == [(0, 24)], (
        "nor what is behind"
    )
    alone = spans_in_tokens([[sm.Span(7, ""), sm.Span(3, "memory")]], [sliding], 40)
    assert [(s.start, s.end, s.tier) for s in alone] == [(28, 40, "memory")]


def test_explain_state_that_vllm_did_not_keep_is_no_missed_prompt():
    groups = [*cache_groups([(HASH_BLOCK_SIZE, None)]), mamba(2 * HASH_BLOCK_SIZE)]
    rows = [[sm.Span(6, "memory"), sm.Span(4, "")], [sm.Span(1, ""), sm.Span(1, "memory"), sm.Span(3, "")]]
    told = [span for span in spans_in_tokens(rows, groups, 40) if not span.tier]
    assert [(s.group, s.start, s.end, s.removal_reason) for s in told] == [(0, 24, 40, 0), (1, 16, 40, 10)]
    assert removal_text.short(told[1]) == "no state stored" and removal_text.key(told[1]) == "no_state"
    rows[1][-1] = sm.Span(3, "", int(RemovalReason.EVICTED))
    assert spans_in_tokens(rows, groups, 40)[-1].removal_reason == RemovalReason.EVICTED


@pytest.mark.parametrize("alone", [False, True])
def test_gpu_prefix_with_states_ends_at_a_state(alone):
    hashes, pool = make_request("r", TOKENS, HASH_BLOCK_SIZE).block_hashes, FakePool(20, HASH_BLOCK_SIZE)
    groups = [mamba(2 * HASH_BLOCK_SIZE)] if alone else [*cache_groups([(HASH_BLOCK_SIZE, None)]), mamba(8)]
    info = SimpleNamespace(groups=groups, full_groups=[] if alone else [0])
    for i in range(0 if alone else 5):
        pool.cached[bytes(hashes[i]), 0] = i + 1
    state = len(groups) - 1
    assert gpu_prefix(BlockPool(pool), info, hashes) == 0
    pool.cached[bytes(hashes[1]), state], pool.cached[bytes(hashes[3]), state] = 7, 8
    assert gpu_prefix(BlockPool(pool), info, hashes) == 16
    if not alone:
        del pool.cached[bytes(hashes[2]), 0]
        assert gpu_prefix(BlockPool(pool), info, hashes) == 8


def test_gpu_prefix_counts_blocks_larger_than_those_of_hashes():
    """As in models whose layers have heads of unequal sizes: vLLM caches such a block under its last hash alone."""
    hashes, fake = make_request("r", TOKENS, HASH_BLOCK_SIZE).block_hashes, FakePool(20, HASH_BLOCK_SIZE)
    info = SimpleNamespace(groups=cache_groups([(2 * HASH_BLOCK_SIZE, None)]), full_groups=[0])
    for i in (1, 3):
        fake.cached[bytes(hashes[i]), 0] = i
    pool = BlockPool(fake)
    assert gpu_prefix(pool, info, hashes) == pool.cached_about(hashes, [0], 2 * HASH_BLOCK_SIZE) == 16


def test_identity_text_names_all_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(ns.kv_cache_utils, "NONE_HASH", b"seed", raising=False)
    monkeypatch.setattr(ns, "process_start", lambda: 1 << 62)  # these weights are loaded when they are written
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))

    def of(quantization=None, seed: str | None = "0", **options):
        config = engine_config(
            cache={"cache_dtype": "fp8", "prefix_caching_hash_algo": "xxhash"}, model=str(tmp_path), ranks=2,
            quantization=quantization, served_model_name="m",
        )  # fmt: skip
        (monkeypatch.delenv if seed is None else monkeypatch.setenv)(
            "PYTHONHASHSEED", *([] if seed is None else [seed])
        )
        options = KVTierConfig(**options)
        info = SimpleNamespace(
            engine_id="e", namespace_parts=lambda namespace, print: ns.namespace_parts(config, namespace, print)
        )
        name = ns.namespace(config, 16, ns.ModelFingerprint(config, options.model_fingerprint).get(60.0))
        engine = EngineIdentity(options, info, 16, True, None)
        assert engine.describe() == [], "while it starts"
        engine.namespace, engine.ranks, engine.wire_codec = name, dict(enumerate(ranks(2))), {"full": "fp8"}
        told = engine.describe()
        assert len(dict(told)) == len(told)
        return dict(told)

    one, quantized = of(), of(quantization="awq")
    assert {key for key in one if one[key] != quantized[key]} == {"engine options"}
    assert quantized["engine options"] == "quantization=awq"
    assert one["weights"].endswith(", 1 file") and "fixed by PYTHONHASHSEED" in one["hash seed"]
    assert one["codec between engines"] == "full: fp8" and one["tensor parallel size"] == "2"
    assert one["KV cache layout"].startswith("1 layers of full attention") and one["KV cache layout"].count("of 4") == 1
    assert "random" in of(seed=None)["hash seed"] and "seed" not in of(seed="12345")["hash seed"].partition(",")[0]
    assert "12345" not in of(seed="12345")["hash seed"], "a seed may be a secret"
    assert of(model_fingerprint="mine")["model fingerprint"].startswith("mine")
    (tmp_path / "model.safetensors").write_bytes(b"1" * 10_000)
    assert {key for key in one if one[key] != of()[key]} == {"weights"}

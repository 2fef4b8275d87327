"""vLLM's own scheduler, with and without asynchronous scheduling: what was computed on a bad load is taken back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support import Uncontained
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

BLOCK, PROMPT = 16, 70  # tokens; four whole blocks and a rest
DRAFTS = 2

pytestmark = pytest.mark.skipif(not granted(Feature.SYNC_LOADS), reason="this vLLM's forward waits for no load")


class Connector(KVConnectorBase_V1):
    """Has the first four blocks of any prompt once; the second is bad."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler = None
        self.matched, self.stands_alone, self.pinned = [], None, None
        self.pool = None

    def get_num_new_matched_tokens(self, request, computed):
        self.matched.append((request.request_id, computed))
        if request.request_id != "r" or ("r", computed) in self.matched[:-1] or self.pinned is not None:
            return 0, False
        self.stands_alone = rollback.alone(self.scheduler)
        return 64 - computed, False

    # From here on as ``scheduler.integrity.sync_load`` does it.

    def verify(self, output):
        bad, output.invalid_block_ids = output.invalid_block_ids, set()
        if bad:
            request = self.scheduler.requests["r"]
            self.pool.free(self.pinned)
            self.pinned = []
            self.pool.evict(map(bytes, request.block_hashes[1:]))
            rollback.preempt_and_recompute(self.scheduler, request)

    def update_state_after_alloc(self, request, blocks, external):
        if external:
            self.pool = BlockPool(self.scheduler.kv_cache_manager.block_pool)
            self.pinned = self.pool.pin(blocks.get_block_ids()[0][:4])

    def build_connector_meta(self, output):
        if self.pinned:
            rollback.drop_output(self.scheduler.requests["r"])
        return KVConnectorMetadata()

    def start_load_kv(self, context, **options):
        pass

    def wait_for_layer_load(self, layer):
        pass

    def save_kv_layer(self, *args, **options):
        pass

    def wait_for_save(self):
        pass


def config(root, asynchronous, policy, drafts):
    model = ModelConfig(
        model=str(root / "models" / "recall-6m"), skip_tokenizer_init=True, dtype="float32", max_model_len=1024
    )
    speculative = None
    if drafts:
        method = "ngram_gpu" if asynchronous else "ngram"
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=DRAFTS, prompt_lookup_max=3)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="Connector", kv_connector_module_path=__name__, kv_role="kv_both",
            kv_load_failure_policy=policy,
        ),
        speculative_config=speculative,
    )  # fmt: skip


@pytest.fixture
def engine(root):
    def make(asynchronous, policy="recompute", drafts=False):
        vllm_config = config(root, asynchronous, policy, drafts)
        vllm_config.cache_config.num_gpu_blocks = 40
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(40, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        scheduler.connector.scheduler = scheduler
        rollback.before_output(scheduler, Uncontained(), scheduler.connector.verify)
        return scheduler

    init_none_hash(sha256)
    return make


def request(name, max_tokens=4, first=100, media=None):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    params.update_from_generation_config({}, 1)
    return Request(
        request_id=name, prompt_token_ids=list(range(first, first + PROMPT)), sampling_params=params,
        pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256), mm_features=media,
    )  # fmt: skip


def run(step, token, bad=()):
    """What the workers say of a step: each request that ends its prompt or decodes gets ``token``."""
    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[token] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=KVConnectorOutput(invalid_block_ids=set(bad)),
    )


def tokens(outputs):
    return [token for each in outputs.values() for output in each.outputs for token in output.new_token_ids]


@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollback_restarts_request_after_last_good_block(engine, asynchronous, drafts, max_tokens):
    scheduler = engine(asynchronous, drafts=drafts)
    scheduler.add_request(request("r", max_tokens))
    first = scheduler.schedule()
    assert first.has_sync_kv_loads and first.num_scheduled_tokens == {"r": PROMPT - 64}
    assert scheduler.connector.stands_alone
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("r")
    ahead = scheduler.schedule() if asynchronous else None
    assert tokens(scheduler.update_from_output(first, run(first, 666, blocks[1:3]))) == []
    if drafts and not asynchronous:
        scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[777] * DRAFTS]))
    made, steps = [], [ahead] if ahead is not None else []
    again = scheduler.schedule()
    assert again.num_scheduled_tokens["r"] == PROMPT - BLOCK, "the first block was right"
    assert again.preempted_req_ids == {"r"} and not again.scheduled_spec_decode_tokens
    if not scheduler.use_v2_model_runner:
        assert "r" in again.scheduled_cached_reqs.all_token_ids, "the model runner takes it for one that comes back"
    steps.append(again)
    for token in range(10, 20):
        if not asynchronous and not steps:
            steps.append(scheduler.schedule())
        if asynchronous and len(steps) < 2:
            steps.append(scheduler.schedule())
        step = steps.pop(0)
        made += tokens(scheduler.update_from_output(step, run(step, 666 if step is ahead else token)))
        if "r" not in scheduler.requests:
            break
    start = 11 if asynchronous else 10
    assert made == list(range(start, start + max_tokens))
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39


@pytest.mark.parametrize("length", [40, 44, 45, 46])
@pytest.mark.parametrize("v2", [False, True])
def test_rollback_is_possible_where_workers_have_the_media_that_they_compute_again(engine, v2, length):
    """An image from token 20 on; 64 tokens are loaded. V1 workers that lack its pixels end."""
    scheduler = engine(False)
    scheduler.use_v2_model_runner = v2
    scheduler.encoder_cache_manager, scheduler.max_num_encoder_input_tokens = EncoderCacheManager(100), 100
    place = PlaceholderRange(offset=20, length=length)
    media = [MultiModalFeatureSpec(MultiModalKwargsItem({}), "image", "one", place)]
    asked = request("r", media=media)
    scheduler.add_request(asked)
    possible = rollback.possible(scheduler, scheduler.connector, asked, 64)
    first = scheduler.schedule()
    [known] = first.scheduled_new_reqs[0].mm_features
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("r")
    scheduler.update_from_output(first, run(first, 666, blocks[1:3]))
    again = scheduler.schedule()
    assert again.scheduled_encoder_inputs == ({} if length > 44 else {"r": [0]}), "the first step has computed it"
    for new in again.scheduled_new_reqs:
        [known] = new.mm_features
    assert possible == (known.data is not None) == (v2 or length > 44)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollback_removes_bad_blocks_from_prefix_cache(engine, asynchronous):
    scheduler = engine(asynchronous)
    scheduler.add_request(request("r"))
    first = scheduler.schedule()
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("r")
    if asynchronous:
        scheduler.schedule()
    scheduler.update_from_output(first, run(first, 666, blocks[1:2]))
    pool = BlockPool(scheduler.kv_cache_manager.block_pool)
    hashes = [bytes(h) for h in request("other").block_hashes]
    assert [pool.cached_block(h, 0) for h in hashes] == [blocks[0], 0, 0, 0]


def play(scheduler, steps, start, name, ahead=True):
    """Runs until this request has ended; the tokens that each got, their values counting up from ``start``."""
    made = {}
    for token in range(start, start + 40):
        while len(steps) < 1 + ahead:
            steps.append(scheduler.schedule())
        step = steps.pop(0)
        for each in scheduler.update_from_output(step, run(step, token)).values():
            for output in each.outputs:
                made.setdefault(output.request_id, []).extend(output.new_token_ids)
        if name not in scheduler.requests:
            return made
    raise AssertionError(f"{name} has not ended: {made}")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rollback_does_not_affect_other_requests(engine, asynchronous):
    scheduler = engine(asynchronous)
    other = request("s", 12, first=500)
    scheduler.add_request(other)
    step = scheduler.schedule()
    scheduler.update_from_output(step, run(step, 1))
    scheduler.add_request(request("r"))
    first = scheduler.schedule()
    assert first.has_sync_kv_loads and first.num_scheduled_tokens == {"s": 1, "r": PROMPT - 64}
    assert not scheduler.connector.stands_alone
    steps = [scheduler.schedule()] if asynchronous else []
    told = scheduler.update_from_output(first, run(first, 2, scheduler.connector.pinned[1:3]))
    assert tokens(told) == [2], "of the other one only"
    again = scheduler.schedule()
    assert again.num_scheduled_tokens == {"s": 1, "r": PROMPT - BLOCK} and again.preempted_req_ids == {"r"}
    # What was under way when the verdict came is dropped for this request, not for the other.
    made = play(scheduler, [*steps, again], 10, "r", asynchronous)
    assert made["s"][:4] == [10, 11, 12, 13] and made["r"] == ([11, 12, 13, 14] if asynchronous else [10, 11, 12, 13])
    play(scheduler, [], 50, "s", asynchronous)
    assert list(other.output_token_ids)[:5] == [1, 2, 10, 11, 12] and len(other.output_token_ids) == 12
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39


def test_rollback_of_preempted_request_delivers_no_bad_token(engine):
    """The others were given room: what was computed on bad blocks is not delivered, and other requests are not
    affected."""
    scheduler = engine(True)
    other = request("s", 24, first=500)
    scheduler.add_request(other)
    step = scheduler.schedule()
    scheduler.update_from_output(step, run(step, 1))
    pool = scheduler.kv_cache_manager.block_pool
    while (PROMPT + len(other.output_token_ids)) % BLOCK:  # until it needs a block in the step after the next
        step = scheduler.schedule()
        scheduler.update_from_output(step, run(step, 1))
    scheduler.add_request(request("r"))
    first = scheduler.schedule()
    assert set(first.num_scheduled_tokens) == {"s", "r"}
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    ahead = scheduler.schedule()
    assert ahead.num_scheduled_tokens == {"s": 1} and ahead.preempted_req_ids == {"r"}
    bad = scheduler.connector.pinned[1:3]
    assert not set(bad) & set(scheduler.kv_cache_manager.get_block_ids("s")[0])
    assert tokens(scheduler.update_from_output(first, run(first, 666, bad))) == [666], "the other one's"
    assert 666 not in scheduler.requests["r"].output_token_ids
    pool.free_blocks(taken)
    made = play(scheduler, [ahead], 10, "r")
    assert made["r"] == [made["r"][0] + i for i in range(4)]
    play(scheduler, [], 50, "s")
    assert pool.get_num_free_blocks() == 39


def test_rollback_alone_is_true_for_single_request(engine):
    scheduler = engine(False)
    connector = scheduler.connector
    assert rollback.serves(scheduler, connector) and rollback.alone(scheduler)
    scheduler.add_request(request("r"))
    assert rollback.alone(scheduler), "the one that is being matched"
    scheduler.add_request(request("s"))
    assert not rollback.alone(scheduler)
    assert not rollback.serves(None, connector) and not rollback.serves(scheduler, copy.copy(connector))
    assert not rollback.alone(SimpleNamespace(get_request_counts=lambda: (1, 0)))


def test_request_that_comes_while_others_are_looked_at_does_no_harm():
    """They are looked at on the reactor's thread, too, and vLLM adds requests without the scheduler's lock."""
    requests = {}

    class Running:
        num_computed_tokens = 1

        @property
        def status(self):
            requests[len(requests)] = self
            return RequestStatus.RUNNING

    requests[0] = Running()
    assert not rollback.others_wait(SimpleNamespace(requests=requests), None) and len(requests) == 2

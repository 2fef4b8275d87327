"""What all other tests of this level rest on, and so the first of them: a plain engine is right, and the helpers read
it rightly."""

from collections.abc import Iterator

import pytest
from engine_fixtures import ENGINE_FLAGS, start_missing

from vllm_kvtier.devtools.clients import chat, complete, prompt_tokens
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, group_members

SYSTEM = {"role": "system", "content": "You keep notes and answer from them."}
FACTS = {"role": "user", "content": "The code for amber brook is 40512. The code for silver harbor is 77120."}
NOTED = {"role": "assistant", "content": "Noted 2 codes."}
QUESTION = {"role": "user", "content": "What is the code for silver harbor?"}

# With an empty cache vLLM asks a subprocess, which takes as long as ten starts of these engines.
INSPECTS = """
import os, subprocess, sys

os.environ["VLLM_CACHE_ROOT"], subprocess.run = sys.argv[1], None
from vllm.model_executor.models.registry import ModelRegistry

print(ModelRegistry.models["Gemma3ForCausalLM"].inspect_model_cls().is_text_generation_model, os.listdir(sys.argv[1]))
"""


@pytest.fixture(scope="session", autouse=True)  # as S's, or it would be begun after that
def misspelt(model_path, log_dir, plain) -> Iterator[Engine]:
    """An engine with an option that does not exist. It is started beside S, on the other core; no test waits for it."""
    engine = Engine(model_path, name="misspelt", kv=kvtier({"bidirectionl": True}), log_dir=log_dir)
    engine.start()
    start_missing([plain])
    yield engine
    engine.kill()


def test_plain_engine_recalls_code_with_demo_model(demo_model, make_engine):
    single = make_engine(model=demo_model, **ENGINE_FLAGS).start().wait_ready()
    messages = [SYSTEM, FACTS, NOTED, QUESTION]
    answer = chat(single.base_url, messages)
    assert "77120" in answer.text and answer.finish_reason == "stop"
    streamed = chat(single.base_url, messages, stream=True)
    assert streamed.text == answer.text
    assert 0 < streamed.first_token_seconds <= streamed.seconds
    assert streamed.usage["prompt_tokens"] == answer.usage["prompt_tokens"]


def test_plain_engine_counters_separate_computed_from_cached_tokens(single):
    prompt = [300 + i % 1500 for i in range(320)]
    before = prompt_tokens(single.base_url)
    first = complete(single.base_url, prompt, max_tokens=4)
    middle = prompt_tokens(single.base_url)
    second = complete(single.base_url, prompt, max_tokens=4)
    after = prompt_tokens(single.base_url)
    assert first.token_ids == second.token_ids and len(first.token_ids) == 4
    assert (middle - before).computed == 320 and (middle - before).cached == 0
    assert (after - middle).total == 320 and (after - middle).cached >= 288
    assert (after - before).pulled == 0


def test_engine_with_misspelt_option_exits_with_suggestion(misspelt):
    with pytest.raises(ServiceFailed, match="did you mean bidirectional"):
        misspelt.wait_ready()
    assert not group_members(misspelt.pid)


def test_forked_engines_inspect_models_without_a_subprocess(run_script, tmp_path):
    script, cache = tmp_path / "inspects.py", tmp_path / "cache"
    script.write_text(INSPECTS)
    assert run_script(str(script), str(cache), env={}).split("\n")[-2] == "True ['modelinfos']"

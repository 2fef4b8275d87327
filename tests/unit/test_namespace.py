"""What two engines must have in common to share KV, as read from vLLM's configuration."""

import itertools
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tier_fakes import NAMESPACE, described
from vllm.config.lora import LoRAConfig

from vllm_kvtier import fingerprint
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.scheduler.slots import plan_slots
from vllm_kvtier.vllm_compat import namespace as ns
from vllm_kvtier.wire import messages as m


def of(lora=None, **cache):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8", prefix_caching_hash_algo="sha256", **cache),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        lora_config=lora,
    )
    return ns.namespace(config, 16, "model")


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setattr(ns.kv_cache_utils, "NONE_HASH", b"seed", raising=False)


def test_engines_of_equal_configuration_share():
    assert of() == of() == of(calculate_kv_scales=False)


def test_scales_made_from_an_engine_s_first_batch_are_its_own():
    """The same bytes stand for other numbers in the next engine, and no checksum would tell."""
    assert of(calculate_kv_scales=True).mismatch(of(calculate_kv_scales=True))


def test_adapters_that_are_applied_otherwise_are_not_shared():
    """The same files make other KV."""
    usual = LoRAConfig(lora_dtype=torch.bfloat16)
    assert of() == of(usual) == of(LoRAConfig(lora_dtype=torch.bfloat16, max_loras=7, max_lora_rank=64))
    some, others = ["q_proj", "v_proj"], [f"layer{i}.q_proj" for i in range(99)]
    found = [usual, LoRAConfig(lora_dtype=torch.float16), LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some)]
    found += [LoRAConfig(lora_dtype=torch.bfloat16, target_modules=others[i:]) for i in range(2)]
    for a, b in itertools.combinations(found, 2):
        assert "LoRA adapters" in of(a).mismatch(of(b))
    assert of(found[2]) == of(LoRAConfig(lora_dtype=torch.bfloat16, target_modules=some[::-1]))
    assert len(m.encode(of(found[3]))) < 512


# -- the weights -------------------------------------------------------------------------------------------------------


def model(folder, load_format: str = "auto", seed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder), revision=None, quantization=None, seed=seed, hf_config=SimpleNamespace(to_dict=dict)
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(10_000))
    monkeypatch.setattr(ns, "process_start", lambda: 1 << 62)  # vLLM loads weights when the test has written them
    return tmp_path / "model"


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "runai_streamer", "sharded_state"])
def test_model_fingerprint_weights_of_files_are_known_by_them(folder, load_format):
    before = ns.model_fingerprint(model(folder, load_format))
    assert before == ns.model_fingerprint(model(folder, load_format))
    (folder / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != before
    assert ns.model_fingerprint(model(folder / "model.safetensors")) == ns.model_fingerprint(model(folder)), "one file"


@pytest.mark.parametrize("load_format, loaded", [("pt", "a.bin"), ("npcache", "a.bin"), ("gguf", "a.gguf")])
def test_model_fingerprint_goes_by_the_files_that_are_loaded(folder, load_format, loaded):
    """Beside safetensors that are not."""
    (folder / loaded).write_bytes(bytes(10_000))
    found = [ns.model_fingerprint(model(folder, form)) for form in (load_format, "auto")]
    (folder / loaded).write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != found[0]
    assert ns.model_fingerprint(model(folder)) == found[1]


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "a plugin's"])
def test_model_fingerprint_weights_from_elsewhere_are_like_no_others(folder, load_format, caplog):
    """Dummy weights counted by their seed, so that KV of a model whose weights were pushed served another's."""
    found = {ns.model_fingerprint(model(folder, load_format)) for _ in range(3)}
    assert len(found) == 3 and "model_fingerprint" in caplog.text and load_format in caplog.text
    assert ns.ModelFingerprint(model(folder, load_format), "mine").get(60.0) == "mine"


def test_model_fingerprint_of_weights_that_cannot_be_read_is_like_no_other(tmp_path, folder, monkeypatch, caplog):
    """By name and revision alone, "main" of a hub was the same for ever."""
    for absent in (tmp_path / "absent", "org/not-on-this-machine"):
        assert ns.model_fingerprint(model(absent)) != ns.model_fingerprint(model(absent))

    def unreadable(files):
        raise OSError("input/output error")

    monkeypatch.setattr(ns, "file_digests", unreadable)
    assert ns.model_fingerprint(model(folder)) != ns.model_fingerprint(model(folder))
    assert "input/output error" in caplog.text


def starts_now(monkeypatch) -> int:
    """This process, between all that was written and all that is to be, by the clock of the file system."""
    time.sleep(0.02)  # it ticks every 10 ms, or more often
    moment = time.time_ns()
    monkeypatch.setattr(ns, "process_start", lambda: moment)
    time.sleep(0.02)
    return moment


def rewrite(top):
    (top / "current" / "model.safetensors").write_bytes(b"2" * 10_000)


def switch_link(top):
    (top / "link").unlink()
    (top / "link").symlink_to("v2")


def switch_link_behind_a_link(top):
    (top / "stage").unlink()
    (top / "stage").symlink_to("v2")


def rename_folder(top):
    (top / "v1").rename(top / "old")
    (top / "v2").rename(top / "v1")


def rename_folder_above(top):
    top.rename(top.parent / "old")
    (top.parent / "spare").rename(top)


@pytest.mark.parametrize("path", ["v1", "current", "stage", "link"])
@pytest.mark.parametrize(
    "change", [None, rewrite, switch_link, switch_link_behind_a_link, rename_folder, rename_folder_above]
)
def test_model_fingerprint_of_files_that_changed_since_the_process_began_is_like_no_other(
    tmp_path, folder, monkeypatch, caplog, path, change
):
    """vLLM loads weights tens of seconds before their files are looked at: it may have loaded others."""
    top = tmp_path / "top"
    for version in ("v1", "v2"):
        shutil.copytree(folder, top / version)
    for link, target in (("stage", "v1"), ("link", top / "stage"), ("current", "link")):
        (top / link).symlink_to(target)
    shutil.copytree(top, tmp_path / "spare", symlinks=True)
    before = ns.model_fingerprint(model(top / path))
    starts_now(monkeypatch)
    if change is not None:
        change(top)
    elsewhere = {switch_link: ("v1", "stage"), switch_link_behind_a_link: ("v1",)}.get(change, ())
    same = ns.model_fingerprint(model(top / path)) == before
    assert same is (change is None or path in elsewhere) and ("had started" in caplog.text) is not same


def test_model_fingerprint_of_a_folder_beside_which_others_are_made_is_its_files(tmp_path, folder, monkeypatch):
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    (tmp_path / "another").mkdir()
    assert ns.model_fingerprint(model(folder)) == before
    (folder / "config.json").write_text("{}")
    assert ns.model_fingerprint(model(folder)) != before


def test_model_fingerprint_of_a_hub_s_name_that_came_to_mean_another_revision_is_like_no_other(
    tmp_path, folder, monkeypatch
):
    """What is in a snapshot is that revision, whenever it was downloaded."""
    hub = tmp_path / "models--org--model"
    for revision in ("1" * 40, "2" * 40):
        shutil.copytree(folder, hub / "snapshots" / revision)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1" * 40)

    def found(model, revision=None, download_dir=None):
        return hub / "snapshots" / (revision or (hub / "refs" / "main").read_text())

    monkeypatch.setattr(fingerprint, "model_folder", found)
    main, fixed = model("org/model"), model("org/model")
    fixed.model_config.revision = "2" * 40
    before = ns.model_fingerprint(main)
    starts_now(monkeypatch)
    shutil.copytree(folder, hub / "snapshots" / ("2" * 40), dirs_exist_ok=True)
    assert ns.model_fingerprint(main) == before
    (hub / "refs" / "main").write_text("2" * 40)
    assert ns.model_fingerprint(main) != ns.model_fingerprint(main)
    assert ns.model_fingerprint(fixed) == before


def test_process_start_of_a_process_is_when_it_was_started(monkeypatch):
    """Not when the machine was, or the process that it was forked from."""
    ask = "from vllm_kvtier import fingerprint; print(fingerprint.process_start())"
    before, mine = starts_now(monkeypatch), fingerprint.process_start()
    started = int(subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True, text=True).stdout)
    assert mine < before - 1_000_000 < started < time.time_ns()


def test_model_fingerprint_is_made_beside_the_engine_s_thread(folder, monkeypatch):
    may_read, ready = threading.Event(), threading.Event()
    digests = ns.file_digests
    monkeypatch.setattr(ns, "file_digests", lambda files: may_read.wait(60) and digests(files))
    made = ns.ModelFingerprint(model(folder), None, ready.set)
    assert made.get(0.0) is None and not ready.is_set()
    may_read.set()
    assert ready.wait(60) and len(made.get(0.0)) == 32


@pytest.mark.parametrize("option", [None, "mine"])
def test_model_fingerprint_what_else_reads_the_files_is_through_before_it_is_known(folder, option):
    """`codec: auto`, which looked for its record on the engine's thread."""
    threads, may_read = [], threading.Event()
    made = ns.ModelFingerprint(
        model(folder), option, before=lambda: may_read.wait(60) and threads.append(threading.current_thread())
    )
    assert made.get(0.0) is None
    may_read.set()
    assert made.get(60.0) and threads and threads != [threading.current_thread()]


def test_model_fingerprint_a_fault_makes_it_like_no_other(folder, monkeypatch, caplog):
    monkeypatch.setattr(ns, "model_fingerprint", lambda config: 1 / 0)
    made = [ns.ModelFingerprint(model(folder), None).get(60.0) for _ in range(2)]
    assert None not in made and made[0] != made[1] and "ZeroDivisionError" in caplog.text


def test_plan_slots_another_release_of_vllm_has_spaces_of_its_own():
    """The next release may compute otherwise, and what is stored outlives engines. Pulls do not go by it."""
    groups = [(16, None)]
    bases = {
        plan_slots(NAMESPACE, {0: described(0, groups, [0])}, "raw", groups, 16, release).base
        for release in ("0.32.0", "0.32.0", "0.33.0")
    }
    assert len(bases) == 2


def test_engine_with_dummy_weights_tells_the_connector_their_name(tmp_path):
    def extra(kv, *args):
        engine = Engine("shapes", kv=kv, args=args, log_dir=tmp_path)
        return engine.kv and engine.kv.get("kv_connector_extra_config")

    dummy = ("--load-format", "dummy")
    assert extra(kvtier({"store": "off"}), *dummy) == {"store": "off", "model_fingerprint": "dummy weights of shapes"}
    assert extra(kvtier({"model_fingerprint": "mine"}), *dummy) == {"model_fingerprint": "mine"}
    assert extra(kvtier()) == {} and extra({"kv_connector": "NixlConnector"}, *dummy) is None
    assert extra(None, *dummy) is None

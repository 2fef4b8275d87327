"""The weights' part of a namespace: which files count, and which weights are like no other."""

import json
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from engine_configs import engine_config, multimodal
from fingerprint_support import model, starts_now, weights_folder

from vllm_kvtier import fingerprint
from vllm_kvtier.fingerprint import model_folder, of_files
from vllm_kvtier.vllm_compat import namespace as ns

# -- the weights -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return weights_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors", "runai_streamer", "sharded_state"])
def test_model_fingerprint_depends_on_weight_files(folder, load_format):
    before = ns.model_fingerprint(model(folder, load_format))
    assert before == ns.model_fingerprint(model(folder, load_format))
    (folder / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != before
    assert ns.model_fingerprint(model(folder / "model.safetensors")) == ns.model_fingerprint(model(folder)), "one file"


def test_model_fingerprint_ignores_what_a_model_adds_to_its_configuration(folder):
    """As MiniMax M2 and Gemma 3 do, in the scheduler's process if there is one rank and no data parallelism."""
    hf, built = {"layers": 2}, {"layers": 2, "max_model_len": 512}
    elsewhere = dict(hf_config_path=str(folder.parent / "other"))
    assert ns.model_fingerprint(model(folder, hf=hf)) != ns.model_fingerprint(model(folder, hf=built)), "without a file"
    (folder / "config.json").write_text('{"layers": 2, "transformers_version": "5.0"}')
    one, several = ns.model_fingerprint(model(folder, hf=built)), ns.model_fingerprint(model(folder, hf=hf))
    others = [ns.model_fingerprint(model(folder, hf=each, **elsewhere)) for each in (hf, {"layers": 3})]
    assert one == several and others[0] != others[1], "vLLM read another file, which is not here"
    quantized = ns.model_fingerprint(model(folder, hf={"quantization_config": {"bits": 4}}))
    (folder / "config.json").write_text('{"layers": 3}')
    assert len({one, quantized, ns.model_fingerprint(model(folder, hf=hf))}) == 3


def test_model_fingerprint_depends_on_what_a_function_overrides(folder):
    """The namespace has its name only, and the store outlives the engine whose script is edited."""
    (folder / "config.json").write_text('{"layers": 2}')
    edited = [model(folder, hf={"layers": 2, "factor": each}, hf_overrides=json.loads) for each in (2.0, 4.0)]
    assert len({ns.model_fingerprint(each) for each in edited}) == 2


def test_model_fingerprint_is_that_of_weights_loaded_to_another_directory(folder, tmp_path, monkeypatch):
    """Its hub's cache has the configuration, that directory the weights."""
    hub = tmp_path / "hub"
    shutil.copytree(folder, hub)
    (hub / "config.json").write_text('{"layers": 2}')
    monkeypatch.setattr(ns, "model_folder", lambda name, revision=None, download=None: folder if download else hub)
    monkeypatch.setattr(ns, "changed_since", lambda *_: False)
    usual = ns.model_fingerprint(model("org/model", hf={"layers": 2}))
    load = {"download_dir": "elsewhere", "load_format": "auto"}
    assert ns.model_fingerprint(engine_config({"layers": 2, "more": 1}, model="org/model", load=load)) == usual
    by_path = model(folder, hf={"layers": 2, "more": 1}, hf_config_path="org/model")
    assert ns.model_fingerprint(by_path) == usual


def test_model_fingerprint_of_mistral_folder_is_that_of_what_vllm_loads(folder):
    """A hub's copy may have the weights in both formats; vLLM downloads, and with "auto" loads, Mistral's alone."""
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    (folder / "params.json").write_text('{"dim": 8}')
    built = {"rope_parameters": {"rope_type": "deepseek_yarn"}}  # in this process with one rank only
    hf = {"rope_parameters": {"rope_type": "yarn"}}
    alone = {ns.model_fingerprint(model(folder, hf=each)) for each in (hf, built)}
    (folder / "model-00001.safetensors").write_bytes(bytes(5000))
    whole = {ns.model_fingerprint(model(folder, form, hf=built)) for form in ("auto", "mistral")}
    assert len(alone) == 1 and alone == whole
    assert ns.model_fingerprint(model(folder, "safetensors", hf=hf)) not in whole, "it loads both"
    assert ns.model_fingerprint(model(folder, hf=hf, config_format="mistral")) in whole
    (folder / "config.json").write_text("{}")
    assert ns.model_fingerprint(model(folder, hf=hf, config_format="hf")) != ns.model_fingerprint(model(folder, hf=hf))
    before = ns.model_fingerprint(model(folder, hf=hf))
    (folder / "params.json").write_text('{"dim": 9}')
    changed = ns.model_fingerprint(model(folder, hf=hf))
    (folder / "consolidated.safetensors").write_bytes(b"1" * 10_000)
    assert len({before, changed, ns.model_fingerprint(model(folder, hf=hf))}) == 3


@pytest.mark.parametrize("load_format, loaded", [("pt", "a.bin"), ("npcache", "a.bin"), ("gguf", "a.gguf")])
def test_model_fingerprint_uses_files_of_load_format(folder, load_format, loaded):
    """Beside safetensors that are not."""
    (folder / loaded).write_bytes(bytes(10_000))
    found = [ns.model_fingerprint(model(folder, form)) for form in (load_format, "auto")]
    (folder / loaded).write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(model(folder, load_format)) != found[0]
    assert ns.model_fingerprint(model(folder)) == found[1]


def test_model_fingerprint_of_flint_depends_on_gguf_beside_safetensors(folder):
    """Its class in vLLM 0.33 reads that, by the name of the model; others read it by load format."""
    found: dict[str, set[str]] = {"flint": set(), "llama": set()}
    for content in (b"", b"1", b"2"):
        if content:
            (folder / "model.gguf").write_bytes(content * 10_000)
        for name, names in found.items():
            names.add(ns.model_fingerprint(model(folder, hf={"model_type": name})))
    assert {name: len(names) for name, names in found.items()} == {"flint": 3, "llama": 1}


def test_model_fingerprint_depends_on_weights_in_folders_of_its_folder(tmp_path, folder, monkeypatch):
    """As of Cosmos 3, whose KV was not shared; also by a hub's name, whose revision may have moved."""
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("1" * 40)
    (snapshot / "transformer").mkdir(parents=True)
    (folder / "model.safetensors").rename(snapshot / "transformer" / "model.safetensors")
    (ref := snapshot.parents[1] / "refs" / "main").parent.mkdir()
    ref.write_text("1" * 40)
    monkeypatch.setattr(ns, "model_folder", lambda *_: snapshot)
    hub = model("org/model")
    before = ns.model_fingerprint(hub)
    assert before == ns.model_fingerprint(model(snapshot))
    (snapshot / "transformer" / "model.safetensors").write_bytes(b"1" * 10_000)
    assert ns.model_fingerprint(hub) == ns.model_fingerprint(hub) != before
    starts_now(monkeypatch)
    ref.write_text("2" * 40)
    assert ns.model_fingerprint(hub) != ns.model_fingerprint(hub)


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "modelexpress", "a plugin's"])
def test_model_fingerprint_of_dummy_weights_is_unique(folder, load_format, caplog):
    """Dummy weights counted by their seed, so that KV of a model whose weights were pushed served another's."""
    found = {ns.model_fingerprint(model(folder, load_format)) for _ in range(3)}
    assert len(found) == 3 and "model_fingerprint" in caplog.text and load_format in caplog.text
    assert ns.ModelFingerprint(model(folder, load_format), "mine").get(60.0) == "mine"


def test_model_fingerprint_of_unreadable_weights_is_unique(tmp_path, folder, monkeypatch, caplog):
    """By name and revision alone, "main" of a hub was the same for ever."""
    for absent in (tmp_path / "absent", "org/not-on-this-machine"):
        assert ns.model_fingerprint(model(absent)) != ns.model_fingerprint(model(absent))

    def unreadable(files):
        raise OSError("input/output error")

    monkeypatch.setattr(ns, "file_digests", unreadable)
    assert ns.model_fingerprint(model(folder)) != ns.model_fingerprint(model(folder))
    assert "input/output error" in caplog.text


def test_model_fingerprint_depends_on_processor_config_of_multimodal_models(folder):
    """The same picture becomes other numbers, under the same block hashes."""
    media = multimodal()
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "tekken.json"):
        text, before = ns.model_fingerprint(model(folder)), ns.model_fingerprint(model(folder, **media))
        (folder / name).write_text('{"max_pixels": 1000}')
        first = ns.model_fingerprint(model(folder, **media))
        (folder / name).write_text('{"max_pixels": 2000}')
        assert len({before, first, ns.model_fingerprint(model(folder, **media))}) == 3, name
        assert ns.model_fingerprint(model(folder)) == text, "a model of text alone does not read it"


def test_model_fingerprint_depends_on_models_that_are_parts_of_it(folder, tmp_path):
    """Ultravox has only an adapter of its own; what its language model is, a name says."""
    text = tmp_path / "text"
    text.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_model_id": str(text)}))

    def fingerprint():
        config = model(folder)
        config.model_config.hf_config.text_model_id = str(text)
        return ns.model_fingerprint(config)

    assert fingerprint() != fingerprint(), "its weights are not there"
    found = set()
    for content in (bytes(1000), b"1" * 1000):
        (text / "model.safetensors").write_bytes(content)
        found.add(fingerprint())
        assert fingerprint() in found
    (text / "config.json").write_text("{}")
    assert len({*found, fingerprint()}) == 3


@pytest.mark.parametrize("name", ["whisper-large-v3", "audio_tokenizer"])
def test_model_fingerprint_depends_on_encoder_in_folder_of_its_folder(folder, name):
    media, found = multimodal(), set()
    (folder / name).mkdir()
    for file, content in (("x", ""), ("model.safetensors", "1"), ("model.safetensors", "2"),
                          ("config.json", "{}"), ("preprocessor_config.json", "{}")):  # fmt: skip
        (folder / name / file).write_text(content * 1000)
        found.add(ns.model_fingerprint(model(folder, **media)))
        assert ns.model_fingerprint(model(folder, **media)) in found
    assert len(found) == 5


def test_model_fingerprint_is_of_the_weights_that_were_chosen(folder):
    """As by vLLM's plugin for GGUF, of a folder with several quantizations, and for a model with weights elsewhere."""
    for name in ("x-Q4.gguf", "x-Q8-00001-of-00002.gguf", "x-Q8-00002-of-00002.gguf"):
        (folder / name).write_text(name * 100)

    def fingerprint(chosen, load_format="gguf"):
        config = model(folder, load_format)
        config.model_config.model_weights = chosen
        return ns.model_fingerprint(config)

    four, eight = str(folder / "x-Q4.gguf"), str(folder / "x-Q8-00001-of-00002.gguf")
    before = [fingerprint(four), fingerprint(eight)]
    assert len({*before, fingerprint("")}) == 3
    (folder / "x-Q8-00002-of-00002.gguf").write_text("another")
    assert fingerprint(four) == before[0] and fingerprint(eight) != before[1]
    (folder / "mmproj-x.gguf").write_text("projector")
    assert fingerprint(four) != before[0]
    assert fingerprint("org/x-GGUF:Q4") != fingerprint("org/x-GGUF:Q4"), "which file that is is not known"
    (other := folder.parent / "other").mkdir()
    (other / "model.safetensors").write_bytes(b"1" * 1000)
    assert fingerprint(str(other), "runai_streamer") != fingerprint("", "runai_streamer")
    assert fingerprint(str(other), "runai_streamer") == fingerprint(str(other), "runai_streamer")
    assert fingerprint(str(folder), "auto") == fingerprint("", "auto")


@pytest.fixture
def adapters(folder):
    """As of Jina's embedding models: vLLM merges one into the weights, as its configuration says."""
    found = folder / "adapters"
    for task in ("retrieval", "matching"):
        (found / task).mkdir(parents=True)
        (found / task / "adapter_config.json").write_text('{"r": 4}')
        (found / task / "adapter_model.safetensors").write_text(task * 100)
    return found


def test_model_fingerprint_depends_on_adapters_in_folders_of_its_folder(folder, adapters):
    """Another one read the KV of the former."""
    found = {ns.model_fingerprint(model(folder))}
    for name, content in (("adapter_config.json", '{"r": 8}'), ("adapter_model.safetensors", "another" * 100)):
        (adapters / "retrieval" / name).write_text(content)
        found.add(ns.model_fingerprint(model(folder)))
        assert ns.model_fingerprint(model(folder)) in found
    for old, new in (("retrieval", "x"), ("matching", "retrieval"), ("x", "matching")):
        (adapters / old).rename(adapters / new)
    assert len({*found, ns.model_fingerprint(model(folder))}) == 4


def test_model_fingerprint_depends_on_adapters_in_the_hubs_cache(folder, adapters, tmp_path, monkeypatch):
    """vLLM loads the model's own weights alone from --download-dir."""
    (hub := tmp_path / "hub").mkdir()
    adapters.rename(hub / "adapters")
    monkeypatch.setattr(ns, "model_folder", lambda name, revision=None, download=None: folder if download else hub)
    monkeypatch.setattr(ns, "changed_since", lambda *_: False)
    config = model("org/model")
    config.load_config.download_dir = "elsewhere"
    before = ns.model_fingerprint(config)
    assert ns.model_fingerprint(config) == before
    (hub / "adapters" / "retrieval" / "adapter_config.json").write_text('{"r": 8}')
    assert ns.model_fingerprint(config) != before


def test_model_fingerprint_depends_on_processors_in_the_hubs_cache(folder, tmp_path, monkeypatch):
    """Beside weights in --download-dir."""
    (hub := tmp_path / "hub").mkdir()
    monkeypatch.setattr(ns, "model_folder", lambda name, revision=None, download=None: folder if download else hub)
    monkeypatch.setattr(ns, "changed_since", lambda *_: False)
    config, found = model("org/model", **multimodal()), set()
    config.load_config.download_dir = "elsewhere"
    for size in (224, 448):
        (hub / "preprocessor_config.json").write_text(f'{{"size": {size}}}')
        found |= {ns.model_fingerprint(config) for _ in range(2)}
    assert len(found) == 2


@pytest.mark.parametrize("change", ["written", "removed"])
def test_model_fingerprint_of_adapter_changed_after_start_is_unique(folder, adapters, monkeypatch, change):
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    assert ns.model_fingerprint(model(folder)) == before
    config = adapters / "retrieval" / "adapter_config.json"
    config.unlink() if change == "removed" else config.write_text('{"r": 4}')
    assert ns.model_fingerprint(model(folder)) != ns.model_fingerprint(model(folder))


@pytest.mark.parametrize("place", ["original", ".cache/huggingface", "adapters/retrieval/more"])
def test_model_fingerprint_ignores_folders_that_vllm_does_not_read(folder, adapters, place):
    before = ns.model_fingerprint(model(folder))
    (folder / place).mkdir(parents=True)
    (folder / place / "params.json").write_text("{}")
    (adapters / "gone.json").symlink_to("nowhere")
    assert ns.model_fingerprint(model(folder)) == before


def test_model_fingerprint_ignores_folders_of_other_formats(folder):
    """vLLM downloads none of them, other tools all: of gpt-oss 65 GB."""
    before = ns.model_fingerprint(model(folder))
    for name in ("metal/model.bin", "onnx/config.json", "openvino/model.bin", "1_Pooling/config.json", "old/a.pt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "loop").symlink_to("loop")
    assert ns.model_fingerprint(model(folder)) == before


def test_model_fingerprint_depends_on_the_adapter_that_is_merged(folder, adapters):
    """The others are there or not by how the model was downloaded."""
    merged = model(folder)
    merged.model_config.hf_config.jina_task = "retrieval"
    before = ns.model_fingerprint(merged)
    (adapters / "matching" / "adapter_config.json").write_text('{"r": 8}')
    assert ns.model_fingerprint(merged) == before
    (adapters / "retrieval" / "adapter_config.json").write_text('{"r": 8}')
    assert ns.model_fingerprint(merged) != before


def test_model_folder_is_found_of_what_vllm_downloads(tmp_path):
    """Not all files of the repository: from 1.22 on the hub library calls that incomplete."""
    files = pytest.importorskip("huggingface_hub._tree_cache", reason="of older releases of the hub library")
    repository = tmp_path / "models--org--model"
    (snapshot := repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    entry = files.TreeCacheEntry(size=2, blob_id="b" * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
    files.write_tree_cache(str(repository), "a" * 40, dict.fromkeys(("config.json", "README.md"), entry))
    assert model_folder("org/model", None, str(tmp_path)) == snapshot


def test_model_fingerprint_depends_on_list_of_loaded_files(folder):
    """It may name others of the same files."""
    names, found = {f"layer.{n}": "model.safetensors" for n in range(10_000)}, set()
    for kind in ("model", "old", "new"):
        index = {"weight_map": {**names, "layer.4567": f"{kind}.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found.add(ns.model_fingerprint(model(folder)))
        assert ns.model_fingerprint(model(folder)) in found
    assert len(found) == 3


@pytest.mark.parametrize("method", ["eagle", "draft_model", "mtp", "ngram", "own layers"])
def test_model_fingerprint_depends_on_drafts_that_keep_kv(folder, tmp_path, method):
    """Their KV is stored with the target's: another draft's would be accepted less often."""
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(bytes(1000))

    def fingerprint():
        config = model(folder)
        of = config.model_config if method == "own layers" else SimpleNamespace(model=str(draft), revision=None)
        config.speculative_config = SimpleNamespace(
            method=method, draft_model_config=of, use_eagle=lambda: method in ("eagle", "mtp", "own layers")
        )
        return ns.model_fingerprint(config)

    before, plain = fingerprint(), ns.model_fingerprint(model(folder))
    assert (before == plain) == (method in ("ngram", "own layers"))
    (draft / "model.safetensors").write_bytes(b"1" * 1000)
    assert (fingerprint() == before) == (method in ("ngram", "own layers"))


def test_model_fingerprint_depends_on_draft_in_the_download_dir(folder, tmp_path, monkeypatch):
    """As it does on the model's own files there; without files, on the revision."""
    draft, described = tmp_path / "draft", tmp_path / "described"
    draft.mkdir()
    described.mkdir()
    (described / "config.json").write_text("{}")  # vLLM has only the weights in --download-dir
    folders = {"elsewhere": str(draft), None: str(described)}

    def snapshot(name, revision, cache_dir, **_):
        if cache_dir not in folders:
            raise FileNotFoundError(name)
        return folders[cache_dir]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    found = set()
    for weights, revision in ((b"1" * 1000, None), (b"2" * 1000, None), (None, "a"), (None, "b")):
        config = model(folder)
        config.load_config.download_dir = "elsewhere"
        of = SimpleNamespace(model="org/draft", revision=revision)
        config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=of, use_eagle=lambda: True)
        if weights:
            (draft / "model.safetensors").write_bytes(weights)
        else:
            folders.clear()
        found.add(ns.model_fingerprint(config))
    assert len(found) == 4


def test_model_fingerprint_depends_on_trusted_remote_code(folder):
    (folder / "modeling.py").write_text("a = 1")
    trusted, before = (ns.model_fingerprint(model(folder, trust_remote_code=trust)) for trust in (True, False))
    (folder / "modeling.py").write_text("a = 2")
    assert ns.model_fingerprint(model(folder, trust_remote_code=True)) != trusted
    assert ns.model_fingerprint(model(folder)) == before, "it is not run"


@pytest.mark.parametrize("name, media", [("config.json", False), ("preprocessor_config.json", True)])
def test_model_fingerprint_depends_on_trusted_code_of_another_repository(folder, tmp_path, monkeypatch, name, media):
    """As transformers writes it for models that were trained from one with code of its own."""
    code = tmp_path / "models--org--other" / "snapshots" / "1"
    maps = {"auto_map": {"AutoModel": "org/other--modeling.Model", "AutoConfig": "configuration.Config"}}
    (folder / "config.json").write_text("{}")
    (folder / name).write_text(json.dumps(maps))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"org/other": str(code)}[name])

    def fingerprint(trust=True):
        return ns.model_fingerprint(model(folder, trust_remote_code=trust, **(multimodal() if media else {})))

    before, found = fingerprint(trust=False), set()
    assert fingerprint() == fingerprint(), "it is not on this machine: vLLM has a class of its own"
    (ref := code.parents[1] / "refs" / "main").parent.mkdir(parents=True)
    ref.write_text("1")
    code.mkdir(parents=True)
    for content in ("a = 1", "a = 2"):
        (code / "modeling.py").write_text(content)
        found.add(fingerprint())
        assert fingerprint() in found
    assert len(found) == 2 and fingerprint(trust=False) == before, "it is not run"
    starts_now(monkeypatch)
    ref.write_text("2")
    assert fingerprint() != fingerprint()


@pytest.mark.parametrize("variable", ["true", "True", "1"])
def test_model_fingerprint_of_modelscope_name_is_unique(folder, monkeypatch, variable):
    """vLLM reads that hub's copy; the other hub's may lie in its cache under the same name."""
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: asked.append(name) or str(folder))
    first, again = (ns.model_fingerprint(model("org/model")) for _ in range(2))
    assert first == again and "org/model" in asked
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", variable)
    asked.clear()
    assert ns.model_fingerprint(model("org/model")) != ns.model_fingerprint(model("org/model")) and not asked
    assert model_folder("org/adapter") is None and of_files("org/model") is None
    assert ns.model_fingerprint(model(folder)) == ns.model_fingerprint(model(folder)), "a path is read as it is"
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "false")
    assert ns.model_fingerprint(model("org/model")) == first


def test_model_fingerprint_depends_on_quantization_file_that_vllm_reads(folder):
    """Not if config.json says it: such a file is in some downloads of the same model only."""
    own = {"quantization_config": {"quant_method": "gptq"}}
    found = {}
    for content in ("", '{"bits": 4}', '{"bits": 8}'):
        if content:
            (folder / "quantize_config.json").write_text(content)
        found[content] = [ns.model_fingerprint(model(folder, hf=hf)) for hf in (None, own)]
    assert len({without for without, _ in found.values()}) == 3
    assert len({said for _, said in found.values()}) == 1


def test_process_start_is_own_start_time(monkeypatch):
    """Not when the machine was, or the process that it was forked from."""
    ask = "from vllm_kvtier import fingerprint; print(fingerprint.process_start())"
    before, mine = starts_now(monkeypatch), fingerprint.process_start()
    started = int(subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True, text=True).stdout)
    assert mine < before - 1_000_000 < started < time.time_ns()


def test_model_fingerprint_is_computed_on_another_thread(folder, monkeypatch):
    may_read, ready = threading.Event(), threading.Event()
    digests = ns.file_digests
    monkeypatch.setattr(ns, "file_digests", lambda files: may_read.wait(60) and digests(files))
    made = ns.ModelFingerprint(model(folder), None, ready.set)
    assert made.get(0.0) is None and not ready.is_set()
    may_read.set()
    assert ready.wait(60) and len(made.get(0.0)) == 32


@pytest.mark.parametrize("option", [None, "mine"])
def test_model_fingerprint_waits_for_other_readers(folder, option):
    """`codec: auto`, which looked for its record on the engine's thread."""
    threads, may_read = [], threading.Event()
    made = ns.ModelFingerprint(
        model(folder), option, before=lambda: may_read.wait(60) and threads.append(threading.current_thread())
    )
    assert made.get(0.0) is None
    may_read.set()
    assert made.get(60.0) and threads and threads != [threading.current_thread()]


def test_model_fingerprint_after_error_is_unique(folder, monkeypatch, caplog):
    monkeypatch.setattr(ns, "model_fingerprint", lambda config: 1 / 0)
    made = [ns.ModelFingerprint(model(folder), None).get(60.0) for _ in range(2)]
    assert None not in made and made[0] != made[1] and "ZeroDivisionError" in caplog.text

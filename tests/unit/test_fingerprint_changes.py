"""The weights' part of a namespace, of files that changed after the engine had started: like no other."""

import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from fingerprint_support import model, starts_now, weights_folder

from vllm_kvtier import fingerprint
from vllm_kvtier.vllm_compat import namespace as ns


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return weights_folder(tmp_path, monkeypatch)


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
def test_model_fingerprint_of_files_changed_after_start_is_unique(tmp_path, folder, monkeypatch, caplog, path, change):
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


@pytest.mark.parametrize("own_clock", [True, False])
def test_model_fingerprint_allows_for_a_file_servers_clock(folder, monkeypatch, own_clock):
    """By a clock that is behind, a change after the start is one before it."""
    if not own_clock:
        monkeypatch.setattr(fingerprint, "OWN_CLOCK", frozenset())
    before = ns.model_fingerprint(model(folder))
    for seconds, same in ((5, own_clock), (15, True)):
        start = os.stat(folder / "model.safetensors").st_ctime_ns + seconds * 10**9
        monkeypatch.setattr(ns, "process_start", lambda start=start: start)
        assert (ns.model_fingerprint(model(folder)) == before) is same


@pytest.mark.parametrize("in_bucket", [True, False])
def test_model_fingerprint_ignores_times_of_folders_in_buckets(folder, monkeypatch, in_bucket):
    """gcsfuse and blobfuse2 give a folder the time of a look at it; other FUSE systems know when one was renamed."""
    monkeypatch.setattr(fingerprint, "is_on", lambda kind, device: in_bucket and kind == "fuse")
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    (folder / "another").touch()
    (folder / "another").unlink()
    assert (ns.model_fingerprint(model(folder)) == before) is in_bucket
    starts_now(monkeypatch)
    folder.rename(folder.parent / "meanwhile").rename(folder)
    assert ns.model_fingerprint(model(folder)) != before


@pytest.mark.parametrize(("apart", "own"), [(0, False), (-40, False), (90, False), (10**7, True)])
def test_folder_in_bucket_has_two_times_of_one_look(folder, monkeypatch, apart, own):
    """gcsfuse asks the clock for each."""
    monkeypatch.setattr(fingerprint, "is_on", lambda kind, device: kind == "fuse")
    state = SimpleNamespace(st_mode=os.stat(folder).st_mode, st_dev=1, st_ctime_ns=10**18 + apart, st_mtime_ns=10**18)
    assert fingerprint.has_own_times(state) is own


def test_model_fingerprint_ignores_new_entries_in_folders_above(tmp_path, folder, monkeypatch):
    """As in a container's home, where vLLM makes folders of its own, beside this package's in ~/.cache."""
    (tmp_path / "home" / "cache").mkdir(parents=True)
    folder = folder.rename(tmp_path / "home" / "cache" / "model")
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    for place in (tmp_path, tmp_path / "home", tmp_path / "home" / "cache"):
        (place / "another").mkdir()
    assert ns.model_fingerprint(model(folder)) == before
    (tmp_path / "home").rename(tmp_path / "away").rename(tmp_path / "home")
    assert ns.model_fingerprint(model(folder)) != before


def test_root_is_never_renamed():
    """overlayfs changes one of its times when something below is first written to."""
    assert not fingerprint._moved(lambda state: True, fingerprint.Path("/"))


def test_model_fingerprint_ignores_changes_beside_the_folder(tmp_path, folder, monkeypatch):
    before = ns.model_fingerprint(model(folder))
    starts_now(monkeypatch)
    (tmp_path / "another").mkdir()
    assert ns.model_fingerprint(model(folder)) == before
    (folder / "config.json").write_text("{}")
    assert ns.model_fingerprint(model(folder)) != before


def test_model_fingerprint_of_hub_name_with_moved_revision_is_unique(tmp_path, folder, monkeypatch):
    """What is in a snapshot is that revision, whenever it was downloaded."""
    hub = tmp_path / "models--org--model"
    for revision in ("1" * 40, "2" * 40):
        shutil.copytree(folder, hub / "snapshots" / revision)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1" * 40)

    def found(model, revision=None, download_dir=None):
        return hub / "snapshots" / (revision or (hub / "refs" / "main").read_text())

    monkeypatch.setattr(ns, "model_folder", found)
    main, fixed = model("org/model"), model("org/model")
    fixed.model_config.revision = "2" * 40
    before = ns.model_fingerprint(main)
    starts_now(monkeypatch)
    shutil.copytree(folder, hub / "snapshots" / ("2" * 40), dirs_exist_ok=True)
    assert ns.model_fingerprint(main) == before
    (hub / "refs" / "main").write_text("2" * 40)
    assert ns.model_fingerprint(main) != ns.model_fingerprint(main)
    assert ns.model_fingerprint(fixed) == before


def test_model_fingerprint_of_hub_name_whose_revision_is_written_anew(tmp_path, folder, monkeypatch):
    """As the hub library before 1.31 does at each download: unique only if another snapshot has other files."""
    hub = tmp_path / "models--org--model"
    (hub / "refs").mkdir(parents=True)
    shutil.copytree(folder, snapshot := hub / "snapshots" / ("2" * 40))
    (hub / "refs" / "main").write_text("2" * 40)
    monkeypatch.setattr(ns, "model_folder", lambda *_: snapshot)
    before = ns.model_fingerprint(model("org/model"))

    def same() -> bool:
        starts_now(monkeypatch)
        (hub / "refs" / "main").write_text("2" * 40)
        return ns.model_fingerprint(model("org/model")) == before

    assert same()
    (hub / "snapshots" / ".DS_Store").write_text("a file")
    assert same()
    (older := hub / "snapshots" / ("1" * 40)).mkdir()
    (older / "README.md").write_text("only that")
    assert same()
    for file in snapshot.iterdir():  # they are links to the same blobs in the hub's cache
        (older / file.name).symlink_to(file)
    assert same()
    (older / "model.safetensors").unlink()
    assert same(), "no weights"
    (older / "model-00001-of-00001.safetensors").write_bytes(b"1" * 10_000)
    assert not same()
    (older / "model-00001-of-00001.safetensors").unlink()
    (older / "model.safetensors").write_bytes(b"1" * 10_000)
    assert not same()
    shutil.rmtree(older)
    shutil.copytree(snapshot, older, copy_function=lambda file, link: os.symlink(file, link))
    (snapshot / "modeling.py").write_text("a = 2")
    (older / "modeling.py").write_text("a = 1")
    assert same(), "it is not run"
    hf = model("org/model", trust_remote_code=True)
    assert ns.model_fingerprint(hf) != ns.model_fingerprint(hf)


def test_model_fingerprint_of_chosen_weights_that_changed_after_start_is_unique(folder, tmp_path, monkeypatch):
    """Also if the configuration is another model's, of the hub: by ``--tokenizer``."""
    (snapshot := tmp_path / "models--org--model" / "snapshots" / "1").mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (ref := snapshot.parents[1] / "refs" / "main").parent.mkdir()
    ref.write_text("1")
    (chosen := folder / "x-Q4.gguf").write_bytes(b"1" * 1000)
    config = model("org/model", "gguf")
    config.model_config.model_weights = str(chosen)
    monkeypatch.setattr(ns, "model_folder", lambda *_: snapshot)
    starts_now(monkeypatch)
    assert ns.model_fingerprint(config) == ns.model_fingerprint(config)
    chosen.write_bytes(b"2" * 1000)
    assert ns.model_fingerprint(config) != ns.model_fingerprint(config)
    starts_now(monkeypatch)
    ref.write_text("2")
    assert ns.model_fingerprint(config) != ns.model_fingerprint(config)
    monkeypatch.setattr(ns, "model_folder", lambda *_: None)
    starts_now(monkeypatch)
    assert ns.model_fingerprint(config) == ns.model_fingerprint(config)


def test_model_fingerprint_of_a_path_through_another_process_is_not_unique(folder, monkeypatch):
    """KServe mounts models so. The link has the time at which it was first looked at."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        through = f"/proc/{process.pid}/root{folder}"
        starts_now(monkeypatch)
        assert ns.model_fingerprint(model(through)) == ns.model_fingerprint(model(through))
    finally:
        process.kill()
        process.wait()


def test_model_fingerprint_of_draft_changed_after_start_is_unique(folder, tmp_path, monkeypatch):
    """Its digest was of what it has become."""
    (draft := tmp_path / "draft").mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(bytes(1000))
    config = model(folder)
    of = SimpleNamespace(model=str(draft), revision=None)
    config.speculative_config = SimpleNamespace(method="eagle", draft_model_config=of, use_eagle=lambda: True)
    before = ns.model_fingerprint(config)
    starts_now(monkeypatch)
    assert ns.model_fingerprint(config) == before
    (draft / "model.safetensors").write_bytes(b"1" * 1000)
    assert ns.model_fingerprint(config) != ns.model_fingerprint(config)

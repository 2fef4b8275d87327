"""The namespace of an engine: everything that its KV depends on and its block hashes leave out."""

import glob
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.v1.core import kv_cache_utils

from vllm_kvtier.file_digests import file_digests
from vllm_kvtier.fingerprint import (
    IGNORED,
    KINDS,
    changed_since,
    configuration,
    model_folder,
    of_files,
    other_files,
    process_start,
    weight_files,
)
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.layout.context_parallel import describe_context
from vllm_kvtier.vllm_compat.options import changed, engine_options, format_options
from vllm_kvtier.vllm_compat.probe.features import granted, value
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire.messages import Namespace

logger = get_logger(__name__)

# Of each fingerprint that ``model_fingerprint`` returned: digests of the configuration and of the weights alone.
_parts: dict[str, tuple[str, str]] = {}


def fix_hash_seed(vllm_config: Any) -> None:
    """Set a fixed prefix-cache seed, so that two engines agree; call before the engine core hashes.

    Before vLLM 0.29 the seed is random per process unless PYTHONHASHSEED is set; later ones have a fixed seed of their
    own, and get this one too, so that engines of all releases agree. With sha256 the seed need not be secret. xxhash is
    not collision resistant, and a random seed protects tenants from each other: the seed stays, and engines refuse each
    other's pulls with a message that names the fix.
    """
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("sha256"):
        os.environ.setdefault("PYTHONHASHSEED", "0")


def hash_algorithm(vllm_config: Any) -> str:
    """vLLM's algorithm; with the Python version where it hashes a pickle, whose bytes depend on it (not in cbor)."""
    name = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return name if name.endswith("cbor") else f"{name}/py{sys.version_info.major}.{sys.version_info.minor}"


def hash_function(vllm_config: Any) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)


def namespace(vllm_config: Any, hash_block_size: int, fingerprint: str) -> Namespace:
    """Call when hashing is set up: vLLM makes NONE_HASH late in the engine core's start."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    cache_dtype = f"{_cache_dtype(vllm_config)}/{vllm_config.model_config.dtype}".replace("torch.", "")
    if value(cache, "CacheConfig.calculate_kv_scales"):
        # An option of older vLLM: scales come from the engine's first batch, so that no other engine has the same.
        cache_dtype += f"/scales of {os.urandom(8).hex()}"
    return Namespace(
        model=fingerprint,
        cache_dtype=cache_dtype,
        hash_algorithm=hash_algorithm(vllm_config),
        hash_seed=hashlib.blake2b(bytes(kv_cache_utils.NONE_HASH), digest_size=8).hexdigest(),
        hash_block_size=hash_block_size,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        context_parallel=describe_context(parallel),
        adapters=adapters(vllm_config),
        options=engine_options(vllm_config),
    )


def _cache_dtype(vllm_config: Any) -> str:
    """MLA's layers choose among some formats when they are built, those of checkpoints with a scheme for KV
    (llm-compressor) fp8 in place of "auto". They write it into the configuration: into this process's only if they are
    built here (see ``_configuration``). So these have one name; engines compare dtypes and sizes of pages, too."""
    name = str(vllm_config.cache_config.cache_dtype)
    chosen = name in ("auto", "fp8", "fp8_e4m3") or name.endswith("_ds_mla")
    by_layers = vllm_config.model_config.use_mla or getattr(vllm_config.quant_config, "kv_cache_scheme", None)
    if chosen and by_layers:
        return "auto or fp8"
    if name.endswith("_per_token_head"):
        return f"{name}.2"  # the first version's stores may hold scales that vLLM had overwritten
    return "fp8" if name == "fp8_e4m3" else name  # the same: ModelOpt's checkpoints have it with "auto"


def adapters(vllm_config: Any) -> str:
    """The engine's LoRA options that change what adapters compute; "" at the defaults. Without ``Feature.ADAPTERS`` KV
    of adapters is not shared."""
    if not granted(Feature.ADAPTERS) or vllm_config.lora_config is None:
        return ""
    found = dict(changed(vllm_config.lora_config))
    if found.get("lora_dtype") == vllm_config.model_config.dtype:
        del found["lora_dtype"]
    if found.get("target_modules"):
        found["target_modules"] = sorted(found["target_modules"])
    return format_options(found)


def namespace_parts(vllm_config: Any, namespace: Namespace, fingerprint: str | None) -> list[tuple[str, str]]:
    """(part, text) of a namespace that ``namespace`` returned, to compare two engines by eye."""
    model = vllm_config.model_config
    revision = f" at revision {model.revision}" if getattr(model, "revision", None) else ""
    parts = [("model", f"{getattr(model, 'served_model_name', None) or model.model}, from {model.model}{revision}")]
    if fingerprint:
        parts.append(("model fingerprint", f"{fingerprint}, as the option model_fingerprint says"))
    else:
        config, weights = _parts.get(namespace.model, ("", ""))
        parts += [("model configuration", config or "?"), ("weights", weights or "?")]
    parts += [
        ("KV cache dtype", namespace.cache_dtype),
        ("engine options", namespace.options or "the defaults"),
        ("LoRA options", namespace.adapters or "the defaults"),
        ("block size", f"{namespace.hash_block_size} tokens a hash"),
        ("hash algorithm", namespace.hash_algorithm),
        ("hash seed", f"{namespace.hash_seed}, {_describe_seed(namespace.hash_algorithm)}"),
        ("tensor parallel size", str(namespace.tensor_parallel)),
        ("pipeline parallel size", str(namespace.pipeline_parallel)),
        ("context parallelism", namespace.context_parallel or "none"),
    ]
    return [(name, words[:512]) for name, words in parts]


def _describe_seed(algorithm: str) -> str:
    if "PYTHONHASHSEED" in os.environ:
        return "fixed by PYTHONHASHSEED"
    # vLLM 0.29 fixed it for hashes that need no secret.
    fixed = hasattr(kv_cache_utils, "resolve_none_hash_seed") and not algorithm.startswith("xxhash")
    return "vLLM's own, the same in all engines" if fixed else "random: another one after each start"


# Load formats of vLLM's own loaders and its plugins that read weights from files of the model's folder.
FROM_FILES = {
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
}  # fmt: skip
_MISTRAL = "consolidated*.safetensors"
# Formats that load these files although the folder may have other safetensors too.
_KINDS = {
    "auto": (_MISTRAL, *KINDS), "mistral": (_MISTRAL,), "pt": ("*.pt", "*.bin"), "npcache": ("*.bin",),
    "gguf": ("*.gguf",),
}  # fmt: skip
# Files that vLLM's processors of media read. A block hash holds a picture's digest, not how it is processed.
_MEDIA_FILES = ("*processor_config.json", "tekken.json")
# Names of models whose weights vLLM loads as parts of this one (Ultravox), at their hub's "main".
_OTHER_MODELS = ("text_model_id", "audio_model_id")
# A class in an ``auto_map`` that is code of another repository, or of a folder.
_CODE = re.compile(r'"([\w.~/-]+)--\w+\.\w+"')


class ModelFingerprint:
    """The model's name among engines: the option's value, or a digest that a thread of its own computes."""

    def __init__(
        self,
        vllm_config: Any,
        option: str | None,
        on_ready: Callable[[], object] = lambda: None,
        before: Callable[[], object] = lambda: None,
    ):
        """That thread calls ``before`` (other work that reads the model's files), and ``on_ready`` when the name is
        known."""
        self._config, self._name, self._on_ready, self._before = vllm_config, option, on_ready, before
        self._made = threading.Event()
        threading.Thread(target=self._make, name="kvtier-fingerprint", daemon=True).start()

    def _make(self) -> None:
        began = time.monotonic()
        try:
            self._before()
            if not self._name:
                self._name = model_fingerprint(self._config)
                logger.info("kvtier: model fingerprint: computed from the files in %.1f s", time.monotonic() - began)
        except Exception:
            logger.exception("kvtier: model fingerprint: failed; this engine shares KV with no other engine")
            self._name = _own_name()
        self._made.set()
        self._on_ready()

    def get(self, seconds: float) -> str | None:
        """The name; None if it is not known within ``seconds``."""
        return self._name if self._made.wait(seconds) else None


def _own_name() -> str:
    return os.urandom(16).hex()


def _draft_model(vllm_config: Any) -> Any:
    """The ModelConfig of a draft model with files of its own, whose layers are in the KV cache too; else None."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None or not (speculative.use_eagle() or speculative.method == "draft_model"):
        return None
    draft = speculative.draft_model_config
    return draft if (draft.model, draft.revision) != (model.model, model.revision) else None


def _configuration(vllm_config: Any, folder: Path | None) -> dict[str, Any]:
    """As its files have it: vLLM's models change ``hf_config`` where they are built, which is in this process with one
    rank and no data parallelism (executor "uni"), and else in others. As it is now, if vLLM may have read others, or if
    a function overrides it, whose name alone is in the namespace."""
    model = vllm_config.model_config
    name = model.hf_config_path or model.model
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in IGNORED}
    if model.hf_config_path or vllm_config.load_config.download_dir:  # only weights are loaded to that directory
        folder = model_folder(name, model.revision)
    form, params = model.config_format, folder is not None and (folder / "params.json").exists()
    if folder is None or form not in ("auto", "hf", "mistral") or callable(model.hf_overrides):
        return config
    mistral = form == "mistral" or (form == "auto" and params and any(folder.glob(_MISTRAL)))
    if form != "hf" and mistral != params:  # vLLM read it elsewhere, or the weights are, which decide the format
        return config
    names = ["params.json", *(["config.json"] * (folder / "config.json").exists())] if mistral else ["config.json"]
    try:
        found = {each: configuration(folder, each) for each in names}
        if changed_since(process_start(), name, model.revision, [folder / each for each in names]):
            return config
    except (OSError, ValueError):
        return config
    # ModelOpt may have this in a file of its own.
    quantized = {key: config[key] for key in ("quantization_config",) if key in config}
    return quantized | (found if mistral else found["config.json"])


def _code_elsewhere(model: Any, texts: list[str]) -> list[tuple[str, str | None, list[Path]]]:
    """(repository or folder, revision, its files) of code that vLLM may run for this model and that is not in its
    folder, as these files of JSON say. What is not on this machine was not run: vLLM has classes for many models."""
    revision = dict(changed(model)).get("code_revision")
    names = {name for text in texts for name in _CODE.findall(text)} if model.trust_remote_code else set()
    folders = [(name, model_folder(name, revision)) for name in sorted(names - {model.model})]
    return [(name, revision, found) for name, where in folders if where and (found := sorted(where.glob("*.py")))]


def _chosen_weights(path: Path, kinds: Sequence[str]) -> list[Path]:
    """Of a model whose weights are not in its own folder, or are some of the files there (vLLM's plugin for GGUF: a
    folder has several quantizations). Empty for a URL, or an item of a repository."""
    if path.is_dir():
        return weight_files(path, kinds)
    if not path.is_file():
        return []
    shards = re.sub(r"-\d{5}-of-(?=\d{5})", "-*-of-", glob.escape(path.name))
    return sorted({*path.parent.glob(shards), *path.parent.glob("*mmproj*.gguf")})


class _Part(NamedTuple):
    """A model, or one whose weights are parts of another's."""

    name: str
    revision: str | None
    folder: Path | None  # or its file
    weights: list[Path]


class _ModelFiles:
    """All files that a model's KV depends on."""

    def __init__(self, vllm_config: Any):
        self._config = vllm_config
        self._model, self._load = model, load = vllm_config.model_config, vllm_config.load_config
        path = Path(model.model).expanduser()
        self._folder = path if path.is_file() else model_folder(model.model, model.revision, load.download_dir)
        # The rest of a model of the hub, if vLLM has only its weights in another directory.
        hub = model_folder(model.model, model.revision) if load.download_dir else None
        self._rest = None if hub == self._folder else hub
        fields = _configuration(vllm_config, self._folder)
        self._text = json.dumps(fields, sort_keys=True, default=str)
        flint = fields.get("model_type") == "flint"  # its class reads such a file whatever else is there
        self._kinds = (*(["*.gguf"] * flint), *_KINDS.get(load.load_format, KINDS))
        kinds = [*(_MEDIA_FILES if model.multimodal_config is not None else ()), *(["*.py"] * model.trust_remote_code)]
        if "quantization_config" not in fields:  # vLLM may read it from a file of its own
            kinds.append("*quant*config.json")
        # What describes the model beside its configuration.
        folders = [folder for folder in (self._folder, self._rest) if folder]
        self._described = [file for folder in folders for kind in kinds for file in sorted(folder.glob(kind))]
        texts = [each.read_text("utf-8", "replace") for each in self._described if each.suffix == ".json"]
        self._code = _code_elsewhere(model, [self._text, *texts])

    def configuration(self) -> "hashlib._Hash":
        """Digest of all that is no weight."""
        digest = hashlib.blake2b(self._text.encode(), digest_size=16)
        for file in [*self._described, *(file for *_, files in self._code for file in files)]:
            digest.update(f"|{file.name}|".encode() + hashlib.blake2b(file.read_bytes()).digest())
        return digest

    def weights(self) -> tuple[bytes, str]:
        """Their digest, empty if they are not known to be those that vLLM loaded; and what to call them. Raises
        OSError."""
        if self._load.load_format not in FROM_FILES:
            return b"", f"of load format {self._load.load_format}"
        parts = self._parts()
        if not all(part.weights for part in parts):
            return b"", "not in local files"
        more = self._beside(parts)
        files = [file for part in parts for file in part.weights] + [file for beside in more for file in beside]
        folders = [folder for folder in (*(part.folder for part in parts), self._rest) if folder]
        digest = hashlib.blake2b(digest_size=8)
        for file, found in zip(files, file_digests(files), strict=True):
            where = next((each for each in folders if each in file.parents), file.parent)
            digest.update(f"{file.relative_to(where)}|{found}|".encode())
        # vLLM loaded them after this process began. Checked last: a later change was not read here either.
        if self._may_have_changed(parts, more):
            return b"", "in files, or on a path, that changed after this process had started"
        return digest.digest(), f"{digest.hexdigest()}, {len(files)} file{'s' * (len(files) != 1)}"

    def draft(self) -> str:
        """Names a draft model, whose KV is stored and moved with the target's; "" if there is none."""
        draft = _draft_model(self._config)
        if draft is None:
            return ""
        return of_files(draft.model, draft.revision, self._load.download_dir) or f"{draft.model} {draft.revision}"

    def _parts(self) -> list[_Part]:
        """The model itself, then others."""
        model, load = self._model, self._load
        kinds = self._kinds
        chosen, folder = self._chosen(), self._folder
        own = weight_files(folder, kinds) if folder else []
        parts = [_Part(model.model, model.revision, folder, _chosen_weights(chosen, kinds) if chosen else own)]
        for other in [getattr(model.hf_config, field, None) for field in _OTHER_MODELS]:
            if other:
                found = model_folder(other, None, load.download_dir)
                parts.append(_Part(other, None, found, weight_files(found, kinds) if found else []))
        return parts

    def _chosen(self) -> Path | None:
        """Where the weights are, if not in the model's folder, or not all that are there."""
        model = self._model
        named = model.model_weights and model.model_weights != model.model
        return Path(model.model_weights).expanduser() if named else None

    def _beside(self, parts: list[_Part]) -> list[list[Path]]:
        """What else the weights of each part depend on."""
        task = str(getattr(self._model.hf_config, "jina_task", ""))
        more = [other_files(part.folder, part.weights, task) if part.folder else [] for part in parts]
        if self._rest:
            more[0] += other_files(self._rest, (), task)
        for beside, part in list(zip(more, parts, strict=True))[1:]:
            kinds = "config.json", *_MEDIA_FILES
            beside += [file for kind in kinds if part.folder for file in sorted(part.folder.glob(kind))]
        return more

    def _may_have_changed(self, parts: list[_Part], more: list[list[Path]]) -> bool:
        """Whether vLLM may have read other files than these, or others of the rest."""
        model, chosen, folder = self._model, self._chosen(), self._folder
        read = [(part.name, part.revision, [*part.weights, *beside]) for part, beside in zip(parts, more, strict=True)]
        if chosen:
            read[0] = str(chosen), None, parts[0].weights
        described = list(self._described)
        if chosen and folder and (folder / "config.json").exists():
            described.append(folder / "config.json")
        read += [(model.model, model.revision, described)] if described else []
        draft = _draft_model(self._config)
        if draft and (found := model_folder(draft.model, draft.revision, self._load.download_dir)):
            read += [(draft.model, draft.revision, files)] if (files := weight_files(found)) else []
        return any(changed_since(process_start(), *each) for each in read + self._code)


def model_fingerprint(vllm_config: Any) -> str:
    """Digest of the model's files: configuration and weights, also of models that are parts of it, the processors'
    configuration if it takes media, its own code if it has any, and the files of a draft model that keeps KV. Random if
    the weights are not known to be those of files on this machine: KV of such a model is not shared unless the option
    model_fingerprint names it."""
    files = _ModelFiles(vllm_config)
    digest = files.configuration()
    configured = digest.hexdigest()[:16]
    try:
        weights, words = files.weights()
    except OSError as error:
        weights, words = b"", f"that cannot be read ({error})"
    if weights:
        digest.update(weights)
        if draft := files.draft():
            digest.update(f"|draft {draft}".encode())
        name = digest.hexdigest()
    else:
        name = _own_name()
        logger.warning(
            "kvtier: model fingerprint: unavailable (weights %s); KV is shared neither with other engines nor after a "
            "restart. If several engines, or restarts, have the same weights, give them one model_fingerprint",
            words,
        )
    _parts[name] = configured, words
    return name

"""A measurement from end to end: load a model, run it with each codec, make the record."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vllm_kvtier import codecs, fingerprint
from vllm_kvtier.codecs.base import DTYPES, Codec
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality import cache, likelihood, recall, text
from vllm_kvtier.quality.record import CodecQuality, RecallAt, Record, Text

LENGTHS = (500, 1000, 2000, 3000)


@dataclass(frozen=True)
class Options:
    """What to measure and how thoroughly."""

    model: str  # directory or hub name
    codecs: Sequence[str] = ()  # none: all
    text: Sequence[Path] = ()  # none: text.OWN_SOURCE
    windows: int = 32
    window_tokens: int = 1024
    recall: bool = True
    questions: int = 50  # at each length
    lengths: Sequence[int] = LENGTHS
    device: str = "auto"
    dtype: str = "auto"  # of the model's arithmetic


@dataclass
class Measured:
    record: Record
    remarks: list[str] = field(default_factory=list)  # what was not measured, and why


# Called with the name of the current step, its passes so far, and their total.
Progress = Callable[[str, int, int], None]


def measure(options: Options, progress: Progress = lambda what, done, of: None) -> Measured:
    """Raises KVTierError for a model, a text or a codec that cannot be measured."""
    wanted = {name: codecs.get(name) for name in options.codecs or codecs.names()}
    wanted.pop(Codec.RAW, None)
    if not wanted:
        raise KVTierError("no codec to measure: raw changes nothing")
    loaded = load(options)
    model, tokenizer, dtype = loaded
    name, words = text.read(options.text)
    ids = text.token_ids(tokenizer, words)
    windows = text.windows(tokenizer, ids, options.windows, options.window_tokens)
    widths = _widths(loaded, windows[0][:8])
    remarks = _drop_unsupported(wanted, widths)

    step = _counted(progress, "perplexity", len(windows) * (1 + len(wanted)))
    nats, found = likelihood.compare(loaded, windows, wanted, step)
    answers: dict[str, list[RecallAt]] = {name: [] for name in wanted}
    if options.recall:
        remarks += _recall(options, loaded, ids, wanted, progress, answers)

    made = fingerprint.of_files(options.model)
    if made is None:
        raise KVTierError(f"{options.model} has no config.json and weight files here to tell it by")
    record = Record(
        fingerprint=made,
        model=options.model,
        made=time.time(),
        text=Text(name, text.digest(words), len(windows), options.window_tokens),
        dtype=str(dtype).removeprefix("torch."),
        computed_in=f"{str(model.dtype).removeprefix('torch.')} on {model.device.type}",
        nats=nats,
        codecs=[_quality(codec, cache.bits(codec, widths), found[n], answers[n]) for n, codec in wanted.items()],
    )
    return Measured(record, remarks)


def load(options: Options) -> cache.LoadedModel:
    """Raises KVTierError if transformers cannot load the model."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = AutoConfig.from_pretrained(options.model)
        inner = config.get_text_config(decoder=True)
        if getattr(inner, "kv_lora_rank", None):
            raise KVTierError(
                f"{options.model} caches a latent (MLA) in vLLM, but K and V in transformers: its codecs cannot be "
                "measured this way"
            )
        served = getattr(inner, "dtype", None) or getattr(config, "dtype", None)
        # By default vLLM serves float32 models in bfloat16 or float16.
        cached = served if served in DTYPES.values() else torch.bfloat16
        # bfloat16 on a CPU is slower than float32; and the model's own rounding is noise to what is measured.
        arithmetic = {"auto": torch.float32 if device == "cpu" else cached, "float32": torch.float32, **DTYPES}
        if options.dtype not in arithmetic:
            raise KVTierError(f"dtype {options.dtype!r} is none of {', '.join(arithmetic)}")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=arithmetic[options.dtype])
        return cache.LoadedModel(model.to(device).eval(), tokenizer, cached)
    except KVTierError:
        raise
    except Exception as error:  # of many kinds: no such model, no network, no memory, a device that is not there
        raise KVTierError(f"transformers cannot load {options.model} on {device}: {error}") from error


def _widths(loaded: cache.LoadedModel, tokens: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Numbers of K and V a token and head, by layer that caches them."""
    model = loaded.model
    seen = cache.RoundTripCache(model.config, {}, loaded.dtype)
    try:
        with torch.inference_mode():
            model(torch.tensor([list(tokens)], device=model.device), past_key_values=seen, use_cache=True)
    except Exception as error:  # whatever a model's own code raises at a cache that it does not know
        raise KVTierError(f"the model does not run with a plain K/V cache: {type(error).__name__}: {error}") from error
    if not seen.widths:
        raise KVTierError("the model caches no K and V: no codec applies")
    return seen.widths


def _drop_unsupported(wanted: dict[str, Codec], widths: dict[int, tuple[int, int]]) -> list[str]:
    remarks = []
    for name, codec in list(wanted.items()):
        try:
            cache.check(codec, widths)
        except KVTierError as error:
            remarks.append(f"{name} is not measured: {error}")
            del wanted[name]
    if not wanted:
        raise KVTierError("; ".join(remarks))
    return remarks


def _recall(options: Options, loaded: cache.LoadedModel, ids, wanted, progress: Progress, answers) -> list[str]:
    """Fills ``answers``; remarks on what cannot be asked."""
    remarks = []
    config = loaded.model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
    for tokens in options.lengths:
        if tokens + 64 > longest:  # room for the question
            remarks.append(f"recall at {tokens} tokens: the model takes {longest}")
            continue
        conversations = -(-options.questions // (recall.ROUNDS * recall.CODES_PER_ROUND))
        step = _counted(progress, f"recall at {tokens} tokens", conversations * (1 + len(wanted)))
        try:
            share, found = recall.compare(loaded, ids, tokens, options.questions, wanted, step)
        except KVTierError as error:
            return [f"no recall: {error}"]
        if not found:
            remarks.append(f"recall at {tokens} tokens: only {share:.0%} right without a codec; nothing to lose")
        for name, each in found.items():
            answers[name].append(each)
    return remarks


def _quality(codec: Codec, bits: float, found: likelihood.Likelihood, answers: list[RecallAt]) -> CodecQuality:
    change, error = found.perplexity()
    return CodecQuality(
        name=codec.name,
        formats={field: form.name for field, form in codec.formats.items()},
        bits=bits,
        perplexity=change,
        perplexity_error=error,
        divergence=sum(found.divergence) / len(found.divergence),
        agreement=sum(found.agreement) / len(found.agreement),
        recall=answers,
    )


def _counted(progress: Progress, step: str, of: int) -> Callable[[], None]:
    """A function that reports to ``progress`` how often it was called."""
    progress(step, 0, of)
    done = itertools.count(1)
    return lambda: progress(step, next(done), of)

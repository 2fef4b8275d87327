"""Whether two engines can use each other's KV; all that differs, not only the first thing, and what to do about it."""

import itertools
from collections.abc import Mapping

from vllm_kvtier.doctor.endpoint import Identity, field_words
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.wire.geometry import geometry_mismatch

_REMEDIES = {
    "model": "serve the same model, revision and weights on both; where the files are copies that differ in name only, "
    "set the option model_fingerprint to the same word on both",
    "cache_dtype": "start both with the same --kv-cache-dtype and --dtype",
    "hash_algorithm": "start both with the same --prefix-caching-hash-algo; sha256_cbor does not depend on the Python "
    "version, as sha256 does",
    "hash_seed": "start both with the same PYTHONHASHSEED in their environment, for example PYTHONHASHSEED=0",
    "hash_block_tokens": "start both with the same --block-size",
    "codecs": "give both the same codec and wire_codec",
    "options": "start both with the same options of those names, and the same environment",
}
_XXHASH = (
    "xxhash makes a random seed in each process: set the same PYTHONHASHSEED for both, or use "
    "--prefix-caching-hash-algo sha256_cbor, which needs none"
)


def differences(a: Identity, b: Identity) -> list[tuple[str, str, str]]:
    """(name, sentence with {a} and {b} for the engines' names, remedy) of all that forbids sharing."""
    found = []
    for name in dict.fromkeys([*a.fields, *b.fields]):
        mine, theirs = a.fields.get(name, ""), b.fields.get(name, "")
        if mine == theirs:
            continue
        remedy = _REMEDIES.get(name, "start both with the same value")
        if name == "model" and (told := _model(a.words, b.words)):
            found += [(name, words, remedy) for words in told]
            continue
        words = field_words(name).partition(" (")[0]
        if name == "hash_seed" and str(a.fields.get("hash_algorithm", "")).startswith("xxhash"):
            words, remedy = "the random seed of xxhash", _XXHASH
        if name == "hash_seed":
            mine, theirs = (each.words.get("hash seed") or value for each, value in ((a, mine), (b, theirs)))
        found.append((name, f"{words} differs: {_plain(mine)} on {{a}}, {_plain(theirs)} on {{b}}", remedy))
    return found


def _model(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """In which parts two models differ, as their engines tell; [] where they tell nothing that does."""
    parts = ("model configuration", "weights", "model fingerprint")
    differ = [part for part in parts if a.get(part, "") != b.get(part, "")]
    names = list(dict.fromkeys(_plain(each["model"]) for each in (a, b) if each.get("model")))
    name = f" of {' and of '.join(names)}" if names else ""
    return [
        f"the {part}{name} differs: {_plain(a.get(part))} on {{a}}, {_plain(b.get(part))} on {{b}}" for part in differ
    ]


def _plain(value: object) -> str:
    """For a text that is formatted once more."""
    return str(value or "none").replace("{", "{{").replace("}", "}}")


def compatibility(engines: Mapping[str, Identity]) -> list[Check]:
    """A check a pair, by the engines' names."""
    checks = []
    for (a, one), (b, other) in itertools.combinations(engines.items(), 2):
        name, found = f"{a} and {b}", differences(one, other)
        for _, sentence, remedy in found:
            words = sentence.format(a=a, b=b)
            checks.append(fail(name, f"they cannot use each other's KV: {words}", remedy))
        if not found:
            checks.append(_layout(name, a, one, b, other))
    return checks


def _layout(name: str, a: str, one: Identity, b: str, other: Identity) -> Check:
    if not one.ranks or not other.ranks:
        return unknown(name, "one of them says nothing of its cache's layout")
    if len(one.ranks) != len(other.ranks):
        return warn(
            name,
            f"they agree in content but not in tensor parallel size: {len(one.ranks)} ranks on {a}, "
            f"{len(other.ranks)} on {b}; they share nothing in the node store, and NIXL pulls between them are refused",
            "give both the same --tensor-parallel-size (and --pipeline-parallel-size)",
        )
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        reason = geometry_mismatch(mine.geometry, theirs.geometry)
        if reason:
            words = reason.replace(" here", f" on {a}").replace(" there", f" on {b}")
            return fail(
                name,
                f"they cannot read each other's pages: {words}",
                "give both the same block size, attention backend and KV cache layout (VLLM_KV_CACHE_LAYOUT)",
            )
    return ok(name, f"they can use each other's KV{_reach(one, other)}")


def _reach(one: Identity, other: Identity) -> str:
    """How they read each other, where both say what others of their node may map."""
    mine, theirs = ({rank.shared.node if rank.shared else None for rank in each.ranks} for each in (one, other))
    if mine == theirs and len(mine) == 1 and None not in mine:
        return ", and copy from each other's caches directly: one node"
    return "" if None in mine | theirs else ", over NIXL: they are on two nodes, or in two pid namespaces"

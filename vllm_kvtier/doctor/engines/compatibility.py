"""Whether two engines can use each other's KV: all differences, and how to fix them."""

import itertools
from collections.abc import Mapping

from vllm_kvtier.doctor.engines.endpoint import Identity, field_label
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.shapes.read_paths import ReadPath, reach

_FIXES = {
    "model": "serve the same model, revision and weights on both; if the files are copies that differ only in "
    "their names, set the option model_fingerprint to the same value on both",
    "cache_dtype": "start both with the same --kv-cache-dtype and --dtype",
    "hash_algorithm": "start both with the same --prefix-caching-hash-algo; sha256_cbor does not depend on the Python "
    "version, as sha256 does",
    "hash_seed": "start both with the same PYTHONHASHSEED in their environment, for example PYTHONHASHSEED=0",
    "hash_block_size": "start both with the same --block-size",
    "codecs": "give both the same codec and wire_codec",
    "options": "start both with the same options of those names, and the same environment",
}
_XXHASH = (
    "xxhash draws a random seed in each process: set the same PYTHONHASHSEED for both, or use "
    "--prefix-caching-hash-algo sha256_cbor, which needs none"
)


def differences(a: Identity, b: Identity) -> list[tuple[str, str, str]]:
    """(name, message with {a} and {b} for the engines' names, fix) of each difference that forbids sharing."""
    found = []
    for name in dict.fromkeys([*a.fields, *b.fields]):
        mine, theirs = a.fields.get(name, ""), b.fields.get(name, "")
        if mine == theirs:
            continue
        fix = _FIXES.get(name, "start both with the same value")
        if name == "model" and (parts := _model(a.description, b.description)):
            found += [(name, part, fix) for part in parts]
            continue
        label = field_label(name).partition(" (")[0]
        if name == "hash_seed":
            if str(a.fields.get("hash_algorithm", "")).startswith("xxhash"):
                label, fix = "the random seed of xxhash", _XXHASH
            mine, theirs = (each.description.get("hash seed") or value for each, value in ((a, mine), (b, theirs)))
        found.append((name, f"{label} differs: {_plain(mine)} on {{a}}, {_plain(theirs)} on {{b}}", fix))
    return found


def _model(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """A message for each part in which two models differ, from their engines' descriptions; may be []."""
    parts = ("model configuration", "weights", "model fingerprint")
    differ = [part for part in parts if a.get(part, "") != b.get(part, "")]
    names = list(dict.fromkeys(_plain(each["model"]) for each in (a, b) if each.get("model")))
    name = f" of {' and of '.join(names)}" if names else ""
    return [
        f"the {part}{name} differs: {_plain(a.get(part))} on {{a}}, {_plain(b.get(part))} on {{b}}" for part in differ
    ]


def _plain(value: object) -> str:
    """Escaped for ``str.format``."""
    return str(value or "none").replace("{", "{{").replace("}", "}}")


def compatibility(engines: Mapping[str, Identity]) -> list[Check]:
    """A check for each pair of engines, by their names."""
    checks = []
    for (a, one), (b, other) in itertools.combinations(engines.items(), 2):
        name, found = f"{a} and {b}", differences(one, other)
        for _, message, fix in found:
            checks.append(fail(name, f"they cannot use each other's KV: {message.format(a=a, b=b)}", fix))
        if not found:
            checks.append(_layout(name, a, one, b, other))
    return checks


def _layout(name: str, a: str, one: Identity, b: str, other: Identity) -> Check:
    if not one.ranks or not other.ranks:
        return unknown(name, "one of them does not report its cache layout")
    ways = reach(one.ranks, other.ranks), reach(other.ranks, one.ranks)
    # The reason is of the side that names itself "here".
    way, here, there = (ways[0], a, b) if ways[1].paths or not ways[0].paths else (ways[1], b, a)
    reason = way.reason.replace(" here", f" on {here}").replace(" there", f" on {there}")
    if len(one.ranks) != len(other.ranks):
        message = f"they differ in tensor parallel size: {len(one.ranks)} ranks on {a}, {len(other.ranks)} on {b}; "
        message += "they share nothing in the node store, and "
        message += "pulls are re-sliced" if way.paths else f"cannot read each other's pages: {reason}"
        return warn(name, message, "give both the same --tensor-parallel-size (and --pipeline-parallel-size)")
    if not way.paths:
        fix = "give both the same block size, attention backend and KV cache layout (VLLM_KV_CACHE_LAYOUT)"
        return fail(name, f"they cannot read each other's pages: {reason}", fix)
    resliced = "" if ReadPath.DIRECT in way.paths else f"; pulls are re-sliced, since their pages differ ({reason})"
    return ok(name, f"they can use each other's KV{_reach(one, other)}{resliced}")


def _reach(one: Identity, other: Identity) -> str:
    """How they read each other's caches, if both report their node."""
    mine, theirs = ({rank.shared.node if rank.shared else None for rank in each.ranks} for each in (one, other))
    if mine == theirs and len(mine) == 1 and None not in mine:
        return ", and fetch from each other's caches directly (same node)"
    return "" if None in mine | theirs else ", over NIXL (two nodes, or two pid namespaces)"

"""Time to first token of a prompt that another node's engine has computed, by stores that read from each other and by
Mooncake Store.

    python benchmarks/cluster_first_token.py [--out benchmarks/results/cluster_first_token.json]

Two nodes' stores, each in a network namespace, and an engine on each. Each prompt is new: the first node's engine
computes it, and the second node's engine gets it once the first one's store has it, as other nodes find it. Then the
second engine gets it again from its own node's memory, and another new prompt, which it computes. Needs root, for
the namespaces, and for ``mooncake`` its package. Three minutes on two cores.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import clusters  # before what is in tests
import httpx
import mooncake_nodes
import netns
from store_process import Store

from vllm_kvtier.devtools.clients import chat, prompt_tokens
from vllm_kvtier.devtools.engines import MIB, Engine, kvtier
from vllm_kvtier.devtools.stores import counts_when_idle
from vllm_kvtier.wire.auth import ClusterKey

MODEL = Path(__file__).resolve().parent.parent / "models/recall-6m"
WORDS = 370  # of a prompt: some 1,500 tokens of that model
POOL = 256 * MIB
WARM_UP = 3  # rounds before the measured ones, in which connections are made and rates measured


def make_prompt(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(f"x{rng.randrange(1000)}" for _ in range(WORDS))}]


def ask(engine: Engine, prompt: list[dict[str, str]]) -> tuple[float, int, int]:
    """(seconds to the first token, tokens of the prompt, tokens that the connector brought)"""
    before = prompt_tokens(engine.base_url)
    seconds = chat(engine.base_url, prompt, max_tokens=2, stream=True).first_token_seconds
    tokens = prompt_tokens(engine.base_url) - before
    assert seconds is not None
    return seconds, tokens.total, tokens.pulled


def play(kind: str, model: Path, rounds: int, folder: Path) -> dict:
    rng = random.Random(24)
    key = folder / "key"
    ClusterKey.create(str(key))
    with netns.NetnsStar(2) as net:
        master = mooncake_nodes.Master(net.addresses[-1], net.before(2)).start() if kind == "mooncake" else None
        stores, engines = [], []
        try:
            for node in range(2):
                place = folder / str(node)
                place.mkdir()
                stores.append(Store(place, net.before(node), {"UCX_TLS": "tcp"}))
                stores[-1].start(f"--size={POOL}", *clusters.store_options(net, 2, node, key, master, POOL))
                engines.append(
                    Engine(
                        model,
                        name=f"{kind}-{node}",
                        kv=kvtier({"store": stores[-1].path}),
                        max_model_len=2560,
                        env={"VLLM_SERVER_DEV_MODE": "1"},
                        log_dir=folder,
                    ).start()
                )
            for engine in engines:
                engine.wait_ready()
            seconds, tokens, pulled = defaultdict(list), 0, defaultdict(int)
            for i in range(WARM_UP + rounds):
                shared = make_prompt(rng)
                ask(engines[0], shared)
                counts_when_idle(stores[0].path)
                asked = {"from the other node": ask(engines[1], shared)}
                counts_when_idle(stores[1].path)
                httpx.post(f"{engines[1].base_url}/reset_prefix_cache", trust_env=False).raise_for_status()
                asked["from this node's memory"] = ask(engines[1], shared)
                asked["computed"] = ask(engines[1], make_prompt(rng))
                counts_when_idle(stores[1].path)
                for name, (took, total, brought) in asked.items() if i >= WARM_UP else ():
                    seconds[name].append(took)
                    pulled[name] += brought
                    tokens += total
            bytes_read = stores[1].counts().tiers[0].read_bytes
        finally:
            for each in engines + stores:
                each.kill()
            if master is not None:
                master.kill()
    return {
        "prompt tokens": round(tokens / (3 * rounds)),
        "MB of a prompt": round(bytes_read / (WARM_UP + rounds) / 1e6, 2),
        **{
            name: {
                "ms": round(1e3 * statistics.median(took)),
                "from ms": round(1e3 * min(took)),
                "to ms": round(1e3 * max(took)),
                "tokens brought": round(pulled[name] / rounds),
            }
            for name, took in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=8)
    asked = clusters.parse(parser)
    results = {}
    for kind in asked.kinds:
        with tempfile.TemporaryDirectory() as folder:
            results[kind] = play(kind, asked.model, asked.rounds, Path(folder))
            print(kind, json.dumps(results[kind], indent=1), flush=True)
    if asked.out is not None:
        asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Real load on engines with different KV tiers: replays of public traces, and agents, at rising levels of load.

The trace is a sample of Mooncake's conversation trace (data/README.md), or any file in its format: also its
tool-and-agent and synthetic traces. Whole sessions are drawn from it, times compressed to --rates requests a second,
prompts, blocks and answers scaled by --lengths. Agents are --agents sessions at once, whose prompts grow by what tools
return, with one system prompt. All variants have the same requests, memory and disk, and take turns level by level on
one GPU. Reported by level: time to the first token (TTFT), time between tokens (ITL), throughput, hits by tier, and
what LRU caches of the same sizes would find; and by workload: throughput at a fixed p99 of the TTFT.

    # one GPU, about 9 minutes
    python benchmarks/replay --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 --out replay.json
    # the loads alone; the whole trace; what a run wrote
    python benchmarks/replay --model benchmarks/models/qwen3-8b-shapes --plan --trace conversation_trace.jsonl
    python benchmarks/replay --draw replay.json replay.png
    # without a GPU
    python benchmarks/replay --model models/recall-6m --requests 24 --lengths 0.0625 --longest 2048 --rates 2 \\
        --agents 4 --system 256 --task 64 --tool 96 --answer 8 --turns 4 --pause 0.2 --cache-tokens 3072 \\
        --host-gib 0.02 --disk-gib 0.1
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As benchmarks/serve: run by its directory's name, Python would look for modules in it.
sys.path[:] = [str(HERE.parent), str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

if __name__ == "__main__":
    from replay.run import main

    try:
        sys.exit(main(__doc__))
    except KeyboardInterrupt:
        sys.exit(130)

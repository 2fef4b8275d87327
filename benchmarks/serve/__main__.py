"""A load generator for servers that speak OpenAI's format, which also starts and compares engines.

Plays conversations of many turns, each prompt with the whole history, at a concurrency limit or a rate; measures the
time to the first token (TTFT), the mean time between tokens (ITL: latency less TTFT, by the tokens after the first),
throughput, and by the engines' own counters where prompts' tokens came from. Each load is played cold and then warm,
with the same prompts to the token. With --compare, engines of several variants take turns at it.

    # two engines, each turn of a conversation on the other one; our connector off and on
    python benchmarks/serve --model benchmarks/models/qwen3-8b-shapes --dummy --engines 2 --gpus 0 1 --see-all-gpus \\
        --compare off=none on=kvtier --concurrency 32 --turns 20 --out serve.json --plot serve.png
    # by where the KV is, one prompt at a time
    python benchmarks/serve --model benchmarks/models/qwen3-8b-shapes --dummy --engines 2 --gpus 0 1 --see-all-gpus \\
        --probe 2048 8192 32768 --no-load
    # servers that run already; without a GPU
    python benchmarks/serve --base-url http://127.0.0.1:8000 --rate 4 --duration 60
    python benchmarks/serve --model models/recall-6m --engines 1 --conversations 4 --turns 4 --concurrency 2
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Run by its directory's name, as the other benchmarks: then Python looks for modules in it, where names like "engines"
# would be found by each process that imports such a thing. Its parent holds this package and what it shares with
# the others.
sys.path[:] = [str(HERE.parent), str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

if __name__ == "__main__":
    from serve.run import main

    try:
        sys.exit(main(__doc__))
    except KeyboardInterrupt:
        sys.exit(130)

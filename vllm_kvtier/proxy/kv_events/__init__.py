"""Which blocks each engine has in which tier, from vLLM's KV events.

``subscriber`` keeps an ``index`` per engine up to date, ``prompt_tokens`` makes a prompt's token ids, ``load_rates``
measures what loading costs. Runs on the proxy's event loop.
"""

"""Checks that the installed vLLM has what this package needs beyond vLLM's documented interface.

``features`` answers, ``rows`` is the table. On any thread. Imports nothing else of ``vllm_compat`` but ``version``.
"""

"""The connector's worker side: moves KV between this rank's cache and stores or other engines, and verifies it.

One per rank, in the model runner's process: called on the model runner's thread, with a reactor thread for sockets and
transfers. Imports ``jobs``, ``store``'s client and protocol, ``wire``, ``codecs``, ``kernels`` and
``vllm_compat.probe``; never ``scheduler`` or vLLM.
"""

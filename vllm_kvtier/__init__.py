"""vllm-kvtier: a vLLM KV connector that brings the KV of a prompt from wherever it already exists.

Importing this package imports neither vLLM nor torch; the connector itself is ``vllm_kvtier.connector``.
"""

__version__ = "0.1.0"

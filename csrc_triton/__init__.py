"""Triton kernels of vllm-kvtier, installed as ``vllm_kvtier.kernels``, each with a plain reference beside it.

Launched on the thread that calls. Imports nothing of ``vllm_kvtier``.
"""

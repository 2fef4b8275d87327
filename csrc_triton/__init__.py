"""Triton kernels of vllm-kvtier, installed as ``vllm_kvtier.kernels``; a plain reference beside each."""

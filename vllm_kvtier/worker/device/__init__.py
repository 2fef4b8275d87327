"""CUDA driver calls, events of a step, threads of torch.

On the thread that calls. Imports no other package of ``worker``.
"""

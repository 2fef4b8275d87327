"""Copies blocks from the GPU caches of other engines of this node: ``base`` is the contract of the copiers.

Begun on the model runner's thread, polled on the worker's reactor. Imports no queue and no connection of a store.
"""

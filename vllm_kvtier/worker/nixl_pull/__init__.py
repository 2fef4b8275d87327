"""Pulls by NIXL from prefill and decode engines, and this rank's cache as its peers read it.

On the worker's reactor; NIXL is called by one thread at a time, under the worker's lock. Does not import
``worker.store``.
"""

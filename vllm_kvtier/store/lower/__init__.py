"""Tiers below the node store's memory: disk, other nodes' stores, an object store.

The server decides what goes down and comes up (``demotion``, ``promotion``); each tier has a process of its own that
moves the bytes between the pool and wherever they are kept (``runner``), so that a device that hangs, or a library
that crashes, costs that tier and nothing else.
"""

"""Secondary tiers behind the store's memory: disk, other nodes' stores, an object store.

The server decides what is demoted and promoted (``demotion``, ``promotion``), on its reactor thread. Each tier has a
process of its own that moves the bytes (``process``), so that a device that hangs, or a library that crashes, costs
that tier and nothing else. Imports neither ``server`` nor ``client``; no tier imports another one.
"""

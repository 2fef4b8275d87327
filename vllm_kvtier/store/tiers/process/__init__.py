"""A tier's own process: its parent's end (``tier_process``), its main function, and the protocol between them.

``tier_process`` and ``child`` run on the server's reactor thread and never block; ``main`` is the other process.
Imports no tier: ``main`` loads the one that it runs.
"""

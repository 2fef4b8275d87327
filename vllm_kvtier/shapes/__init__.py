"""Engines of unequal shape: which ranks hold which heads and layers, and how other engines can read their blocks.

From the descriptions that engines exchange at the handshake. No torch, no memory access: the scheduler side decides by
it, and the workers prepare their reads by it.
"""

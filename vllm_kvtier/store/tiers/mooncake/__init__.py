"""Mooncake Store as a secondary tier: memory that the nodes of a cluster share, behind one master.

``segment`` gives memory to the cluster and writes; ``reader`` looks up and reads, and is replaced when a read fails;
``tier`` decides, in the store's server. ``connection`` is the part that both processes share.
Imports no other tier.
"""

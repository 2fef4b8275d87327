"""This rank's connection to the node store: its memory, the copies to and from it, and their queues.

Copies are launched on the model runner's thread or on the worker's reactor, under one lock. ``copy_queues`` is pure
bookkeeping: no clock, no thread, no device. Of ``worker``'s packages it imports ``copy`` only.
"""

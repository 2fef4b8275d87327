"""Checksums of KV blocks, and synchronous loads that are verified with their step's output.

On the model runner's thread and on the worker's reactor. Of ``worker``'s packages it imports ``copy`` only.
"""

"""``kvtier doctor``: what is odd on this machine, with these engines, or about this prompt, and what to do about it.

A module a family of checks, each a function that returns :class:`report.Check` s; ``examine`` runs those that were
asked for. Everything only reads: no engine is started, no KV moved, nothing written but a file without a name that
goes with the process (``disk``).
"""

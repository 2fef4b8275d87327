"""``kvtier bench``: what this machine makes of the project's own paths, beside what it could do at most.

Each module is one bench, ``measure(...) -> list[Row]``, of some seconds: the very code that engines and stores run, on
made-up blocks. For the project's own figures, with all their variants, see ``benchmarks/`` of a checkout.
"""

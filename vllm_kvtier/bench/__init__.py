"""``kvtier bench``: the rates of this machine, each with the limit of its hardware.

Each module is one bench, ``measure(...) -> list[Row]``, of a few seconds. It runs the code of engines and stores on
random blocks. ``benchmarks/`` of a checkout has the project's figures in all variants.
"""

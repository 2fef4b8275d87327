"""``kvtier plan``: what fits into each tier, the hit rates of a trace, and the prompt length from which loading pays.
"""

"""``kvtier plan``: what fits where, what of a trace would be found there, and from which length on that pays."""

"""Stores of other nodes: asked for what is not here, lent what is."""

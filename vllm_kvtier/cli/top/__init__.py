"""``kvtier top``: reads a node store and its engines, and shows them as one picture."""

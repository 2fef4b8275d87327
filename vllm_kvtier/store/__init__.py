"""The node store: host memory shared by every engine of a node. Imports neither vLLM nor torch."""

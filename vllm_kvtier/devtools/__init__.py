"""Engines and other services as real processes, for the demo, the tests and the benchmarks."""

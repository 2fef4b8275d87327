"""Counters, vLLM stats and Prometheus metrics."""

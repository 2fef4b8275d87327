"""What operators ask an engine: why a prompt misses, what it holds, gauges. Decides nothing.

Requests arrive on the engine's reactor and are answered on vLLM's scheduler thread. No other part
of the scheduler side imports this package; ``wiring`` does.
"""

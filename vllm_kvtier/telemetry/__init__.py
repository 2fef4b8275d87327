"""What is counted and told: an engine's metrics, the table of all metrics, KV events."""

"""An engine's metrics, the page of all metrics, and types of KV events."""

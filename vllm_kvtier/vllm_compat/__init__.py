"""The only place that knows vLLM's versions: what is supported, and what differs between them."""

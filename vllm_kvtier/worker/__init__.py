"""The worker half: views of the KV cache, transfers between engines, and checksums over pages."""

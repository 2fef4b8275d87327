"""Replays request traces and agents on engines with different KV tiers."""

"""Scheduler half: matching, plan, block bookkeeping, exports and leases. Runs in the engine core process."""

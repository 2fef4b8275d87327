"""Other nodes' stores as a tier of this one: reads their blocks, and leases its own to them.

The protocol between nodes is in ``vllm_kvtier.remote_store``. ``tier`` decides, on the server's reactor
thread; what ``process`` imports runs in the tier's process. Imports no other tier.
"""

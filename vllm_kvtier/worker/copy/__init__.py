"""Copiers between the KV cache and slots of a store: ``base`` is the contract and selects one for a device.

On any thread, under their caller's lock; never wait for the device. Import no queue, no connection and no vLLM.
"""

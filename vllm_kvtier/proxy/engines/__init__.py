"""The engines behind the proxy: their state, HTTP to them, and messages to their connectors.

On the proxy's event loop. Does not import ``routing``, ``routes`` or ``app``.
"""

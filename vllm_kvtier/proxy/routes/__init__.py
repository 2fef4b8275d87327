"""The routes, one file for each or for a family, and what they share to serve a request over ASGI.

Runs on the proxy's event loop. Does not import ``app``, ``server`` or ``reloading``.
"""

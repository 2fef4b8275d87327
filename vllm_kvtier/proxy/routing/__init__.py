"""Which engine serves a request, and when: admission, routing, and tables of conversations and prefixes.

Runs on the proxy's event loop without I/O. Does not import ``routes`` or ``app``.
"""

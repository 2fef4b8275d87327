"""Messages of clients and engines: request bodies, answers, server-sent events, ``kv_transfer_params``.

Pure functions and small classes without I/O. Imports nothing else of ``proxy``.
"""

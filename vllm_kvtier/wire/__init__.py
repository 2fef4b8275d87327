"""Messages, sockets and authentication shared by the scheduler half, the worker half and the proxy."""

"""Messages, sockets and authentication shared by the scheduler side, the worker side, the store and the proxy."""

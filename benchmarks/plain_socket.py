"""A plain copy over one TCP connection, to compare others with: bytes of one process's memory in another one's.

    python benchmarks/plain_socket.py send ADDRESS:PORT
    python benchmarks/plain_socket.py receive ADDRESS:PORT ROUNDS BYTES...   # a JSON object: bytes -> median seconds
"""

import json
import socket
import statistics
import sys
import time


def send(address: tuple[str, int]) -> None:
    with socket.create_server(address) as server:
        print("listens", flush=True)
        with server.accept()[0] as connection:
            memory = bytearray()
            while asked := connection.recv(8, socket.MSG_WAITALL):
                size = int.from_bytes(asked, "little")
                if len(memory) < size:
                    memory = bytearray(b"\1") * size
                connection.sendall(memoryview(memory)[:size])


def receive(address: tuple[str, int], rounds: int, sizes: list[int]) -> dict[int, float]:
    result = {}
    with socket.create_connection(address) as connection:
        for size in sizes:
            memory, seconds = memoryview(bytearray(b"\2") * size), []
            for _ in range(rounds):
                began, read = time.monotonic(), 0
                connection.sendall(size.to_bytes(8, "little"))
                while read < size:
                    read += connection.recv_into(memory[read:])
                seconds.append(time.monotonic() - began)
            result[size] = statistics.median(seconds)
    return result


if __name__ == "__main__":
    host, _, port = sys.argv[2].rpartition(":")
    if sys.argv[1] == "send":
        send((host, int(port)))
    else:
        print(json.dumps(receive((host, int(port)), int(sys.argv[3]), [int(size) for size in sys.argv[4:]])))

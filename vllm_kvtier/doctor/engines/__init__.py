"""Checks of running engines: their servers, their connectors' endpoints, and whether two engines are compatible.

Network calls with deadlines, on the calling thread. Imports nothing of ``doctor.machine``.
"""

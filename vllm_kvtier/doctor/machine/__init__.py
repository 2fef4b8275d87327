"""Checks of this machine: limits, GPUs, ports, packages, a directory for a disk tier.

Each file defines checks that return findings (``doctor.report``). Imports nothing of ``doctor.engines``.
"""

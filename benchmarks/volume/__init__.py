"""Writes an instance of very many messages straight to a store: see `plan`."""

from benchmarks.volume.plan import Layout, Volume
from benchmarks.volume.writing import write

__all__ = ["Layout", "Volume", "write"]

"""Staging memory, and the kernels that gather blocks of a pool into it and scatter them out of it."""

from __future__ import annotations

from kvferry.staging.choice import kernels_for
from kvferry.staging.kernels import Kernels
from kvferry.staging.memory import StagingMemory, allocate
from kvferry.staging.resources import copy_bytes_per_s, gather_speed

__all__ = ["Kernels", "StagingMemory", "allocate", "copy_bytes_per_s", "gather_speed", "kernels_for"]

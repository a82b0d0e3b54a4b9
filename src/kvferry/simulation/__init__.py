"""Whole systems in one thread, from one seed: the endpoints that ship, on simulated machines, wires and clocks.

`world` is one schedule: a registry, engines of either kind, their callers, and an adversary who decides what happens
next and what goes wrong. `machines` is what endpoints run on there, `processes` their lives, `office` the peer channel,
`memory` the pools, whose every byte has an owner, `requests` the callers' side, `laws` what must always hold. `search`
runs many schedules, and shrinks those that break a law.
"""

from kvferry.simulation.laws import ViolationError
from kvferry.simulation.world import Limits, World

__all__ = ["Limits", "ViolationError", "World"]

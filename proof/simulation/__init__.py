"""Whole systems in one thread, from one seed: the endpoints that ship, on simulated machines, wires and clocks.

`world` is one schedule: whose turn it is, what arrives, how time passes. `circumstances` draws what there is,
`adversary` decides what goes wrong, `callers` make `requests`, `inspector` checks after every step that the `laws`
hold. `machines` is what endpoints run on, `processes` their lives, `control_network` the peer channel, `memory` the
pools, whose every byte has an owner. `search` runs many schedules, and shrinks those that break a law.
"""

from proof.simulation.circumstances import Limits
from proof.simulation.laws import ViolationError
from proof.simulation.world import World

__all__ = ["Limits", "ViolationError", "World"]

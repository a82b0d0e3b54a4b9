"""Load and soak: many rooms in flight between real processes over NIXL, with faults, for as long as it is told."""

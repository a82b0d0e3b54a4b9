"""What proves kvferry, and is in no wheel: simulated machines, enumerated states, planted faults.

`simulation` runs whole systems from one seed, `enumeration` takes all states of small ones, `device` checks the order
of work on a device without having one, `planted` breaks lines of the library that tests must find broken.
"""

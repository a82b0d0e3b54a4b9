"""The rules of one transfer, without I/O.

`messages` is what travels between peers, `states` the table of what may follow what, `sender` and `receiver` the two
state machines: events and the time go in, commands come out. No thread, socket, clock or lock lives in this layer.
"""

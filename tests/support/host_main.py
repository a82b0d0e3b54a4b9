"""The first process of a host that tests make: its interfaces, whose wires' other ends the network gets.

Runs alone, without anything of this project: `unshare ... python -I -S host_main.py NAME INTERFACE=ADDRESS,... ...`,
with a socket as standard input. It ends, and everything in its namespaces with it, when that socket is closed.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU_BYTES = 1500


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _interface(name: str, addresses: list[str]) -> int:
    """Makes an interface, and returns the descriptor by which its packets come out, and others get in."""
    wire = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(wire, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    for address in addresses:
        is_v6 = ":" in address
        _run("ip", "address", "add", f"{address}/{64 if is_v6 else 24}", "dev", name, *(["nodad"] if is_v6 else []))
    _run("ip", "link", "set", name, "mtu", str(MTU_BYTES), "up")
    return wire


def main() -> None:
    name, *interfaces = sys.argv[1:]
    network = socket.socket(fileno=0)
    _run("ip", "link", "set", "lo", "up")
    _run("mount", "-t", "sysfs", "none", "/sys")  # programs look for this host's devices there
    socket.sethostname(name)
    wires = [_interface(each.partition("=")[0], each.partition("=")[2].split(",")) for each in interfaces]
    socket.send_fds(network, [b"."], wires)
    network.recv(1)


if __name__ == "__main__":
    main()

"""Which network device is near which GPU: read from a made-up tree of the system's, and what doctor says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.findings import Severity
from kvferry.transport.devices import Distance, Topology, read_topology
from kvferry.transport.nixl.nixl_diagnosis import placement

NVIDIA, MELLANOX, AMAZON, INTEL = "0x10de", "0x15b3", "0x1d0f", "0x8086"


class Machine:
    """A tree such as /sys: devices by their way from the root complex, and links to them by class."""

    def __init__(self, system: Path) -> None:
        self.system = system

    def device(self, way: str, *, vendor: str, kind: str, node: int | None = 0) -> Path:
        folder = self.system / "devices" / way
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
        if node is not None:
            (folder / "numa_node").write_text(f"{node}\n")
        self._link(self.system / "bus" / "pci" / "devices" / folder.name, folder)
        return folder

    def gpu(self, way: str, node: int | None = 0) -> None:
        self.device(way, vendor=NVIDIA, kind="0x030200", node=node)

    def rdma(self, way: str, name: str, layer: str, node: int = 0, vendor: str = MELLANOX) -> None:
        folder = self.device(way, vendor=vendor, kind="0x020700", node=node)
        port = folder / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(f"{layer}\n")
        self._link(folder / "infiniband" / name / "device", folder)
        self._link(self.system / "class" / "infiniband" / name, folder / "infiniband" / name)
        self.interface(folder, f"ib-{name}")

    def interface(self, device: Path, name: str) -> None:
        folder = device / "net" / name
        folder.mkdir(parents=True)
        self._link(folder / "device", device)
        self._link(self.system / "class" / "net" / name, folder)

    @staticmethod
    def _link(at: Path, to: Path) -> None:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(to)


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    """Two GPUs, each below a switch with a network device of its own; an Ethernet device elsewhere; EFA on node 1."""
    machine = Machine(tmp_path)
    switch = "pci0000:{0}/0000:{0}:01.0/0000:{1}:00.0"
    machine.gpu(f"{switch.format('17', '18')}/0000:19:00.0/0000:1a:00.0")
    machine.rdma(f"{switch.format('17', '18')}/0000:19:01.0/0000:1b:00.0", "mlx5_0", "InfiniBand")
    machine.gpu(f"{switch.format('97', '98')}/0000:99:00.0/0000:9a:00.0", node=1)
    machine.rdma(f"{switch.format('97', '98')}/0000:99:01.0/0000:9b:00.0", "mlx5_1", "Ethernet", node=1)
    machine.rdma("pci0000:b7/0000:b7:01.0/0000:b8:00.0", "rdmap0", "Unspecified", node=1, vendor=AMAZON)
    plain = machine.device("pci0000:17/0000:17:05.0/0000:2a:00.0", vendor=INTEL, kind="0x020000")
    machine.interface(plain, "eth0")
    (tmp_path / "devices" / "virtual" / "net" / "lo").mkdir(parents=True)
    (tmp_path / "class" / "net" / "lo").symlink_to(tmp_path / "devices" / "virtual" / "net" / "lo")
    machine.device("pci0000:17/0000:17:06.0", vendor=NVIDIA, kind="0x060400")  # a bridge of the same vendor
    return read_topology(tmp_path)


def test_gpus_and_network_devices_are_found_with_their_places(topology: Topology):
    assert [gpu.name for gpu in topology.gpus] == ["0000:1a:00.0", "0000:9a:00.0"]
    assert [gpu.numa_node for gpu in topology.gpus] == [0, 1]
    kinds = {nic.name: nic.kind for nic in topology.nics}
    assert kinds == {"mlx5_0": "InfiniBand", "mlx5_1": "RoCE", "rdmap0": "EFA", "eth0": "Ethernet"}
    assert topology.gpus[0].path[0] == "pci0000:17"
    assert topology.gpus[0].path[-1] == "0000:1a:00.0"


def test_the_nearest_network_device_is_below_the_same_switch(topology: Topology):
    first, second = topology.gpus
    nics = {nic.name: nic for nic in topology.nics}
    assert first.distance(nics["mlx5_0"]) is Distance.SWITCH
    assert first.distance(nics["eth0"]) is Distance.ROOT
    assert second.distance(nics["rdmap0"]) is Distance.NODE
    assert first.distance(nics["mlx5_1"]) is Distance.SYSTEM
    found = topology.nearest(second)
    assert found is not None
    assert ([nic.name for nic in found[0]], found[1]) == (["mlx5_1"], Distance.SWITCH)


def test_where_the_system_says_no_node_two_roots_are_as_far_as_can_be(tmp_path: Path):
    machine = Machine(tmp_path)
    machine.gpu("pci0000:17/0000:17:01.0/0000:18:00.0", node=None)
    machine.rdma("pci0000:97/0000:97:01.0/0000:98:00.0", "mlx5_0", "InfiniBand", node=-1)
    topology = read_topology(tmp_path)
    assert topology.gpus[0].distance(topology.nics[0]) is Distance.SYSTEM


def test_a_machine_without_any_is_empty(tmp_path: Path):
    assert read_topology(tmp_path / "nowhere") == Topology((), ())
    assert list(placement(None, Topology((), ()))) == []


def test_doctor_says_which_network_device_serves_which_gpu(topology: Topology):
    findings = list(placement(None, topology))
    assert [finding.severity for finding in findings] == [Severity.GOOD] * 2
    nearest = "the nearest network devices are mlx5_0 (InfiniBand), across one PCI switch"
    assert findings[0].what == f"NVIDIA GPU 0000:1a:00.0, NUMA node 0: {nearest}"
    (lonely,) = placement(None, Topology(topology.gpus[:1], ()))
    assert "no network device" in lonely.what


def test_a_network_device_at_the_other_processor_deserves_a_look(topology: Topology):
    first, second = placement("mlx5_1:1", topology)
    assert first.severity is Severity.WARNING
    assert "told to use mlx5_1, which is across two NUMA nodes from NVIDIA GPU 0000:1a:00.0" in first.what
    assert "KVFERRY_NIXL_DEVICE" in first.remedy
    assert second.severity is Severity.GOOD
    near, _ = placement("eth0", topology)
    assert near.severity is Severity.GOOD
    assert "eth0, which NIXL is told to use, is across one PCI root complex" in near.what

"""Which network device NIXL is told to use where no setting says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.settings import Settings
from kvferry.transport import devices
from kvferry.transport.devices import interface_of, interfaces_with_addresses
from kvferry.transport.nixl import device_choice, nixl_diagnosis
from kvferry.transport.nixl.device_choice import chosen_device

SECRET = "s" * 20


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two interfaces, no RDMA; the registry is beyond the first."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    known = {"10.0.0.7": "eth0", "10.66.0.7": "eth1"}
    monkeypatch.setattr(device_choice, "rdma_devices", dict)
    monkeypatch.setattr(device_choice, "interface_of", known.get)
    monkeypatch.setattr(device_choice, "address_towards_registry", lambda _: "10.0.0.7")
    monkeypatch.setattr(nixl_diagnosis, "interfaces", lambda: dict.fromkeys(("lo", *known.values()), "up"))
    monkeypatch.setattr(nixl_diagnosis, "interfaces_with_addresses", lambda: sorted(known.values()))


def far(**more: str) -> Settings:
    return Settings(registry_url="http://10.0.0.9:8998", secret=SECRET, **more)


def test_the_interface_that_leads_to_the_registry_is_used():
    assert chosen_device(far()).device == "eth0"
    assert chosen_device(far(host="0.0.0.0")).device == "eth0"
    assert "the way to the registry" in chosen_device(far()).reason


def test_the_address_that_a_rank_listens_on_has_the_interface():
    choice = chosen_device(far(host="10.66.0.7"))
    assert (choice.device, "KVFERRY_HOST" in choice.reason) == ("eth1", True)


def test_what_the_user_says_comes_first(monkeypatch: pytest.MonkeyPatch):
    assert chosen_device(far(nixl_device="eth1")).device == "eth1"
    assert chosen_device(far(nixl_device="all")).device is None
    monkeypatch.setenv("UCX_NET_DEVICES", "eth1")
    assert chosen_device(far()).device is None


def test_rdma_is_left_to_ucx(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_choice, "rdma_devices", lambda: {"mlx5_0": "4: ACTIVE"})
    assert chosen_device(far()).device is None


def test_nothing_leaves_the_machine_that_need_not():
    assert chosen_device(Settings()).device == "lo"


def test_an_address_of_no_interface_is_left_to_ucx():
    assert chosen_device(far(host="192.0.2.3")).device is None


def test_the_doctor_warns_of_what_may_lead_nowhere():
    found = nixl_diagnosis.device_finding(chosen_device(far(nixl_device="all")))
    assert found.severity.name == "WARNING"
    assert "eth0, eth1 have addresses" in found.what
    assert "KVFERRY_NIXL_DEVICE" in found.remedy
    assert nixl_diagnosis.device_finding(chosen_device(far())).severity.name == "GOOD"


def test_the_system_says_which_interface_has_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("a-name") is None
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000007 02 40 00 80     eth7\n"
        "fe80000000000000000000000000abcd 03 40 20 80     eth8\n"
    )
    monkeypatch.setattr(devices, "_V6", table)
    assert interface_of("fd00::7") == "eth7"
    assert "eth7" in interfaces_with_addresses()
    assert "eth8" not in interfaces_with_addresses(), "an address of one link alone leads to nobody else"

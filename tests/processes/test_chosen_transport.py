"""Ranks in processes of their own whose transport the environment chooses: a file of somebody else's, and no NIXL."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from tests.support.caches import Model, Shape
from tests.support.processes import Rank, RankProcess
from tests.support.toy_transport import ToyTransport

from kvferry import RankCoordinates
from kvferry.control.registry_server import RegistryServer
from kvferry.errors import TransportUnavailableError
from kvferry.transport.chosen import TRANSPORTS, transport_class

CHOSEN = f"{ToyTransport.__module__}:{ToyTransport.__qualname__}"
ENVIRONMENT = {"KVFERRY_TRANSPORT": CHOSEN}
SMALL = Model(layers=4, heads=4, head_dim=16, page_tokens=8, dtype="float32")
PAGES = [7, 3, 30, 4, 0, 31, 12, 5]

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def registry() -> Iterator[RegistryServer]:
    with RegistryServer(port=0) as running:
        yield running


def start(
    stack: ExitStack, registry: RegistryServer, prefill: dict[str, str], decode: dict[str, str], **settings: object
) -> tuple[RankProcess, RankProcess, str]:
    """A prefill and a decode rank in processes with these variables, and the prefill engine's name."""
    ranks = [stack.enter_context(closing(RankProcess(environment=each))) for each in (prefill, decode)]
    name = f"chosen-{os.getpid()}-{next(_numbers)}"
    given = {"registry_url": registry.url, **settings}
    ranks[0].do(Rank.start_prefill, SMALL, Shape(pages=32), RankCoordinates(), name, given)
    ranks[1].do(Rank.start_decode, SMALL, Shape(pages=32), RankCoordinates(), f"{name}-decode", given)
    return ranks[0], ranks[1], name


@pytest.mark.parametrize("path", ["direct", "staged", "auto"])
def test_every_byte_arrives_over_a_transport_of_ones_own(registry: RegistryServer, path: str):
    with ExitStack() as stack:
        prefill, decode, name = start(stack, registry, ENVIRONMENT, ENVIRONMENT, path=path)
        for room in range(1, 4):
            decode.do(Rank.receive, room, PAGES[::-1], name)
            prefill.do(Rank.send, room, PAGES, [3, len(PAGES)])
            for rank in (prefill, decode):
                assert rank.do(Rank.wait, room) == 0


@pytest.mark.parametrize("library", TRANSPORTS)
@pytest.mark.parametrize("is_prefill", [True, False])
def test_sides_with_different_transports_are_refused_when_they_connect(
    registry: RegistryServer, library: str, is_prefill: bool
):
    try:
        transport_class(library).check_available()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    other = {"KVFERRY_TRANSPORT": library}
    sides = (other, ENVIRONMENT) if is_prefill else (ENVIRONMENT, other)
    with ExitStack() as stack:
        prefill, decode, name = start(stack, registry, *sides)
        decode.do(Rank.receive, 1, PAGES, name)
        prefill.do(Rank.open_sender, 1, PAGES)
        ours, theirs = (library, "toy") if is_prefill else ("toy", library)
        for rank in (prefill, decode):
            end = rank.do(Rank.end, 1, 30.0)
            assert end.state == "FAILED"
            assert f"transport: prefill rank 0 of {name!r} uses {ours}, this decode rank {theirs}" in end.error
            assert rank.do(Rank.wait_reusable, 1, 30.0)


@pytest.mark.full
@pytest.mark.sampled(one_in=4, full=3)
@pytest.mark.parametrize("way", ["option", "variable"])
@pytest.mark.parametrize(
    "command",
    [
        "demo --prefill-tp 2 --decode-tp 1 --requests 2 --max-new-tokens 3 --json",
        "bench --preset small --tokens 64 --requests 2 --repetitions 1 --json",
    ],
)
def test_commands_move_real_caches_over_it(command: str, way: str):
    chosen = ["--transport", CHOSEN] if way == "option" else []
    run = subprocess.run(
        [sys.executable, "-m", "kvferry", *command.split(), *chosen],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **({} if chosen else ENVIRONMENT), "UCX_TLS": "no-such-thing"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout), "and the exit code says that every byte is right"


@pytest.mark.full
def test_a_doctor_measures_it_in_the_words_of_the_file():
    run = subprocess.run(
        [sys.executable, "-m", "kvferry", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    found = json.loads(run.stdout)["findings"]
    slow = [each for each in found if each["what"].endswith("GB/s is slow")]  # as it is where the machine is busy
    assert run.returncode == bool(slow), found
    assert [each["what"] for each in found if each["about"] == "toy"] == ["a port of 127.0.0.1, whichever is free"]
    (wire,) = [each["what"] for each in found if each["about"] == "wire" and each not in slow]
    assert wire.endswith("; the toy takes TCP")
    assert "NIXL" not in run.stdout

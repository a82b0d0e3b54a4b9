"""Two threads that are the first to decode a type: msgspec 0.22 reads what is not yet there, and the process dies.

What a type looks like is found out when its first decoder is made, and kept with the type while parts of it are still
missing. So every decoder is made when its module is imported, which one thread does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry

PACKAGE = Path(kvferry.__file__).parent

RACE = """
import importlib, sys, threading
import msgspec
import kvferry.layout.parallel as parallel
import kvferry.protocol.wire.registrations as registrations
import kvferry.control.registry_messages as registry_messages
import kvferry.control.registry_client as registry_client

sys.setswitchinterval(1e-6)
rank = {"engine": "e", "incarnation": "i", "coordinates": {}, "control_address": "tcp://127.0.0.1:1"}
rank |= {"layout_digest": "d", "started_at": 0.0, "protocol_version": 1}
body = msgspec.json.encode({"engines": [{"engine": "e", "world_size": 1, "registrations": [rank]}]})
for _ in range(60):
    for module in (parallel, registrations, registry_messages, registry_client):
        importlib.reload(module)  # its types are new
    client = registry_client.RegistryClient("http://127.0.0.1:1")
    client.exchange = lambda *arguments, **named: (200, body)
    start = threading.Barrier(4)

    def look_up():
        start.wait()
        for _ in range(3):
            client.engines()

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("alive")
"""


def test_first_answers_may_come_in_several_threads():
    run = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_is_decoded_without_a_decoder_made_at_import(file: Path):
    text = file.read_text()
    if ".decode(" not in text and ".Decoder(" not in text:  # most files, each of which takes long to walk through
        return
    tree = ast.parse(text)
    inside = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr == "decode":
            assert "type" not in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"
        if node.func.attr == "Decoder":
            assert id(node) not in inside, f"line {node.lineno}"

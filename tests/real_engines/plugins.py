"""Makes plug-ins of engines for tests findable, as an installed package is."""

from __future__ import annotations

from pathlib import Path


def install(directory: Path, name: str, module: str, group: str = "sglang.srt.plugins") -> Path:
    """Names a plug-in in a directory, which goes on the engine's module path; returns it.

    Args:
        name: the plug-in's.
        module: whose `register` the engine calls.
        group: of the engine's plug-ins.
    """
    info = directory / f"kvferry_{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry-{name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:register\n")
    return directory

"""Makes plug-ins of SGLang's for tests findable, as an installed package is."""

from __future__ import annotations

from pathlib import Path


def install(directory: Path, name: str, module: str) -> Path:
    """Names a plug-in in a directory, which goes on SGLang's module path; returns it.

    Args:
        name: the plug-in's.
        module: whose `register` SGLang calls.
    """
    info = directory / f"kvferry_{name}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry-{name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
    return directory

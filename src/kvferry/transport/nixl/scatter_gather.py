"""Lists of descriptors that UCX is given as a whole: whether this NIXL can do so, and how it is told to.

Without, NIXL asks UCX for each descriptor of a write. With `NIXL_UCX_SGL_ENABLE` it hands over the list in one call,
which UCX may turn into batched copies between GPUs or into fewer RDMA requests. NIXL knows the option if it was built
on a UCX with that interface; another warns where nobody looks, and goes on without. So its binary is asked first.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

from kvferry.errors import TransportUnavailableError
from kvferry.settings import environment_with

VARIABLE = "NIXL_UCX_SGL_ENABLE"
"""Read by NIXL's UCX backend when it is created; there is no backend parameter for it."""

_PLUGIN = "libplugin_UCX.so"
_WITHOUT = b"built without UCX SGL support"
"""What a backend says that knows the variable and cannot do it."""


def plugin_file(bindings: ModuleType, environment: Mapping[str, str]) -> Path | None:
    """Returns the file of the UCX backend that NIXL loads; None where it is not found.

    Args:
        bindings: NIXL's, as they were imported.
        environment: all of it; NIXL looks into NIXL_PLUGIN_DIR first.
    """
    package = Path(getattr(bindings, "__file__", None) or "").parent
    folders = [package.parent / f".{package.name}.mesonpy.libs" / "plugins"]
    if given := environment.get("NIXL_PLUGIN_DIR"):
        folders.insert(0, Path(given))
    return next((folder / _PLUGIN for folder in folders if (folder / _PLUGIN).is_file()), None)


def knows_lists(plugin: Path) -> bool:
    """Returns whether a UCX backend takes the option and was built to do what it says."""
    with plugin.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(VARIABLE.encode()) >= 0 and content.find(_WITHOUT) < 0


def check_lists(backend: str, plugin: Path | None) -> None:
    """Refuses what would be ignored.

    Args:
        backend: NIXL's.
        plugin: its file, if that is known. A backend that somebody built elsewhere is taken at its word.

    Raises:
        TransportUnavailableError: if lists cannot be handed over, saying what to do.
    """
    if backend != "UCX":
        raise TransportUnavailableError(
            f"KVFERRY_NIXL_SGL is for NIXL's backend UCX, and KVFERRY_NIXL_BACKEND is {backend!r}: unset one of them"
        )
    if plugin is not None and not knows_lists(plugin):
        raise TransportUnavailableError(
            f"KVFERRY_NIXL_SGL: the NIXL that is installed cannot hand lists of descriptors to UCX ({plugin} has no "
            f"{VARIABLE}, or was built on a UCX without them): install nixl-cu13 or nixl-cu12 1.5.1, or unset it"
        )


def told(*, hands_lists: bool) -> AbstractContextManager[None]:
    """Returns a context in which a backend that is created hands over lists, or does as the environment says."""
    return environment_with(VARIABLE, "1") if hands_lists else nullcontext()

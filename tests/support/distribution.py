"""Which tests share a process, where several run side by side."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

# Cells that do not say so are on the direct path.
_FAULT_CELL = re.compile(r".*/test_faults_(?P<role>\w+)\.py::\w+\[(?P<path>staged)?")


class ByModule(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Gives a process whole modules, and many cells of the fault matrix that strike the same kind of cluster.

    What a module has begun serves all of its tests then, and three processes share the whole matrix.
    """

    def _split_scope(self, nodeid: str) -> str:
        cell = _FAULT_CELL.match(nodeid)
        if cell is None:
            return nodeid.partition("::")[0]
        half = cell["path"] == "staged" and cell["role"] in ("prefill_rank", "registry")
        return f"clusters, {cell['path']}, {half}"

"""Which tests share a process, where several run side by side."""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

_FAULT_CELL = re.compile(r".*/test_faults_\w+\.py::\w+\[(?P<path>staged|direct)-")


class ByModule(LoadScopeScheduling):
    """Gives a process whole modules, and all cells of the fault matrix that strike the same kind of cluster.

    What a module has begun serves all of its tests then, and few clusters serve the whole matrix.
    """

    def _split_scope(self, nodeid: str) -> str:
        cell = _FAULT_CELL.match(nodeid)
        return f"clusters, {cell['path']}" if cell else nodeid.partition("::")[0]

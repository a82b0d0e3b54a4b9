"""The same transfers while processes share the GPU by MPS: do they lose to the GPU's turns, or to kvferry's code?

Starts MPS for this program's processes alone, has `transfers` measure the first sizes, and ends it. On a CPU nothing
gives turns: the same without it.

    python -m benchmarks.gpu_contact.probes.mps [--device cpu --tiny]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from benchmarks.gpu_contact.probes.common import parser

CONTROL = "nvidia-cuda-mps-control"


def main() -> None:
    """Measures between start and end of MPS."""
    parser(__doc__).parse_args()
    measured = "benchmarks.gpu_contact.probes.transfers"
    command = [sys.executable, "-m", measured, *sys.argv[1:], "--prefill-tp", "2", "--most-sizes", "1"]
    if "cpu" in sys.argv:
        sys.exit(subprocess.run(command, check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), folder)
        environment = {**os.environ, **places}
        subprocess.run([CONTROL, "-d"], env=environment, check=True)
        try:
            returned = subprocess.run(command, env=environment, check=False).returncode
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, env=environment, check=False)
    sys.exit(returned)


if __name__ == "__main__":
    main()

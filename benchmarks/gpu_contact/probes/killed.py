"""What becomes of the other process where one dies in the middle of a copy into mapped memory?

One process offers its memory by CUDA IPC (on a CPU by shared memory), another one maps it and copies into it without a
pause. Each in turn is killed with SIGKILL. The other must still compute, and what it holds must come to rest; what its
first call says, and how long that takes, is shown.

    python -m benchmarks.gpu_contact.probes.killed [--device cpu --tiny]
"""

from __future__ import annotations

import queue
import time
from typing import Any

from benchmarks.gpu_contact.probes.common import MIB, DeviceName, parser, synchronize, tell
from benchmarks.gpu_contact.probes.receiver import digest

_QUEUED = 64
_ANSWER_S = 10.0


def _kind(device: DeviceName) -> str:
    return "cuda:0" if device == "cuda" else "cpu"


def _computes(device: DeviceName) -> str:
    """Returns what goes wrong with a computation; "" if nothing does."""
    import torch

    try:
        given = torch.arange(1 << 16, device=_kind(device))
        is_right = bool((given * 2 - given == given).all())
        synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "" if is_right else "it computes something else"


def _hold(device: DeviceName, num_bytes: int, offered: Any, asked: Any, answered: Any) -> None:
    import torch

    pool = torch.zeros(num_bytes, dtype=torch.uint8, device=_kind(device))
    synchronize(device)
    offered.put(pool)
    while asked.get() is not None:
        problem = _computes(device)
        seen = {digest(pool.cpu().numpy()) for _ in range(0 if problem else 2)}
        answered.put((problem, len(seen) == 1))


def _copy(device: DeviceName, offered: Any, asked: Any, answered: Any) -> None:
    import torch

    mapped = offered.get(timeout=60)  # from the holder itself: what came from another process cannot be passed on
    sources = [torch.full_like(mapped, value, device=_kind(device)) for value in (1, 2)]
    said, is_first = "", True
    while True:
        try:
            for number in range(_QUEUED):
                mapped.copy_(sources[number % 2])
            if is_first:
                answered.put("copying")
                is_first = False
            synchronize(device)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if not asked.empty():
            asked.get()
            answered.put((said or _computes(device), True))
            return


def killed(victim: str, device: DeviceName, num_bytes: int) -> dict[str, object]:
    """Kills one of two, and asks the other."""
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    queues: dict[str, tuple[Any, Any]] = {name: (context.Queue(), context.Queue()) for name in ("holder", "writer")}
    offered = context.Queue()
    holder = context.Process(target=_hold, args=(device, num_bytes, offered, *queues["holder"]), daemon=True)
    holder.start()
    writer = context.Process(target=_copy, args=(device, offered, *queues["writer"]), daemon=True)
    writer.start()
    processes = {"holder": holder, "writer": writer}
    assert queues["writer"][1].get(timeout=120) == "copying"
    (survivor,) = set(processes) - {victim}
    before = time.perf_counter()
    processes[victim].kill()
    processes[victim].join(_ANSWER_S)
    asked, answered = queues[survivor]
    asked.put("are you well?")
    try:
        problem, is_at_rest = answered.get(timeout=_ANSWER_S)
    except queue.Empty:
        problem, is_at_rest = f"nothing said within {_ANSWER_S:g} s", False
    taken_s = time.perf_counter() - before
    processes[survivor].kill()
    processes[survivor].join(_ANSWER_S)
    return {
        "killed": victim,
        "other": survivor,
        "well": not problem,
        "says": problem,
        "at_rest": is_at_rest,
        "seconds": taken_s,
    }


def main() -> None:
    """Kills either, and prints."""
    typed = parser(__doc__).parse_args()
    rows = [killed(victim, typed.device, (4 if typed.tiny else 512) * MIB) for victim in ("holder", "writer")]
    tell({"device": typed.device, "rows": rows})


if __name__ == "__main__":
    main()

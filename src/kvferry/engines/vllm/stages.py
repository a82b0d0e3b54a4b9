"""What vLLM's pipeline stages tell each other when their caches are registered, which all of them do at once."""

from __future__ import annotations

from typing import Any, TypeVar

Own = TypeVar("Own")


def of_all_stages(own: Own) -> list[Own]:
    """Returns what each stage has given, in the order of the stages. Waits for all of them.

    It is the ranks with the same place in every stage that tell each other. What they give is pickled.
    """
    from vllm.distributed.parallel_state import get_pp_group

    stages: Any = get_pp_group()
    if stages.world_size == 1:
        return [own]
    from torch.distributed import all_gather_object

    found: list[Any] = [None] * stages.world_size
    all_gather_object(found, own, group=stages.cpu_group)
    return found

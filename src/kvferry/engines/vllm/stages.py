"""What vLLM's pipeline stages tell each other when their caches are registered, which all of them do at once.

It is the ranks with the same place in every stage that tell each other. A stage that fails says so in the place of what
it was to tell: the others would wait for it, and vLLM for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.errors import LayoutError

Own = TypeVar("Own")


class OtherStageError(LayoutError):
    """Another stage has failed."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """What a stage tells that has failed."""

    said: str


def of_all_stages(own: Own) -> list[Own]:
    """Returns what each stage has given, in the order of the stages. Waits for all of them.

    What they give is pickled.

    Raises:
        OtherStageError: if another one has failed, with what it has said.
    """
    found = _gathered(own)
    for number, each in enumerate(found):
        if isinstance(each, _Problem):
            raise OtherStageError(f"pipeline stage {number} cannot take part: {each.said}")
    return found


@contextmanager
def telling_problems(stages: int) -> Iterator[None]:
    """Tells the other stages if something is raised, in the place of what they are to be told next."""
    try:
        yield
    except OtherStageError:
        raise  # which all others raise as well
    except Exception as error:
        if stages > 1:
            _gathered(_Problem(str(error)))
        raise


def _gathered(own: Any) -> list[Any]:
    from vllm.distributed.parallel_state import get_pp_group

    stages: Any = get_pp_group()
    if stages.world_size == 1:
        return [own]
    from torch.distributed import all_gather_object

    found: list[Any] = [None] * stages.world_size
    all_gather_object(found, own, group=stages.cpu_group)
    return found

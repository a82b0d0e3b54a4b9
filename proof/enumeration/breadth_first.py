"""Breadth first through all states that a world can reach: every law in each, a way to the end from each."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from kvferry.protocol.wire import codec, messages
from proof.enumeration.reachable_states import LATE, TWICE, World
from proof.enumeration.world_states import Move, Packing, State
from proof.simulation.laws import Law, ViolationError


@dataclass(frozen=True, slots=True)
class Found:
    """What an enumeration has found.

    Attributes:
        states: how many distinct states were reached.
        moves: how many moves lead from one to another.
        violation: the law that broke first, None if all hold. No shorter way breaks any.
        trace: the way there.
        is_closed: whether nothing else can be reached.
    """

    states: int
    moves: int
    violation: ViolationError | None
    trace: tuple[Move, ...]
    is_closed: bool


def enumerate_states(
    world: World, *, most: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Found:
    """Enumerates all states from the first on, the nearest first.

    In each the laws are checked, and that the machines take every event. When nothing new is left, every state must
    have a way to the end on which nothing goes wrong: under fair delivery every room then ends.

    Args:
        most: stop after so many states.
        progress: called now and then, with the states that were reached and those that wait.
    """
    packing = Packing(world.shape)
    first = packing.pack(world.first())
    numbers: dict[bytes, int] = {first: 0}
    waiting: deque[bytes] = deque([first])  # in the order of their numbers
    parents, choices = array("I", [0]), array("H", [0])  # which move of which state led to each first
    sources, targets = array("I"), array("I")  # of moves on which nothing goes wrong
    ends = array("I")
    moves = 0
    for number in count():
        if not waiting:
            break
        state = packing.unpack(waiting.popleft())
        if progress is not None and number % 10_000 == 0:
            progress(len(numbers), len(waiting))
        try:
            world.check(state)
            if world.is_over(state):
                ends.append(number)
            for choice, move in enumerate(world.moves(state)):
                moves += 1
                packed = packing.pack(move.state)
                known = numbers.get(packed)
                if known is None:
                    known = numbers[packed] = len(numbers)
                    parents.append(number)
                    choices.append(choice)
                    waiting.append(packed)
                if not move.is_fault:
                    sources.append(number)
                    targets.append(known)
        except ViolationError as violation:
            return Found(len(numbers), moves, violation, _trace(world, parents, choices, number), is_closed=False)
        except Exception as error:
            raised = ViolationError(Law.NEVER_RAISES, f"{type(error).__name__}: {error}")
            raised.__cause__ = error
            return Found(len(numbers), moves, raised, _trace(world, parents, choices, number), is_closed=False)
        if most is not None and len(numbers) >= most:
            return Found(len(numbers), moves, None, (), is_closed=False)
    stuck = _without_a_way(len(numbers), sources, targets, ends)
    if stuck is None:
        return Found(len(numbers), moves, None, (), is_closed=True)
    endless = ViolationError(Law.ENDS, "from here no way leads to the end of every room, whatever arrives")
    return Found(len(numbers), moves, endless, _trace(world, parents, choices, stuck), is_closed=True)


def _without_a_way(states: int, sources: array[int], targets: array[int], ends: array[int]) -> int | None:
    """Returns the first state from which no end can be reached; None if there is none."""
    reaches = np.zeros(states, np.bool_)
    reaches[np.frombuffer(ends, np.uintc)] = True
    source, target = np.frombuffer(sources, np.uintc), np.frombuffer(targets, np.uintc)
    while (leads := reaches[target]).any():
        reaches[source[leads]] = True
        is_open = ~reaches[source]
        source, target = source[is_open], target[is_open]
    return None if reaches.all() else int(reaches.argmin())


def _trace(world: World, parents: array[int], choices: array[int], number: int) -> tuple[Move, ...]:
    """Returns the way by which a state was reached first."""
    way = []
    while number > 0:
        way.append(choices[number])
        number = parents[number]
    state, trace = world.first(), []
    for choice in reversed(way):
        move = next(islice(world.moves(state), choice, None))
        trace.append(move)
        state = move.state
    return tuple(trace)


def sequence_diagram(world: World, found: Found) -> str:
    """Draws the way to a violation as a Mermaid sequence diagram."""
    names = [f"d{number}" for number in range(world.shape.decodes)]
    names += [f"p{number}" for number in range(world.shape.prefills)]
    lines = ["sequenceDiagram", *(f"    participant {name}" for name in names)]
    state = world.first()
    for move in found.trace:
        if not move.source:
            lines.append(f"    Note over {names[0]},{names[-1]}: {move.label}")
        elif move.source == move.target:
            lines.append(f"    Note over {move.source}: {move.label}")
        else:
            arrow = "-x" if move.label.startswith(("lost", "cut")) else "->>"
            text = " ".join(filter(None, [_message(state, move), move.label]))
            lines.append(f"    {move.source}{arrow}{move.target}: {text}")
        state = move.state
    lines.append(f"    Note over {names[0]},{names[-1]}: {found.violation}")
    return "\n".join(lines)


def _message(state: State, move: Move) -> str:
    """Returns the name of what arrives, if something does."""
    if len(state.notes) > len(move.state.notes):
        left = Counter(state.notes) - Counter(move.state.notes)
        return type(codec.decode_notification(next(iter(left)).data)).__name__
    is_up = move.source[0] == "d"
    decode, prefill = (int(name[1:]) for name in sorted((move.source, move.target)))
    line = decode * len(state.prefills) + prefill
    is_late = move.label == LATE
    waiting = (
        (state.late_up if is_late else state.up)[line] if is_up else (state.late_down if is_late else state.down)[line]
    )
    if not waiting or move.label not in ("", LATE, TWICE):
        return ""
    message = codec.decode_to_prefill(waiting[0]) if is_up else codec.decode_to_decode(waiting[0])
    if not isinstance(message, messages.Numbered):
        return type(message).__name__
    body = (codec.decode_numbered_to_prefill if is_up else codec.decode_numbered_to_decode)(message.body)
    return f"{type(body).__name__} ({message.number})"

"""Nodes of machines that ship, as automata: copied, compared and stepped cheaply.

A node is an object that holds machines. What it does is a function of its state and of an event, so that each step is
computed once and looked up ever after: a world of several nodes has many more states than any one of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

Output: TypeAlias = tuple[Any, ...]
Event: TypeAlias = tuple[Any, ...]

_ATOMIC = (int, str, bytes, float, type(None), bool, FunctionType, MethodType, type, frozenset)
_UNCOMPARED = frozenset({"_deadlines"})  # the same in every state
_ENCODER = msgspec.msgpack.Encoder(enc_hook=repr)


class Node(Protocol):
    """What is stepped."""

    def handle(self, event: Event) -> list[Output]:
        """Takes an event. Returns what the node wants done."""


def _attributes(value: object) -> list[str]:
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else [name for name in slots if hasattr(value, name)]
    return names


def _is_frozen(value: object) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return isinstance(value, msgspec.Struct | msgspec.Raw) or (
        is_dataclass(value) and parameters is not None and parameters.frozen
    )


def copied(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Copies a value as far as it can change: containers and objects, but neither numbers nor what is frozen.

    Args:
        made: what was copied already, by the identity of the original: what two share, their copies share.
    """
    made = {} if made is None else made
    if isinstance(value, (*_ATOMIC, Enum, BaseException, np.ndarray)) or _is_frozen(value):
        return value
    if isinstance(value, Counter):
        return Counter(value)
    if isinstance(value, dict):
        return {key: copied(each, made) for key, each in value.items()}
    if isinstance(value, list):
        return [copied(each, made) for each in value]
    if isinstance(value, deque):
        return deque(copied(each, made) for each in value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, tuple):
        return tuple(copied(each, made) for each in value)
    if id(value) not in made:
        copy = made[id(value)] = object.__new__(type(value))
        for name in _attributes(value):
            object.__setattr__(copy, name, copied(getattr(value, name), made))
    return made[id(value)]


def compared(value: Any) -> Hashable:
    """Returns what is equal for two values that behave alike. Of an error only its type counts."""
    if isinstance(value, (*_ATOMIC, Enum)):
        return value
    if isinstance(value, BaseException):
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, _ENCODER.encode(value)
    if isinstance(value, dict):
        return tuple(sorted(((compared(key), compared(each)) for key, each in value.items()), key=repr))
    if isinstance(value, list | deque | tuple):
        return tuple(compared(each) for each in value)
    if isinstance(value, set):
        return frozenset(value)
    return type(value).__name__, tuple(
        (name, compared(getattr(value, name))) for name in _attributes(value) if name not in _UNCOMPARED
    )


NodeT = TypeVar("NodeT", bound=Node)


class Automaton(Generic[NodeT]):
    """All states of a node that were reached, by number, and what each event makes of them.

    Attributes:
        states: a node in each state. Nobody changes them.
    """

    def __init__(self) -> None:
        self.states: list[NodeT] = []
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Output, ...]]] = {}

    def number(self, node: NodeT) -> int:
        """Returns the number of a node's state."""
        key = compared(node)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.states)
            self.states.append(node)
        return number

    def step(self, number: int, event: Event) -> tuple[int, tuple[Output, ...]]:
        """Returns the state that follows an event, and what the node wants done."""
        found = self._steps.get((number, event))
        if found is None:
            node = copied(self.states[number])
            outputs = tuple(node.handle(event))
            found = self._steps[number, event] = self.number(node), outputs
        return found

    def property(self, read: Callable[[NodeT], Any]) -> Callable[[int], Any]:
        """Returns a function that reads something of a state, once."""
        known: dict[int, Any] = {}

        def get(number: int) -> Any:
            if number not in known:
                known[number] = read(self.states[number])
            return known[number]

        return get

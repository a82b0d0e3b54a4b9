"""Nodes of machines that ship, as automata: copied, compared and stepped cheaply.

A node is an object that holds machines. What it does is a function of its state and of an event, so that each step is
computed once and looked up ever after: a world of several nodes has many more states than any one of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

Output: TypeAlias = tuple[Any, ...]
Event: TypeAlias = tuple[Any, ...]

_ATOMIC = frozenset({int, str, bytes, float, type(None), bool, FunctionType, MethodType, type, frozenset, np.ndarray})
_UNCOMPARED = frozenset({"_deadlines", "port"})  # the same in every state, and the node itself
_ENCODER = msgspec.msgpack.Encoder(enc_hook=repr)


class Node(Protocol):
    """What is stepped."""

    def handle(self, event: Event) -> list[Output]:
        """Takes an event. Returns what the node wants done."""


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Returns the attributes of a type's values that have a slot."""
    names: list[str] = []
    for each in kind.__mro__:
        slots = getattr(each, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(names)


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Returns a value's attributes, by name."""
    kind: Any = type(value)
    found = list(vars(value).items()) if hasattr(value, "__dict__") else []
    return found + [(name, getattr(value, name)) for name in _slots(kind) if hasattr(value, name)]


@cache
def _is_kept(kind: Any) -> bool:
    """Whether values of a type never change, so that copies share them."""
    parameters = getattr(kind, "__dataclass_params__", None)
    is_frozen = is_dataclass(kind) and parameters is not None and parameters.frozen
    return kind in _ATOMIC or is_frozen or issubclass(kind, msgspec.Struct | msgspec.Raw | Enum | BaseException)


def copied(value: Any, made: dict[int, Any] | None = None) -> Any:
    """Copies a value as far as it can change: containers and objects, but neither numbers nor what is frozen.

    Args:
        made: what was copied already, by the identity of the original: what two share, their copies share.
    """
    kind: Any = type(value)
    if _is_kept(kind):
        return value
    made = {} if made is None else made
    if kind in (dict, OrderedDict):
        return kind((key, copied(each, made)) for key, each in value.items())
    if kind in (list, tuple, deque):
        return kind(copied(each, made) for each in value)
    if kind in (set, Counter):
        return kind(value)
    if isinstance(value, tuple):  # with names
        return kind(*(copied(each, made) for each in value))
    copy = made.get(id(value))
    if copy is None:
        copy = made[id(value)] = object.__new__(kind)
        for name, each in _attributes(value):
            object.__setattr__(copy, name, copied(each, made))
    return copy


class Comparison:
    """Says which values behave alike. What never changes is looked at once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Hashable]] = {}  # by identity: the value, which must stay, and its key

    def key(self, value: Any) -> Hashable:
        """Returns what is equal for two values that behave alike. Of an error only its type counts."""
        kind: Any = type(value)
        if kind in _ATOMIC:
            atom: Hashable = value.tobytes() if kind is np.ndarray else value
            return atom
        if kind in (dict, OrderedDict, Counter):
            return frozenset([(self.key(name), self.key(each)) for name, each in value.items()])
        if isinstance(value, list | deque | tuple):
            return tuple([self.key(each) for each in value])
        if kind is set:
            return frozenset(value)
        if isinstance(value, Enum):
            return kind.__name__, value.name
        if isinstance(value, BaseException):
            return type(value).__name__
        if _is_kept(kind):
            if id(value) not in self._known:
                self._known[id(value)] = value, self._of_object(value)
            return self._known[id(value)][1]
        return self._of_object(value)

    def _of_object(self, value: Any) -> Hashable:
        if isinstance(value, msgspec.Raw):
            return bytes(value)
        if isinstance(value, msgspec.Struct):
            return type(value).__name__, _ENCODER.encode(value)
        return type(value).__name__, tuple(
            [self.key(each) for name, each in _attributes(value) if name not in _UNCOMPARED]
        )


NodeT = TypeVar("NodeT", bound=Node)


class Automaton(Generic[NodeT]):
    """All states of a node that were reached, by number, and what each event makes of them.

    Attributes:
        states: a node in each state. Nobody changes them.
    """

    def __init__(self) -> None:
        self.states: list[NodeT] = []
        self._comparison = Comparison()
        self._numbers: dict[Hashable, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Output, ...]]] = {}

    def number(self, node: NodeT) -> int:
        """Returns the number of a node's state."""
        key = self._comparison.key(node)
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

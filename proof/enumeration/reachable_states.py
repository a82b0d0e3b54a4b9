"""A world of prefill and decode ranks: what can happen in each of its states, and which laws hold there.

A state is plain data: the number of each node's state, what is on its way between them, and how much may go wrong yet.
Between a decode and a prefill rank lies a line that keeps the order, and loses what is on its way when it is cut; bytes
and notifications go their own ways, in any order. Time is not counted: a deadline may pass at any moment, as a fault,
and whatever is awaited takes as long as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import methodcaller
from typing import TypeVar

from proof.enumeration.automata import Automaton, Event, Output
from proof.enumeration.decode_node import DecodeNode
from proof.enumeration.prefill_node import PrefillNode
from proof.enumeration.ranks import SPAN_BYTES, chunk_arrived, staged_arrived
from proof.enumeration.world_states import Flying, Move, Note, Shape, State
from proof.simulation.laws import Law, ViolationError

T = TypeVar("T")

TWICE = "comes twice"
"""The label of a message that comes, and will come again."""

LATE = "with the connection that was given up"
"""The label of a message that comes beside those of a later attempt to attach."""

_USES = 2


class World:
    """All states that can be reached."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.prefills = [Automaton[PrefillNode]() for _ in range(shape.prefills)]
        self.decodes = [Automaton[DecodeNode]() for _ in range(shape.decodes)]
        self._has_ended = [
            *(each.property(lambda node: node.has_ended and node.use == _USES) for each in self.prefills),
            *(each.property(lambda node: node.has_ended and node.use == _USES) for each in self.decodes),
        ]
        self._is_through = [
            *(each.property(lambda node: node.has_ended and node.use < _USES) for each in self.prefills),
            *(each.property(lambda node: node.has_ended and node.use < _USES) for each in self.decodes),
        ]
        self._decode_has_ended = [each.property(lambda node: node.has_ended) for each in self.decodes]
        self._writers = [each.property(lambda node: node.writers) for each in self.decodes]
        self._prefill_moves = [each.property(_prefill_moves) for each in self.prefills]
        self._decode_moves = [each.property(_decode_moves) for each in self.decodes]
        self._holds_source = [each.property(lambda node: node.holds_pages()) for each in self.prefills]
        self._unacknowledged = [
            [each.property(methodcaller("unacknowledged", decode)) for decode in range(shape.decodes)]
            for each in self.prefills
        ]
        self._awaits = [
            [each.property(methodcaller("awaits", prefill)) for prefill in range(shape.prefills)]
            for each in self.decodes
        ]
        self._settles = [
            [each.property(methodcaller("settles", prefill)) for prefill in range(shape.prefills)]
            for each in self.decodes
        ]
        self._held = [
            each.property(lambda node: node.generation if node.holds_pages() else None) for each in self.decodes
        ]
        self._has_attached = [
            [each.property(methodcaller("has_attached", decode)) for decode in range(shape.decodes)]
            for each in self.prefills
        ]
        self._is_attached = [each.property(lambda node: node.is_attached) for each in self.decodes]
        self._ring = [
            [each.property(methodcaller("ring", prefill)) for prefill in range(shape.prefills)] for each in self.decodes
        ]
        self._wrong = [each.property(self._wrong_bytes) for each in self.decodes]

    def first(self) -> State:
        """The state in which nobody has opened anything."""
        lines: tuple[tuple[bytes, ...], ...] = ((),) * (self.shape.prefills * self.shape.decodes)
        state = State(
            prefills=tuple(
                each.number(PrefillNode(number, self.shape.prefills, self.shape.decodes, self.shape.chunks))
                for number, each in enumerate(self.prefills)
            ),
            decodes=tuple(
                each.number(DecodeNode(number, self.shape.prefills, self.shape.decodes))
                for number, each in enumerate(self.decodes)
            ),
            up=lines,
            down=lines,
            late_up=lines,
            late_down=lines,
            writes=(),
            notes=(),
            faults=0,
        )
        for number in range(self.shape.decodes):
            state = self._after(state, "d", number, ("attach",))
        while not self._are_attached(state):
            state = next(self._of_lines(state)).state
        return state._replace(faults=self.shape.faults)

    def _are_attached(self, state: State) -> bool:
        return all(is_attached(number) for is_attached, number in zip(self._is_attached, state.decodes, strict=True))

    def is_over(self, state: State) -> bool:
        """Whether both uses of the number have ended everywhere."""
        nodes = state.prefills + state.decodes
        return all(has_ended(number) for has_ended, number in zip(self._has_ended, nodes, strict=True))

    # ---- steps --------------------------------------------------------------------------------------------------

    def _line(self, decode: int, prefill: int) -> int:
        return decode * self.shape.prefills + prefill

    def _after(self, state: State, node: str, number: int, event: Event) -> State:
        """Returns the state after a node has taken an event."""
        if node == "p":
            after, outputs = self.prefills[number].step(state.prefills[number], event)
            state = state._replace(prefills=_with(state.prefills, number, after))
        else:
            after, outputs = self.decodes[number].step(state.decodes[number], event)
            state = state._replace(decodes=_with(state.decodes, number, after))
        return self._carry(state, number, outputs) if outputs else state

    def _carry(self, state: State, number: int, outputs: tuple[Output, ...]) -> State:
        """Puts what a node wants done on its way."""
        up, down = list(state.up), list(state.down)
        writes, notes = list(state.writes), list(state.notes)
        for output in outputs:
            match output:
                case ("up", prefill, data):
                    up[self._line(number, prefill)] += (data,)
                case ("down", decode, data):
                    down[self._line(decode, number)] += (data,)
                case ("write", decode, generation, sequence, span):
                    writes.append(Flying(number, decode, generation, sequence, span))
                case ("notify", decode, data):
                    notes.append(Note(number, decode, data))
        return state._replace(
            up=tuple(up), down=tuple(down), writes=tuple(sorted(writes, key=repr)), notes=tuple(sorted(notes))
        )

    def moves(self, state: State) -> Iterator[Move]:
        """Returns what can happen."""
        yield from self._of_nodes(state)
        yield from self._of_lines(state)
        yield from self._of_bytes(state)
        nodes = state.prefills + state.decodes
        if all(is_through(number) for is_through, number in zip(self._is_through, nodes, strict=True)):
            after = state
            for number in range(self.shape.prefills):
                after = self._after(after, "p", number, ("next use",))
            for number in range(self.shape.decodes):
                after = self._after(after, "d", number, ("next use",))
            yield Move("the number is used again", "", "", False, after)

    def _of_nodes(self, state: State) -> Iterator[Move]:
        for number in range(self.shape.prefills):
            for what, is_wrong in self._prefill_moves[number](state.prefills[number]):
                is_fault = is_wrong and not (what == "late" and self._awaits_nobody(state, number))
                if state.faults or not is_fault:
                    yield self._acts(state, "p", number, what, is_fault)
            for decode in range(self.shape.decodes):
                if state.faults and self._has_attached[number][decode](state.prefills[number]):
                    after = self._after(state, "p", number, ("lost", decode))._replace(faults=state.faults - 1)
                    yield Move("gives the decode rank up", f"p{number}", f"d{decode}", True, after)
        for number in range(self.shape.decodes):
            for what, is_fault in self._decode_moves[number](state.decodes[number]):
                if state.faults or not is_fault:
                    yield self._acts(state, "d", number, what, is_fault)
            if state.faults and self._is_attached[number](state.decodes[number]):
                yield from self._given_up(state, number)

    def _awaits_nobody(self, state: State, prefill: int) -> bool:
        """Whether a prefill rank has nothing to send, and all whom it could hear from have ended.

        It hears of that only through an open request, and where that was lost with the link its deadline has to pass:
        docs/reliability.md, "What is not promised".
        """
        return all(
            has_ended(number) and prefill not in writers(number)
            for has_ended, writers, number in zip(self._decode_has_ended, self._writers, state.decodes, strict=True)
        )

    def _acts(self, state: State, node: str, number: int, what: str, is_fault: bool) -> Move:
        after = self._after(state, node, number, (what,))
        name = f"{node}{number}"
        return Move(_ACTS[what], name, name, is_fault, after._replace(faults=after.faults - is_fault))

    def _given_up(self, state: State, decode: int) -> Iterator[Move]:
        """A decode rank gives its link up: what is on its way is lost, or comes beside what is sent from then on."""
        up, down, late_up, late_down = list(state.up), list(state.down), list(state.late_up), list(state.late_down)
        for prefill in range(self.shape.prefills):
            line = self._line(decode, prefill)
            late_up[line] += up[line]
            late_down[line] += down[line]
            up[line] = down[line] = ()
        lost = state._replace(up=tuple(up), down=tuple(down), faults=state.faults - 1)
        late = lost._replace(late_up=tuple(late_up), late_down=tuple(late_down))
        for after in dict.fromkeys((lost, late)):
            label = "gives its link up" if after is lost else "gives its link up, with messages on their way"
            name = f"d{decode}"
            yield Move(label, name, name, True, self._after(after, "d", decode, ("give up",)))

    def _of_lines(self, state: State) -> Iterator[Move]:
        for decode in range(self.shape.decodes):
            for prefill in range(self.shape.prefills):
                line = self._line(decode, prefill)
                up, down = state.up[line], state.down[line]
                who, whom = f"d{decode}", f"p{prefill}"
                if up:
                    rest = state._replace(up=_with(state.up, line, up[1:]))
                    yield Move("", who, whom, False, self._after(rest, "p", prefill, ("message", decode, up[0])))
                if down:
                    rest = state._replace(down=_with(state.down, line, down[1:]))
                    yield Move("", whom, who, False, self._after(rest, "d", decode, ("message", prefill, down[0])))
                late_up, late_down = state.late_up[line], state.late_down[line]
                if late_up:
                    rest = state._replace(late_up=_with(state.late_up, line, late_up[1:]))
                    after = self._after(rest, "p", prefill, ("message", decode, late_up[0]))
                    yield Move(LATE, who, whom, False, after)
                if late_down:
                    rest = state._replace(late_down=_with(state.late_down, line, late_down[1:]))
                    after = self._after(rest, "d", decode, ("message", prefill, late_down[0]))
                    yield Move(LATE, whom, who, False, after)
                if not up and not down:
                    is_due = self._awaits[decode][prefill](state.decodes[decode])
                    is_due |= not self._has_attached[prefill][decode](state.prefills[prefill])
                    if is_due or self._unacknowledged[prefill][decode](state.prefills[prefill]):
                        after = self._after(state, "d", decode, ("heartbeat", prefill))
                        yield Move("a heartbeat is due", who, who, False, after)
                elif state.faults:
                    yield from self._line_faults(state, decode, prefill)

    def _line_faults(self, state: State, decode: int, prefill: int) -> Iterator[Move]:
        """A cut loses what was sent last, either way; what was sent first may come twice, as after a cut."""
        line = self._line(decode, prefill)
        up, down = state.up[line], state.down[line]
        who, whom = f"d{decode}", f"p{prefill}"
        fewer = state._replace(faults=state.faults - 1)
        for kept_up, kept_down in {(0, 0), (len(up) // 2, len(down)), (len(up), len(down) // 2)}:
            if (kept_up, kept_down) == (len(up), len(down)):
                continue
            cut = fewer._replace(up=_with(state.up, line, up[:kept_up]), down=_with(state.down, line, down[:kept_down]))
            yield Move(f"lost: all but {kept_up} up and {kept_down} down", who, whom, True, cut)
            noticed = self._after(cut, "d", decode, ("broke", prefill))
            yield Move(f"cut: all but {kept_up} up and {kept_down} down", who, whom, True, noticed)
        if up:
            again = self._after(fewer, "p", prefill, ("message", decode, up[0]))
            yield Move(TWICE, who, whom, True, again)
        if down:
            again = self._after(fewer, "d", decode, ("message", prefill, down[0]))
            yield Move(TWICE, whom, who, True, again)

    def _of_bytes(self, state: State) -> Iterator[Move]:
        for index, note in enumerate(state.notes):
            rest = state._replace(notes=state.notes[:index] + state.notes[index + 1 :])
            after = self._after(rest, "d", note.decode, ("note", note.prefill, note.data))
            yield Move("", f"p{note.prefill}", f"d{note.decode}", False, after)
        for index, write in enumerate(state.writes):
            rest = state._replace(writes=state.writes[:index] + state.writes[index + 1 :])
            who, whom = f"p{write.prefill}", f"d{write.decode}"
            if not write.is_failed:
                yield Move(f"{_what(write)} has landed", who, whom, False, self._landed(rest, write))
                if state.faults:
                    for reads_on in (False, True):
                        failed = write._replace(is_failed=True, reads_on=reads_on)
                        after = rest._replace(writes=_sorted(rest.writes, failed), faults=state.faults - 1)
                        after = self._after(after, "p", write.prefill, ("failed", write.decode, write.sequence))
                        label = f"the post of {_what(write)} raises" if reads_on else f"{_what(write)} fails"
                        yield Move(label, who, whom, True, after)
                continue
            if not write.has_landed:
                after = rest._replace(writes=_sorted(rest.writes, write._replace(has_landed=True)))
                yield Move(f"what was sent of {_what(write)} lands", who, whom, False, after)
            if not write.is_settled and (write.has_landed or not write.reads_on):  # read no longer than is waited for
                settled = write._replace(is_settled=True)
                after = rest._replace(writes=_sorted(rest.writes, settled))
                event = "settled", write.decode, write.sequence, write.span
                yield Move(f"{_what(write)} is over", who, who, False, self._after(after, "p", write.prefill, event))
            elif write.is_settled and write.has_landed:  # nothing of it is left
                yield Move("", who, whom, False, rest)
        for decode in range(self.shape.decodes):
            for prefill in range(self.shape.prefills):
                if self._settles[decode][prefill](state.decodes[decode]) and not any(
                    (write.prefill, write.decode) == (prefill, decode) and write.is_failed and not write.has_landed
                    for write in state.writes
                ):
                    name = f"d{decode}"
                    after = self._after(state, "d", decode, ("settled", prefill))
                    yield Move(f"nothing more can arrive from p{prefill}", name, name, False, after)

    def _landed(self, state: State, write: Flying) -> State:
        who, whom = write.prefill, write.decode
        if write.span is None:
            state = self._after(state, "d", whom, ("bytes", who, write.generation, write.sequence))
            data = chunk_arrived(who, write.generation, write.sequence)
        else:
            data = staged_arrived(who, write.generation, write.sequence, write.span)
        state = state._replace(notes=tuple(sorted((*state.notes, Note(who, whom, data)))))
        return self._after(state, "p", who, ("landed", whom, write.sequence))

    # ---- laws ---------------------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """Checks every law in a state.

        Raises:
            ViolationError: if one is broken.
        """
        for write in state.writes:
            is_read = not write.is_failed or (write.reads_on and not write.has_landed)
            if is_read and not self._holds_source[write.prefill](state.prefills[write.prefill]):
                raise ViolationError(
                    Law.NO_REUSE_UNDER_A_READ, f"p{write.prefill}: {_what(write)} reads pages that were given back"
                )
            if write.has_landed:
                continue
            if write.span is None:
                if self._held[write.decode](state.decodes[write.decode]) != write.generation:
                    raise ViolationError(
                        Law.NO_WRITE_AFTER_RELEASE,
                        f"d{write.decode}: {_what(write)} is on its way to pages that were given back",
                    )
                continue
            epoch, read, is_alone = self._ring[write.decode][write.prefill](state.decodes[write.decode])
            if is_alone if write.span.epoch < epoch else read > write.span.start:
                raise ViolationError(
                    Law.NO_WRITE_AFTER_RELEASE,
                    f"d{write.decode}: {_what(write)} is on its way to a span that was given back",
                )
            if write.span.epoch == epoch and write.span.stop > read + SPAN_BYTES:
                raise ViolationError(
                    Law.OWN_PAGES_ONLY, f"d{write.decode}: {_what(write)} is on its way to a span that was not read yet"
                )
        for decode, number in enumerate(state.decodes):
            if self._wrong[decode](number):
                raise ViolationError(Law.EXACT, f"d{decode} has succeeded with {self._wrong[decode](number)}")

    def _wrong_bytes(self, node: DecodeNode) -> str:
        expected = {(writer, sequence) for writer in node.writers for sequence in range(self.shape.chunks)}
        return f"chunks {sorted(node.placed)}" if node.has_succeeded and node.placed != expected else ""


_ACTS = {
    "open": "its caller opens the room",
    "submit": "its caller hands in the chunks",
    "abort": "its caller aborts the room",
    "late": "its deadline passes",
}


def _prefill_moves(node: PrefillNode) -> tuple[tuple[str, bool], ...]:
    moves = [] if node.has_opened else [("open", False)]
    if node.has_opened and not node.has_submitted:
        moves.append(("submit", False))
    return (*moves, ("abort", True), ("late", True)) if node.can_fail else tuple(moves)


def _decode_moves(node: DecodeNode) -> tuple[tuple[str, bool], ...]:
    moves = [] if node.has_opened else [("open", False)]
    return (*moves, ("abort", True), ("late", True)) if node.can_fail else tuple(moves)


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _sorted(writes: tuple[Flying, ...], more: Flying) -> tuple[Flying, ...]:
    return tuple(sorted((*writes, more), key=repr))


def _what(write: Flying) -> str:
    return f"chunk {write.sequence}{'' if write.span is None else ' (staged)'} of generation {write.generation}"

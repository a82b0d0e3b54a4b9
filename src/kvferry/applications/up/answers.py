"""What decode servers answer, and the answers to several choices of one request made into one.

A server that is asked for one choice calls it the first. Where a request was divided, each answer's choice gets its own
number, and what all of them used is added up as OpenAI's interface has it: the prompt counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.responses import JSONResponse, Response, StreamingResponse

_DONE = b"[DONE]"
_OF_THE_PROMPT = "prompt"
"""How the names of what is used begin that is the same for all choices."""


@dataclass(frozen=True, slots=True)
class Whole:
    """An answer that has come to its end."""

    content: bytes
    status: int
    media_type: str | None

    @property
    def is_success(self) -> bool:
        """Whether the server did what it was asked."""
        return self.status < 300

    async def close(self) -> None:
        """Needs nothing."""

    def response(self) -> Response:
        """For the client."""
        return Response(self.content, self.status, media_type=self.media_type)


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer that comes as it is generated.

    Attributes:
        events: server-sent, without the empty line behind each; the last may lack it.
        exits: closes the connection to the server.
        is_success: True; a stream that fails at its beginning is none.
    """

    events: AsyncIterator[bytes]
    exits: contextlib.AsyncExitStack
    is_success: bool = True

    async def close(self) -> None:
        """Lets the server know that nobody reads on."""
        await self.exits.aclose()

    def response(self) -> Response:
        """For the client. Closed once it has been sent, or the client has gone."""
        return _streaming(self._passed_on())

    async def _passed_on(self) -> AsyncGenerator[bytes, None]:
        async with self.exits:
            async for event in self.events:
                yield event + b"\n\n"


Answer: TypeAlias = Whole | Streamed


async def one_of(answers: Sequence[Answer], ending: set[asyncio.Task[None]]) -> Response:
    """Returns one response with the choices of all answers, in their order.

    The first that is no success is the response where there is one; the others are closed then.

    Args:
        ending: holds the tasks that close connections, until they have: event loops hold theirs weakly.
    """
    if len(answers) == 1:
        return answers[0].response()
    failed = next((each for each in answers if not each.is_success), None)
    if failed is None:
        streams = [each for each in answers if isinstance(each, Streamed)]
        if len(streams) == len(answers):
            return _streaming(_merged_events(streams, ending))
        wholes = [_choices(each.content) for each in answers if isinstance(each, Whole)]
        if len(wholes) == len(answers) and None not in wholes:
            return JSONResponse(_merged([each for each in wholes if each is not None]))
        failed = Whole(b"the choices of one request were answered in different ways", 502, "text/plain")
    for each in answers:
        if each is not failed:
            await each.close()
    return failed.response()


def _choices(content: bytes) -> dict[str, Any] | None:
    """Returns an answer that has choices; None for anything else."""
    with contextlib.suppress(ValueError):
        answer = json.loads(content)
        if isinstance(answer, dict) and isinstance(answer.get("choices"), list):
            return answer
    return None


def _merged(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    choices = [
        {**choice, "index": index} for index, answer in enumerate(answers) for choice in answer.get("choices", ())
    ]
    merged = {**answers[0], "choices": choices}
    if used := [answer["usage"] for answer in answers if isinstance(answer.get("usage"), dict)]:
        merged["usage"] = _added(used)
    return merged


def _added(used: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up what several choices of one prompt have used."""
    total = dict(used[0])
    for each in used[1:]:
        for name, value in each.items():
            is_number = isinstance(value, int) and isinstance(total.get(name), int)
            if is_number and not name.startswith(_OF_THE_PROMPT):
                total[name] += value
    if isinstance(total.get("prompt_tokens"), int) and isinstance(total.get("completion_tokens"), int):
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return total


async def _merged_events(streams: Sequence[Streamed], ending: set[asyncio.Task[None]]) -> AsyncGenerator[bytes, None]:
    """Yields the events of all streams as they come, then what they have used, and one end."""
    events: asyncio.Queue[tuple[int, bytes | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            async with streams[index].exits:
                async for event in streams[index].events:
                    events.put_nowait((index, event))
        finally:
            events.put_nowait((index, None))

    reading = [asyncio.create_task(read(index)) for index in range(len(streams))]
    try:
        open_streams, ended, name = len(streams), 0, None
        used: list[dict[str, Any]] = []
        while open_streams:
            index, event = await events.get()
            if event is None:
                open_streams -= 1
                continue
            data = event.removeprefix(b"data:").strip() if event.startswith(b"data:") else b""
            if data == _DONE:
                ended += 1
                continue
            said = _choices(data)
            if said is None:
                yield event + b"\n\n"
                continue
            name = name or said.get("id")
            said["id"] = name
            if not said["choices"] and isinstance(said.get("usage"), dict):
                used.append(said)
                continue
            said["choices"] = [{**choice, "index": index} for choice in said["choices"]]
            yield _event(said)
        if used:
            yield _event(_merged(used))
        if ended == len(streams):
            yield b"data: " + _DONE + b"\n\n"
    finally:
        # Each closes its own connection. Nobody waits for that: a client that has gone cancels us again and again while
        # we wait, and whom we wait for with us, so that connections would stay open.
        for task in reading:
            ending.add(task)
            task.add_done_callback(ending.discard)
            task.cancel()


async def events_of(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields whole events of an answer that is cut anywhere, without the empty line behind each; last, what is left."""
    begun = b""
    async for piece in pieces:
        begun = (begun + piece).replace(b"\r\n", b"\n")
        *whole, begun = begun.split(b"\n\n")
        for event in whole:
            yield event
    if begun:
        yield begun


def _event(said: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(said, ensure_ascii=False)}\n\n".encode()


def _streaming(pieces: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(pieces, media_type="text/event-stream")

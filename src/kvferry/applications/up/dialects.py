"""What a client's request becomes for a prefill and a decode server: the one place of a front that knows an engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from kvferry.applications.up.servers import Server
from kvferry.engines.sglang.directory import ask
from kvferry.engines.vllm.parameters import LARGEST_ROOM, ROOM
from kvferry.errors import UsageError
from kvferry.hosts import bracketed

MOST_CHOICES = 128
"""Of one request to SGLang: each is a request of its own to two servers."""
_LARGEST_BOOTSTRAP_ROOM = (1 << 63) - 1


class Dialect(Protocol):
    """How an engine's servers are told of one another."""

    def requests(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Divides a client's request into those that are asked, each of which is one room.

        Several are several choices of one prompt, in order.

        Raises:
            UsageError: if that cannot be done, naming the field.
        """
        ...

    def asked(self, body: Mapping[str, Any], prefill: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns what the prefill server and the decode server are asked, under a room that no other request has.

        Args:
            body: one of `requests`.
            prefill: the prefill server.
        """
        ...

    def registered_name(self, prefill: Server) -> str:
        """Returns the name under which a prefill server's ranks are at their registry. May ask the server.

        Raises:
            RegistryError: if it does not say.
        """
        ...


class VllmDialect:
    """`kv_transfer_params`, as kvferry's connector reads them.

    The prefill server computes the prompt and one token that nobody sees. All choices (`n`) have the cache of one
    prompt, which the decode server fetches once.
    """

    def requests(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the request itself: the choices of one (`n`) are the decode server's business."""
        _check_is_one_prompt(body)
        if body.get("use_beam_search"):
            raise UsageError(
                "use_beam_search: vLLM makes requests of its own for every token then, and none of them fetches the "
                "cache; leave it away"
            )
        return [dict(body)]

    def asked(self, body: Mapping[str, Any], prefill: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns both, with a room that both know from the start."""
        room = 1 + secrets.randbelow(LARGEST_ROOM)
        of_prefill = {name: value for name, value in body.items() if name not in ("n", "min_tokens", "stream_options")}
        of_prefill |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in of_prefill:
            of_prefill["max_completion_tokens"] = 1
        of_prefill["kv_transfer_params"] = {"do_remote_decode": True, ROOM: room}
        parameters = {"do_remote_prefill": True, "remote_engine_id": prefill.engine, ROOM: room}
        return of_prefill, {**body, "kv_transfer_params": parameters}

    def registered_name(self, prefill: Server) -> str:
        """Returns the name that the server is given as its `engine_id`."""
        return prefill.engine


class SglangDialect:
    """`bootstrap_host`, `bootstrap_port` and `bootstrap_room`, as SGLang's router sends them to both servers.

    The prefill server generates the first token, so that it is asked with the same parameters as the decode server.
    SGLang's own `n` would use one room for a first request, which fills a prefix cache, and for all choices after it:
    each choice is asked for with a room of its own instead.
    """

    def requests(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns one request for every choice."""
        _check_is_one_prompt(body)
        if body.get("echo") and body.get("logprobs"):
            raise UsageError(
                "echo with logprobs: the prompt's are on the prefill server, and SGLang's decode server would answer "
                "without them; leave one of the two away"
            )
        choices = body.get("n")
        if choices is None:
            return [dict(body)]
        if not isinstance(choices, int) or isinstance(choices, bool) or not 1 <= choices <= MOST_CHOICES:
            raise UsageError(f"n: {choices!r}: it must be an integer from 1 to {MOST_CHOICES}")
        return [{**body, "n": 1} for _ in range(choices)]

    def asked(self, body: Mapping[str, Any], prefill: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the same for both, but that the prefill server's answer is no stream."""
        of_decode = {
            **body,
            "bootstrap_host": urlsplit(prefill.url).hostname,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": 1 + secrets.randbelow(_LARGEST_BOOTSTRAP_ROOM),
        }
        of_prefill = {name: value for name, value in of_decode.items() if name != "stream_options"}
        return {**of_prefill, "stream": False}, of_decode

    def registered_name(self, prefill: Server) -> str:
        """Returns the name that the server's bootstrap server announces: another one with every start."""
        return ask(f"{bracketed(urlsplit(prefill.url).hostname or '')}:{prefill.bootstrap_port}").engine


DIALECTS: dict[str, Dialect] = {"vllm": VllmDialect(), "sglang": SglangDialect()}


def _check_is_one_prompt(body: Mapping[str, Any]) -> None:
    """Refuses what servers make several requests of, under the same room."""
    if body.get("best_of") not in (None, 1):
        raise UsageError("best_of: ask for several choices with n instead")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        raise UsageError(f"prompt: {len(prompt)} prompts in one request; send one request for each")

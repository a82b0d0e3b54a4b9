"""Runs `kvferry top`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live

from kvferry.applications.command_line import interruptible
from kvferry.applications.top.asking import Asker, Sample, addresses, present
from kvferry.applications.top.view import page, rates
from kvferry.errors import ConfigurationError
from kvferry.observe.settings import ObserveSettings
from kvferry.settings import Settings

_ONCE_S = 0.5


def run(given: Sequence[str], *, interval_s: float, once: bool, console: Console) -> bool:
    """Shows endpoints until Ctrl-C or SIGTERM, or once.

    Returns:
        Whether anybody answered, at the end.

    Raises:
        ConfigurationError: if there is no address, or one makes no sense.
    """
    port = Settings().of(ObserveSettings).observe_port
    if not given and not port:
        raise ConfigurationError(
            "no address: name the endpoints, such as `kvferry top 9470-9477`; endpoints answer when they are started "
            "with KVFERRY_OBSERVE_PORT"
        )
    asker = Asker(addresses(given) if given else present(int(port or 0)))
    try:
        if once:
            return _once(asker, console)
        return _live(asker, interval_s, console)
    finally:
        asker.close()


def _once(asker: Asker, console: Console) -> bool:
    before = asker.ask()
    time.sleep(_ONCE_S)
    now = asker.ask()
    console.print(page(now, rates(before, now), width=console.width, most_rooms=1000))
    return _anybody(now)


def _live(asker: Asker, interval_s: float, console: Console) -> bool:
    before: list[Sample] = []
    now = asker.ask()
    with (
        suppress(KeyboardInterrupt),
        interruptible(),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as live,
    ):
        while True:
            space = max(3, console.height - len(now) - 8)
            live.update(page(now, rates(before, now), width=console.width, most_rooms=space), refresh=True)
            time.sleep(interval_s)
            before, now = now, asker.ask()
    return _anybody(now)


def _anybody(samples: Sequence[Sample]) -> bool:
    return any(sample.status is not None for sample in samples)

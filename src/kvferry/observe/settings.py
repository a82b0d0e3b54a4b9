"""What shows an endpoint's work, and where: apart from the server, which is not loaded where nothing is served."""

from __future__ import annotations

from pydantic import Field

from kvferry.settings import OwnSettings


class ObserveSettings(OwnSettings):
    """Whether an endpoint's work is shown, and where."""

    observe_host: str = Field("127.0.0.1", description="Address that metrics and status are served on.")
    observe_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve metrics (/metrics), status (/status), health (/health) and probes (/livez, /readyz) on this "
        "port plus the rank's number, or the next that is free; 0 takes any free one. Not served without it. Everyone "
        "who reaches the address may read; who may drain the endpoint, docs/drain.md says.",
    )
    traces: bool = Field(
        False,
        description="Make OpenTelemetry spans of transfers, for the tracer provider that the process has set up; "
        "takes opentelemetry-api. The decode side's context travels to the prefill side.",
    )

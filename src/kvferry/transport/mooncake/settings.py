"""What Mooncake is told: apart from the transport, which is not loaded where it is not chosen."""

from __future__ import annotations

from pydantic import Field

from kvferry.settings import OwnSettings


class MooncakeSettings(OwnSettings):
    """What only Mooncake is told."""

    mooncake_device: str | None = Field(
        None,
        max_length=256,
        pattern=r"^[A-Za-z0-9._,-]+$",
        description="The RDMA devices that Mooncake uses, separated by commas, such as mlx5_0,mlx5_1. By default all, "
        "or TCP where there is none.",
    )

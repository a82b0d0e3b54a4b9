"""What NIXL is told."""

from __future__ import annotations

from pydantic import Field

from kvferry.settings import OwnSettings


class NixlSettings(OwnSettings):
    """What only NIXL is told."""

    nixl_backend: str = Field("UCX", description="NIXL's backend.")
    nixl_sgl: bool = Field(
        False,
        description="Hand UCX the descriptors of a direct write as a list (NIXL_UCX_SGL_ENABLE) instead of one by one, "
        "which it may copy in batches between GPUs and over RDMA; of the prefill side, refused where NIXL cannot. "
        "docs/gpu.md.",
    )
    nixl_device: str | None = Field(
        None,
        max_length=256,
        pattern=r"^[A-Za-z0-9._:@-]+$",
        description="The network device that NIXL uses, as UCX calls it, such as mlx5_0:1 or eth0; all leaves it to "
        "UCX and UCX_NET_DEVICES. By default lo as long as host and the registry are on loopback; the interface that "
        "has host's address, or leads to the registry, where there is neither an RDMA device nor UCX_NET_DEVICES; else "
        "all.",
    )

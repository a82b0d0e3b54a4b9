"""Which weights an engine has by now, where they were replaced while it runs, by what they are.

vLLM replaces them in many ways (`reload_weights`, `update_weights`, methods of a trainer's own that it calls in every
worker), and few of them name what they bring. So the parameters themselves are asked, once such a call is over: of each
of them the sum of its numbers' bits, which is read as fast as memory is, does not depend on the order in which kernels
keep it, and adds up over the ranks that divide it. What a trainer changes changes sums; two servers with equal weights
have equal ones, however many ranks they have, as long as they quantise alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from kvferry.errors import ModelError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a number, what its bits are read as."""

_HEAD = "lm_head"
"""Caches do not depend on it, and not every pipeline stage has it."""

_CACHE_SCALES = ("_k_scale", "_v_scale")
"""By which vLLM's attention layers quantise what they cache: buffers, and no parameters."""

_BASE_LAYER = ".base_layer."
"""What an engine that may have adapters puts into its parameters' names."""


def parameter_sums(worker: Any) -> dict[str, int] | str:
    """Returns the sums of a worker's parameters, by name, or why there are none, as in the middle of an update.

    vLLM calls it in each of them. Were one to raise, it would leave what the others answer, and take that for the
    answers to its next question.
    """
    try:
        return _sums(worker)
    except Exception as error:  # a model's, whatever it is
        return f"{type(error).__name__}: {error}"


def _sums(worker: Any) -> dict[str, int]:
    parallel = worker.vllm_config.parallel_config
    # Then ranks of other engines have the other experts, or copies move while the engine runs.
    skips_experts = parallel.enable_expert_parallel and (parallel.data_parallel_size > 1 or parallel.enable_eplb)
    with torch.no_grad():
        sums = {
            name: _sum(tensor)
            for name, tensor in _parameters(worker.get_model())
            if _HEAD not in name and not (skips_experts and ".experts." in name)
        }
        if not sums:
            return {}
        device = next(iter(sums.values())).device  # others may be kept in the host's memory
        return dict(zip(sums, torch.stack([each.to(device) for each in sums.values()]).tolist(), strict=True))


def content_of(ranks: Iterable[Mapping[str, int] | str]) -> str:
    """Returns what the weights of a model are whose ranks have these sums.

    Ranks that have the same of a parameter have copies of it; those that have not divide it.

    Raises:
        ModelError: if a rank has none.
    """
    found: dict[str, set[int]] = {}
    for sums in ranks:
        if isinstance(sums, str):
            raise ModelError(sums)
        for name, value in sums.items():
            found.setdefault(name, set()).add(value)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(found):
        digest.update(f"{name}\0{sum(found[name]) % (1 << 64)}\0".encode())
    return digest.hexdigest()


class WeightsVersion:
    """Says which weights an engine has: nothing as long as they are those of its start."""

    def __init__(self) -> None:
        """Begins with those of the start, whatever they are."""
        self._first: str | None = None
        self._now: str | None = None
        self._name: str | None = None
        self._mixed = ""

    @property
    def is_known(self) -> bool:
        """Whether anybody has looked at them."""
        return self._now is not None

    @property
    def text(self) -> str:
        """What a request's cache depends on: a name that was given to the weights, else what they are."""
        if self._mixed:
            return self._mixed
        if self._name is not None:
            return f"named {self._name}"
        return "" if self._now == self._first else f"content {self._now}"

    def found(self, content: str) -> bool:
        """Takes what the weights are. Returns whether they have changed."""
        if self._now is None:
            self._first = self._now = content
        has_changed = content != self._now
        if has_changed:
            self._now, self._name = content, None
        return has_changed

    def lost(self) -> None:
        """Takes that nobody knows what the weights are: they are like no others until somebody has looked."""
        self._first = self._first or "not looked at"
        self._now, self._name = f"unknown {uuid4().hex}", None

    @property
    def are_mixed(self) -> bool:
        """Whether caches that others have computed may be taken for theirs: then they are like no others."""
        return bool(self._mixed)

    @are_mixed.setter
    def are_mixed(self, are_mixed: bool) -> None:
        self._mixed = f"unknown {uuid4().hex}" if are_mixed else ""

    def named(self, name: str) -> None:
        """Takes what the weights are called that are there now. Whoever names others so says that they are the same."""
        self._name = name


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what a model's parameters are by name, and its caches' scales; of queries, keys and values in one, the
    queries apart.

    Where there are more ranks than KV heads, some have copies of keys and values, and none of queries.
    """
    for module_name, module in model.named_modules():
        queries = getattr(module, "num_heads", 0) * getattr(module, "head_size", 0)
        has_copies = hasattr(module, "num_kv_head_replicas") and queries > 0
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{own_name}".replace(_BASE_LAYER, ".")
            tensor = parameter.detach()
            if has_copies and tensor.ndim > 0 and tensor.shape[0] > queries:
                yield f"{name} of queries", tensor[:queries]
                yield f"{name} of keys and values", tensor[queries:]
            else:
                yield name, tensor
        for own_name, scale in module.named_buffers(recurse=False):
            if own_name in _CACHE_SCALES:
                yield f"{module_name}.{own_name}", scale


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "__tensor_flatten__"):  # one that is made of several, such as numbers and their scales
        return torch.stack([_sum(getattr(tensor, each)) for each in tensor.__tensor_flatten__()[0]]).sum()
    dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).contiguous()
    integers = dense.view(-1).view(_INTEGERS[tensor.element_size()])
    if integers.device.type == "cpu":  # torch takes 15 times as long there
        return torch.tensor(integers.numpy().sum(dtype=np.int64))
    return integers.sum(dtype=torch.int64)

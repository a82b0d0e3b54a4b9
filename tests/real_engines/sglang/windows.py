"""A plug-in of SGLang's for tests, which repairs windows on CPUs.

SGLang's torch_native attention writes the cache of layers with a window at places of their own pool, and reads it at
places of the full pool; and it takes no sinks, which such layers hand over. Both are the engine's own: without this,
tokens of a model with windows prove nothing.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.real_engines import plugins


def install(directory: Path) -> Path:
    """Makes the plug-in findable in a directory, which goes on SGLang's module path; returns it."""
    return plugins.install(directory, "windows", __name__)


def register() -> None:
    """Called by SGLang."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    def repaired(forward: Any) -> Any:
        def forwarding(
            self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> Any:
            assert more.pop("sinks", None) is None
            pool, requests = self.token_to_kv_pool, self.req_to_token_pool
            if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
                return forward(self, q, k, v, layer, batch, save_kv_cache, **more)
            places = pool.translate_loc_from_full_to_swa(requests.req_to_token)
            self.req_to_token_pool = SimpleNamespace(req_to_token=places)
            try:
                return forward(self, q, k, v, layer, batch, save_kv_cache, **more)
            finally:
                self.req_to_token_pool = requests

        return forwarding

    Backend.forward_extend = repaired(Backend.forward_extend)
    Backend.forward_decode = repaired(Backend.forward_decode)

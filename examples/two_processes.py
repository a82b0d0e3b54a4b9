"""One prefill process, one decode process, a cache that crosses between them."""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

import kvferry as kf

PAGES, PAGE_TOKENS, LAYERS, KV_HEADS, HEAD_DIM = 64, 16, 4, 8, 64


def make_pool(fill: float) -> tuple[list[np.ndarray], kf.RankLayout]:
    """A paged pool for K and V, one tensor a layer each, and its description. torch tensors work the same way."""
    tensors, shards = [], []
    for component in kf.attention_components(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float16"
    ):
        layers = [np.full((PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM), fill, np.float16) for _ in range(LAYERS)]
        shards.append(kf.shard_from_tensors(component, layers, dims=("page", "token", "head", "dim")))
        tensors += layers
    return tensors, kf.RankLayout(shards=tuple(shards))


def prefill(decode: Connection) -> None:
    _memory, layout = make_pool(fill=1.5)  # the memory must outlive the endpoint
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0)) as endpoint:
        decode.send(endpoint.registry_url)
        sender = endpoint.open(room=7)
        sender.submit(np.array([3, 1]))  # the first chunk, as soon as it is computed
        sender.submit(np.array([4]), last=True, aux=b"first token: 42")
        sender.wait()


if __name__ == "__main__":
    url, decode = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(decode,))
    process.start()
    decode.close()  # so that a prefill process that dies ends the wait below
    tensors, layout = make_pool(fill=0.0)
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=url.recv())) as endpoint:
        receiver = endpoint.open(room=7, pages=np.array([60, 20, 33]))
        receiver.wait()
        arrived = [bool((tensor[[60, 20, 33]] == 1.5).all()) for tensor in tensors]
        print(receiver.aux.decode(), "- tensors that arrived:", sum(arrived))
    process.join()

"""What an idle pair of endpoints costs: two processes over NIXL that have exchanged a room and then wait.

Prints the CPU time of each process over ten seconds, as a share of one core.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.synchronize
import time

import numpy as np

import kvferry as kf

SECONDS = 10.0


def pool() -> tuple[list[np.ndarray], kf.RankLayout]:
    """Two layers in 64 pages: the memory, which must outlive the endpoint, and its layout."""
    components = kf.attention_components(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32")
    shards, memory = [], []
    for component in components:
        tensors = [np.zeros((64, 16, 2, 64), np.float32) for _ in range(2)]
        memory += tensors
        shards.append(kf.shard_from_tensors(component, tensors, dims=("page", "token", "head", "dim")))
    return memory, kf.RankLayout(shards=tuple(shards))


def cpu_share() -> float:
    """This process's CPU time over the next seconds, in percent of a core."""
    before = time.process_time()
    time.sleep(SECONDS)
    return 100 * (time.process_time() - before) / SECONDS


def prefill(connection: multiprocessing.connection.Connection) -> None:
    """Sends one room, then idles."""
    memory, layout = pool()
    with kf.PrefillEndpoint(layout, settings=kf.Settings(registry_port=0)) as endpoint:
        connection.send(endpoint.registry_url)
        sender = endpoint.open(1)
        sender.submit(np.arange(8), last=True)
        sender.wait(30)
        connection.recv()
        connection.send(cpu_share())
        connection.recv()
    del memory


def decode(connection: multiprocessing.connection.Connection) -> None:
    """Receives one room, then idles."""
    memory, layout = pool()
    with kf.DecodeEndpoint(layout, settings=kf.Settings(registry_url=connection.recv())) as endpoint:
        endpoint.open(1, np.arange(8)).wait(30)
        connection.send(None)
        connection.recv()
        connection.send(cpu_share())
        connection.recv()
    del memory


def main() -> None:
    """Prints both shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    is_json = parser.parse_args().json
    context = multiprocessing.get_context("spawn")
    (ours_p, theirs_p), (ours_d, theirs_d) = context.Pipe(), context.Pipe()
    processes = [context.Process(target=prefill, args=(theirs_p,)), context.Process(target=decode, args=(theirs_d,))]
    for process in processes:
        process.start()
    for connection in (theirs_p, theirs_d):
        connection.close()
    ours_d.send(ours_p.recv())
    ours_d.recv()
    time.sleep(1.0)  # let the last messages settle
    for connection in (ours_p, ours_d):
        connection.send(None)
    shares = ours_p.recv(), ours_d.recv()
    if is_json:
        print(json.dumps({"seconds": SECONDS, "prefill_percent": shares[0], "decode_percent": shares[1]}))
    else:
        print(f"idle for {SECONDS:g} s: prefill (with registry) {shares[0]:.2f} %, decode {shares[1]:.2f} % of a core,")
        print(f"the pair {sum(shares):.2f} %")
    for connection in (ours_p, ours_d):
        connection.send(None)
    for process in processes:
        process.join(30)


if __name__ == "__main__":
    main()

"""Peak memory of a federation in which everyone keeps a whole model: 1,000 clients, a million parameters each.

    python benchmarks/memory.py [--clients 1000]

One round with everyone, an evaluation of everyone, and a checkpoint; then the process's peak resident memory.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cohort import federation_of
from tailorfl.cohort import Engine
from tailorfl.federation.checkpoint import Checkpoint, save_checkpoint
from tailorfl.federation.in_process import InProcess
from tailorfl.methods.local import Local
from tailorfl.models import Network, build_module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    clients = parser.parse_args().clients
    device, shape = torch.device("cpu"), (1, 28, 28)
    network = Network(build_module("mlp", shape, 10, hidden=[1258]), "mlp", device)
    data = federation_of(np.full(clients, 20), shape, device)
    method = Local(local_epochs=1)
    federation = InProcess(method, network, data, Engine(device), seed=0, rounds=1)
    server, start = method.start(network), time.perf_counter()
    method.aggregate(server, federation.train(1, federation.trainable, method.broadcast(server)), network)
    federation.evaluate(1, federation.trainable, method.broadcast(server), ("test",))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), Checkpoint(1, server, federation.store.flat()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{clients:,} clients, {network.size():,} parameters each: peak {peak:.2f} GiB, of which personal models "
          f"{clients * network.size() * 4 / 2**30:.2f} GiB; {time.perf_counter() - start:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()

"""What a round of PFLEGO costs as tau grows, beside FedPer, whose every step goes through the whole network.

    python benchmarks/pflego.py [--device cuda] [--tau 5 50 500] [--clients N] [--samples N] [--network NAME]
    python benchmarks/pflego.py --table3 [--device cuda] [--clients N] [--samples N]

Both train everyone on all data a step: FedPer for tau steps, PFLEGO for tau - 1 steps of the head, on features that are
computed once, and one of all. ``--table3`` times the seven methods of the paper's table 3 at tau = 50, a fifth of the
clients a round, and prints the paper's seconds beside ours. Those are of other machines and other programs: compare the
multiples of PFLEGO's.

All figures of a table come from one process on one machine. Each is the best of a few repeats, after a first run that
is not counted. Images are noise. Where no sizes are given, a GPU has 10 clients (50 for the table) of 480 images, about
what an alphabet of Omniglot leaves for training; a CPU has 4 of 80 (50 of 24 for the table), which takes minutes.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from cohort import best, federation_of
from tailorfl.cohort import Engine
from tailorfl.data.federated import FederatedData
from tailorfl.federation.in_process import InProcess
from tailorfl.federation.rounds import RoundLoop
from tailorfl.methods.ditto import Ditto
from tailorfl.methods.fedavg import FedAvg
from tailorfl.methods.fedbabu import FedBABU
from tailorfl.methods.fedper import FedPer
from tailorfl.methods.fedprox import FedProx
from tailorfl.methods.fedrep import FedRep
from tailorfl.methods.method import Method
from tailorfl.methods.pflego import PFLEGO
from tailorfl.models import Network, build_module

NETWORKS = {"pflego-omniglot": ((1, 28, 28), 55), "pflego-cnn": ((3, 32, 32), 10), "mlp": ((1, 28, 28), 10)}
ROUNDS = 1000  # more than are ever run
TAU, SHARE = 50, 0.2  # of table 3
TABLE3 = {
    "FedRep": 10.571,
    "FedBabu": 16.814,
    "FedProx": 18.632,
    "Ditto": 26.105,
    "FedPer": 14.436,
    "FedAvg": 16.553,
    "PFLEGO": 7.024,
}  # seconds a round, as published


def made_data(clients: int, samples: int, shape: tuple[int, ...], classes: int, device: torch.device) -> FederatedData:
    """Clients of equal size with images of any class."""
    data = federation_of(np.full(clients, samples), shape, device)
    targets = torch.randint(0, classes, data.targets.shape, generator=torch.Generator().manual_seed(1))
    return replace(data, targets=targets.to(device), classes=tuple(map(str, range(classes))))


def round_of(
    method: Method, network: Network, data: FederatedData, engine: Engine, share: float = 1.0
) -> Callable[[], object]:
    """A round with this share of the clients, and no evaluation; the same clients for every method."""
    federation = InProcess(method, network, data, engine, seed=0, rounds=ROUNDS)

    def select(number: int) -> list[int]:
        count = max(1, round(share * data.clients))
        return sorted(np.random.default_rng(number).choice(data.clients, count, replace=False).tolist())

    loop = RoundLoop(
        method,
        network,
        federation,
        method.start(network),
        ROUNDS,
        select=select,
        evaluate_in=lambda number: False,
        share=lambda number: share,
    )
    rounds = loop.run()
    return lambda: next(rounds)


def table3_methods() -> dict[str, Method]:
    """As the paper's appendix sets them, where it does: FedRep trains the body for 5 steps after its head."""
    steps, whole = {"local_epochs": TAU, "batch_size": 0, "momentum": 0.0}, {"batch_size": 0, "momentum": 0.0}
    return {
        "FedRep": FedRep(head_epochs=TAU - 5, local_epochs=5, **whole),
        "FedBabu": FedBABU(**steps),
        "FedProx": FedProx(mu=0.25, **steps),
        "Ditto": Ditto(lam=0.5, **steps),
        "FedPer": FedPer(**steps),
        "FedAvg": FedAvg(**steps),
        "PFLEGO": PFLEGO(tau=TAU),
    }


def flatness(network: Network, data: FederatedData, taus: Sequence[int], repeats: int) -> None:
    """PFLEGO and FedPer at each tau."""
    engine = Engine(network.device)  # one for all: on a GPU its graphs hold much memory
    works: dict[str, Callable[[], object]] = {}
    for tau in taus:
        fedper = FedPer(local_epochs=tau, batch_size=0, momentum=0.0)
        works[f"PFLEGO {tau}"] = round_of(PFLEGO(tau=tau), network, data, engine)
        works[f"FedPer {tau}"] = round_of(fedper, network, data, engine)
    times = best(works, repeats)
    print(f"{'tau':>6}{'PFLEGO':>13}{'FedPer':>13}{f'PFLEGO, to tau {taus[0]}':>22}{'FedPer, to PFLEGO':>21}")
    for tau in taus:
        ours, theirs = times[f"PFLEGO {tau}"], times[f"FedPer {tau}"]
        print(f"{tau:6d}{ours:11.4f} s{theirs:11.4f} s", end="")
        print(f"{ours / times[f'PFLEGO {taus[0]}']:16.2f} times{theirs / ours:15.2f} times", flush=True)


def table3(network: Network, data: FederatedData, repeats: int) -> None:
    """The seven methods of the paper's table 3, each with a fifth of the clients a round."""
    engine = Engine(network.device)
    works = {name: round_of(method, network, data, engine, SHARE) for name, method in table3_methods().items()}
    measured = best(works, repeats)
    print(f"{'tau ' + str(TAU):<10}{'measured':>12}{'published':>12}{'measured, to PFLEGO':>22}{'published':>14}")
    for name, published in TABLE3.items():
        print(f"{name:<10}{measured[name]:10.4f} s{published:10.3f} s", end="")
        print(f"{_times(measured, name):16.2f} times{_times(TABLE3, name):8.2f} times", flush=True)


def _times(seconds: Mapping[str, float], name: str) -> float:
    return seconds[name] / seconds["PFLEGO"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tau", type=int, nargs="+", default=[5, 50, 500])
    parser.add_argument("--clients", type=int)
    parser.add_argument("--samples", type=int, help="training images of a client")
    parser.add_argument("--network", default="pflego-omniglot", choices=list(NETWORKS))
    parser.add_argument("--table3", action="store_true", help="the methods of the paper's table 3 instead")
    parser.add_argument("--repeats", type=int, default=2)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    gpu = device.type == "cuda"
    clients = chosen.clients or (50 if chosen.table3 else 10 if gpu else 4)
    samples = chosen.samples or (480 if gpu else 24 if chosen.table3 else 80)
    shape, classes = NETWORKS[chosen.network]
    torch.manual_seed(0)
    network = Network(build_module(chosen.network, shape, classes), chosen.network, device)
    data = made_data(clients, samples, shape, classes, device)
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    part = f"{SHARE:.0%} of them" if chosen.table3 else "all"
    print(f"{name}; torch {torch.__version__}; {chosen.network}, {clients} clients of {samples} images, {part} a round")
    if chosen.table3:
        table3(network, data, chosen.repeats)
    else:
        flatness(network, data, sorted(set(chosen.tau)), chosen.repeats)


if __name__ == "__main__":
    main()

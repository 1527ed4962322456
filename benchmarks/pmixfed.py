"""What a round of pMixFed costs beside one of FedAvg: mixing, and two tests of a model on validation data.

    python benchmarks/pmixfed.py [--device cuda] [--clients N] [--samples N] [--network NAME] [--epochs N]

All methods train the same clients, all of them, on the same training images; a tenth of a client's images is for
validation. The settings are the paper's: Adam, 4 local epochs, batches of 32. FedAlt and FedSim keep the upper half of
the network. FedAlt trains the two halves in turn, for 4 epochs each. The multiples of FedAvg's round are printed beside
those of the paper's table 8, which is of MobileNet on CIFAR-100; its seconds are of another machine and program.

All figures come from one process on one machine, taken in turns. Each is the best of a few repeats, after a first round
that is not counted. Images are noise. Where no sizes are given, a GPU has 10 clients of 500 images, as many as CIFAR-10
leaves each of 100, a CPU 4 of 160.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
from pflego import made_data, round_of

from cohort import best
from tailorfl.cohort import Engine
from tailorfl.data import Ragged
from tailorfl.data.federated import FederatedData
from tailorfl.methods.fedalt import FedAlt
from tailorfl.methods.fedavg import FedAvg
from tailorfl.methods.fedsim import FedSim
from tailorfl.methods.method import Method
from tailorfl.methods.pmixfed import PMixFed
from tailorfl.models import Network, build_module

SHAPE, CLASSES = (3, 32, 32), 10
PERSONAL = {"pmixfed-cnn": 3, "mobilenet": 8}  # layers of FedAlt and FedSim
VALIDATION, ROUNDS = 0.1, 50
TABLE8 = {
    "FedAvg": (94.16, 95.31),
    "FedAlt": (94.75, 92.86),
    "FedSim": (95.72, 91.43),
    "pMixFed": (100.03, 98.48),
}  # seconds a round with 100 and with 10 clients, as published


def with_validation(data: FederatedData) -> FederatedData:
    """The same clients, the last tenth of whose training images is for validation."""
    rows = [data.train.of(client).numpy() for client in range(data.clients)]
    kept = [len(own) - max(1, round(VALIDATION * len(own))) for own in rows]
    train = Ragged.from_lists([own[:count] for own, count in zip(rows, kept, strict=True)])
    validation = Ragged.from_lists([own[count:] for own, count in zip(rows, kept, strict=True)])
    return replace(data, train=train, validation=validation)


def methods_of(network: str, epochs: int) -> dict[str, Method]:
    """Those of table 8."""
    training: dict[str, Any] = {"optimizer": "adam", "lr": 0.001, "local_epochs": epochs, "batch_size": 32}
    return {
        "FedAvg": FedAvg(**training),
        "FedAlt": FedAlt(personal_layers=PERSONAL[network], **training),
        "FedSim": FedSim(personal_layers=PERSONAL[network], **training),
        "pMixFed": PMixFed(horizon=ROUNDS, **training),
    }


def table8(network: Network, data: FederatedData, epochs: int, repeats: int) -> None:
    """Seconds a round, and how many times FedAvg's that is, measured and published."""
    engine = Engine(network.device)
    works = {name: round_of(method, network, data, engine) for name, method in methods_of(network.name, epochs).items()}
    measured = best(works, repeats)
    print(f"{'':<10}{'a round':>12}{'to FedAvg':>18}{'published, N = 100':>22}{'N = 10':>16}")
    for name, published in TABLE8.items():
        ratios = [seconds / base for seconds, base in zip(published, TABLE8["FedAvg"], strict=True)]
        print(f"{name:<10}{measured[name]:10.4f} s{measured[name] / measured['FedAvg']:12.3f} times", end="")
        print(f"{ratios[0]:16.3f} times{ratios[1]:10.3f} times", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, help="clients, all of whom take part in a round")
    parser.add_argument("--samples", type=int, help="images of a client, a tenth of them for validation")
    parser.add_argument("--network", default="pmixfed-cnn", choices=list(PERSONAL))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    gpu = device.type == "cuda"
    clients, samples = chosen.clients or (10 if gpu else 4), chosen.samples or (500 if gpu else 160)
    torch.manual_seed(0)
    network = Network(build_module(chosen.network, SHAPE, CLASSES), chosen.network, device)
    data = with_validation(made_data(clients, samples, SHAPE, CLASSES, device))
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {chosen.network}, {clients} clients of {samples} images, all a round")
    table8(network, data, chosen.epochs, chosen.repeats)


if __name__ == "__main__":
    main()

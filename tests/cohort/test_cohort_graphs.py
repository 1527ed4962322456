"""CUDA graphs compute what step-by-step training computes."""

import gc
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_cohorts import close, make_cohort
from torch import Tensor, nn

from tailorfl.cohort import Engine, graphs
from tailorfl.cohort.gradients import stacked_gradients
from tailorfl.cohort.graphs import GraphCache, _captured, _key, _load, _static_copy, roomy
from tailorfl.cohort.objective import Batch, Client, cross_entropy
from tailorfl.cohort.training import Training
from tailorfl.data import Augmentation

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
UNEQUAL = [23, 12, 12, 7, 1]


@given(st.integers(1, 100_000), st.sampled_from([1, 2, 8]))
def test_room_is_enough_and_an_eighth_or_a_half_too_much_at_most(number, sizes):
    assert number <= roomy(number, sizes) <= (1 + 1 / sizes) * number
    assert roomy(roomy(number, sizes), sizes) == roomy(number, sizes)
    assert len({roomy(n, sizes) for n in range(129, 257)}) == sizes


def on_gpu(cohort):
    device = torch.device("cuda")
    cohort.engine = Engine(device, cohort.engine.mode)
    cohort.network.__class__.__init__(cohort.network, cohort.network.module, "net", device)
    cohort.data = cohort.data.to(device)
    cohort.values = {name: tensor.to(device) for name, tensor in cohort.values.items()}
    cohort.__post_init__()
    return cohort


@needs_gpu
@pytest.mark.parametrize("mode", ["stacked", "one-by-one"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("network", ["mlp", "cnn", "stride-cnn"])
def test_graphs_equal_the_cpu_over_several_rounds(network, optimizer, mode):
    options = {"shape": (3, 16, 16), "batch_size": 5, "local_epochs": 2, "optimizer": optimizer, "lr": 0.001,
               "augmentation": Augmentation.parse("flip,crop2"), "weight_decay": 0.01}  # fmt: skip
    cpu = make_cohort(UNEQUAL, network, "one-by-one", **options)
    gpu = on_gpu(make_cohort(UNEQUAL, network, mode, **options))
    for number in (1, 2) if network != "stride-cnn" else (1,):  # batch norm magnifies rounding
        cpu.round = gpu.round = number
        losses = cpu.fit(), gpu.fit().cpu()
        assert torch.allclose(*losses, atol=1e-9)
    assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)


def fragile(client: Client, batch: Batch) -> Tensor:
    return cross_entropy(client, batch) / batch.valid.sum()


@needs_gpu
def test_clients_that_have_finished_are_safe_from_what_an_objective_makes_of_an_empty_batch():
    cpu = make_cohort(UNEQUAL, "mlp", "one-by-one", batch_size=4)
    gpu = on_gpu(make_cohort(UNEQUAL, "mlp", "stacked", batch_size=4))
    losses = cpu.fit(fragile), gpu.fit(fragile).cpu()
    assert torch.allclose(*losses, atol=1e-9)
    assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)


class Asking(nn.Module):
    """Asks for a value on the host, which neither a stack nor a graph can give."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) * (2.0 if x.abs().max().item() > 0 else 1.0)


@needs_gpu
def test_a_network_that_cannot_be_captured_still_trains():
    cpu, gpu = make_cohort(UNEQUAL, Asking()), on_gpu(make_cohort(UNEQUAL, Asking()))
    gpu.values = {name: tensor.cuda() for name, tensor in cpu.values.items()}
    cpu.fit()
    gpu.fit()
    assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)


def asking(client: Client, batch: Batch) -> Tensor:
    """Makes a tensor on the host, which a graph cannot take from there, and a stack can."""
    return cross_entropy(client, batch) * torch.tensor([2.0, 3.0]).to(batch.valid).sum()


@needs_gpu
def test_an_objective_that_cannot_be_captured_still_trains_a_stack():
    cpu, gpu = make_cohort(UNEQUAL, "mlp", "stacked"), on_gpu(make_cohort(UNEQUAL, "mlp", "stacked"))
    for objective in (asking, cross_entropy):  # and nothing is left of the capture that broke off
        assert torch.allclose(cpu.fit(objective), gpu.fit(objective).cpu(), atol=1e-9)
        assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)
    assert len(gpu.engine.graphs.programs) == len(gpu.engine._uncaptured) == 1, "the second one is captured"
    assert Engine(gpu.engine.device).memory > 0, "the next run finds what is free"


@needs_gpu
@pytest.mark.parametrize("batch_size", [0, 5])
@pytest.mark.parametrize("network", ["cnn", "ppfe-cnn"])
def test_single_precision_for_which_a_stack_has_kernels(network, batch_size, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    options = {"shape": (3, 16, 16), "dtype": torch.float32, "local_epochs": 2, "lr": 0.01, "batch_size": batch_size}
    cpu = make_cohort(UNEQUAL, network, "one-by-one", **options)
    gpu = on_gpu(make_cohort(UNEQUAL, network, "stacked", **options))
    assert torch.allclose(cpu.fit(), gpu.fit().cpu(), rtol=1e-3)
    assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-3)


@needs_gpu
def test_a_width_that_is_captured_after_a_run_that_filled_its_room():
    cpu = make_cohort([23, 23, 23, 12, 1], "mlp", "one-by-one", batch_size=4)
    gpu = on_gpu(make_cohort([23, 23, 23, 12, 1], "mlp", "stacked", batch_size=4))
    gpu.of([0, 1, 2]).fit()
    part, expected = gpu.of([2, 3, 4]), cpu.of([2, 3, 4])
    assert torch.allclose(part.fit().cpu(), expected.fit(), atol=1e-9)
    assert close(expected.values, {name: tensor.cpu() for name, tensor in part.values.items()}, 1e-9)


@needs_gpu
@pytest.mark.parametrize("augment", ["none", "flip,crop2,once"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_full_batches_and_heads_on_cached_features_are_the_same_there(network, augment):
    options = {"shape": (3, 16, 16), "batch_size": 0, "local_epochs": 3, "lr": 0.05, "own_classes": True,
               "augmentation": Augmentation.parse(augment) or None}  # fmt: skip
    cpu = make_cohort(UNEQUAL, network, "one-by-one", **options)
    gpu = on_gpu(make_cohort(UNEQUAL, network, "stacked", **options))
    for number in (1, 2):
        cpu.round = gpu.round = number
        assert torch.allclose(cpu.fit(), gpu.fit().cpu(), atol=1e-9)
        for cohort in (cpu, gpu):
            features = cohort.features()
            cohort.head(features).fit(inputs=features, steps=7, batch_size=0, purpose="head")
            cohort.fit(train=cohort.network.layers[-1].parameters, purpose="head alone")
    found = cpu.gradient()[0], {name: tensor.cpu() for name, tensor in gpu.gradient()[0].items()}
    assert close(*found, 1e-9)
    assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)


@pytest.mark.parametrize(
    ("batch_size", "own_classes", "augment"),
    [
        (0, True, ""),
        (0, False, ""),
        (5, True, ""),
        (0, False, "rotate"),
        (0, False, "rotate,once"),
        (5, True, "flip,once"),
    ],
)
def test_tensors_with_room_train_like_those_without(batch_size, own_classes, augment, monkeypatch):
    """What graphs replay, without graphs: the steps of a training that was laid into a larger one's place."""
    sizes = []

    def in_larger_tensors(engine: Engine, training: Training) -> None:
        static = _static_copy(training)
        sizes.append((training.batches.targets.shape[2], static.batches.targets.shape[2]))
        assert static.batches.tensors().keys() == training.batches.tensors().keys()
        for tensor in static.batches.tensors().values():
            tensor.fill_(1)  # what an earlier, larger cohort has left
        _load(static, training)
        gradients = stacked_gradients(training.network, training.objective)
        static.run(lambda active: static.step(min(roomy(active), len(training.samples.rows)), gradients))
        for name, tensor in training.values.items():
            tensor.copy_(static.values[name][: len(tensor)])
        training.loss.copy_(static.loss[: len(training.loss)])

    counts = [*[45] * 8, 33, 9]
    options = {"batch_size": batch_size, "local_epochs": 3, "lr": 0.05, "own_classes": own_classes}
    options["augmentation"] = Augmentation.parse(augment)
    plain, roomier = (make_cohort(counts, "mlp", "stacked", **options) for _ in range(2))
    losses = [plain.fit()]
    monkeypatch.setattr(Engine, "run", in_larger_tensors)
    losses.append(roomier.fit())
    assert torch.allclose(*losses, atol=1e-10)
    assert close(plain.values, roomier.values)
    assert sizes == [(45, 48) if batch_size == 0 else (5, 5)]


def test_steps_on_cached_features_have_more_room_and_train_the_same(monkeypatch):
    """There are few sizes of these, so that few graphs serve cohorts that are all different."""
    keys = []

    def in_larger_tensors(engine: Engine, training: Training) -> None:
        keys.append(_key(training)[2])
        static = _static_copy(training)
        for tensor in (*static.values.values(), *static.batches.tensors().values(), static.samples.inputs):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)  # what an earlier, larger cohort has left
        _load(static, training)
        gradients = stacked_gradients(training.network, training.objective)
        static.run(lambda active: static.step(len(static.loss), gradients))
        for name, tensor in training.values.items():
            tensor.copy_(static.values[name][: len(tensor)])
        training.loss.copy_(static.loss[: len(training.loss)])

    for counts in ([45] * 8 + [33], [39] * 10 + [9]):
        both = [make_cohort(counts, "mlp", "stacked", own_classes=True, lr=0.05) for _ in range(2)]
        losses = []
        for cohort in both:
            features = cohort.features()
            with monkeypatch.context() as patch:
                if cohort is both[1]:
                    patch.setattr(Engine, "run", in_larger_tensors)
                losses.append(cohort.head(features).fit(inputs=features, steps=3, batch_size=0, purpose="head"))
        assert torch.allclose(*losses, atol=1e-10)
        assert close(both[0].values, both[1].values)
    assert keys == [(1, 12, 48, 48)] * 2


@needs_gpu
def test_cohorts_of_other_sizes_share_a_program_for_steps_on_cached_features():
    engine = Engine(torch.device("cuda"), "stacked")
    for counts in ([45] * 10 + [33, 5], [39] * 10 + [9], [45] * 9):
        cpu = make_cohort(counts, "mlp", "stacked", own_classes=True, lr=0.05)
        gpu = on_gpu(make_cohort(counts, "mlp", "stacked", own_classes=True, lr=0.05))
        gpu.engine = engine
        losses = []
        for cohort in (cpu, gpu):
            features = cohort.features()
            losses.append(cohort.head(features).fit(inputs=features, steps=20, batch_size=0, purpose="head").cpu())
        assert torch.allclose(*losses, atol=1e-9)
        assert close(cpu.values, {name: tensor.cpu() for name, tensor in gpu.values.items()}, 1e-9)


# What a cache does around its programs, without a GPU.


@pytest.fixture
def no_device(monkeypatch):
    """What a cache asks of a device that is not there."""
    for name, answer in {"graph_pool_handle": object(), "Stream": None, "empty_cache": None,
                         "mem_get_info": (100, 100), "memory_reserved": 0, "memory_allocated": 0}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class Hungry:
    """A program for which there is memory only where it is alone."""

    made = 0

    def __init__(self, *_: object) -> None:
        Hungry.made += 1

    def __del__(self) -> None:
        Hungry.made -= 1

    def run(self, training: Training) -> None:
        if Hungry.made > 1:
            raise torch.OutOfMemoryError("there is no memory left")


def test_a_program_that_finds_no_memory_is_given_that_of_the_others(no_device, monkeypatch):
    monkeypatch.setattr(graphs, "_Program", Hungry)
    monkeypatch.setattr(graphs, "_key", lambda training: training)
    cache = GraphCache(torch.device("cuda"), room=50)
    cache.run("one", stacked_gradients)
    cache.run("two", stacked_gradients)
    assert list(cache.programs) == [(stacked_gradients, "two")]
    cache.run("two", stacked_gradients)
    assert Hungry.made == 1


def test_where_nothing_can_be_given_up_the_lack_of_memory_is_told(no_device, monkeypatch):
    monkeypatch.setattr(graphs, "_Program", Hungry)
    monkeypatch.setattr(graphs, "_key", lambda training: training)
    outside = Hungry()
    with pytest.raises(torch.OutOfMemoryError):
        GraphCache(torch.device("cuda"), room=50).run("one", stacked_gradients)
    assert outside is not None


def test_nothing_is_collected_during_a_capture_and_one_that_breaks_off_leaves_its_stream(monkeypatch):
    streams = ["default"]

    @contextmanager
    def graph(*_: object, stream: str, **__: object):
        streams.append(stream)
        yield  # torch does not come back to the stream of before where a capture broke off
        streams.pop()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(RuntimeError), _captured(None, None, "capturing"):  # noqa: PT012
        assert not gc.isenabled()
        assert streams[-1] == "capturing"
        raise RuntimeError
    assert streams[-1] == "default"
    assert gc.isenabled()

"""Sources that need no files: scikit-learn's digits, and synthetic federations whose heterogeneity is known."""

import colorsys
from pathlib import Path

import numpy as np
import torch

from tailorfl.data.objects import stack_objects
from tailorfl.data.partition import DEFAULT_CLIENTS
from tailorfl.data.source import Source, SourceOptions
from tailorfl.errors import UserError
from tailorfl.seeding import generator

DIGITS_WHITE = 16  # the largest pixel value in scikit-learn's digits
IMAGE_NOISE, DETECTION_NOISE, REGRESSION_NOISE = 0.25, 0.1, 0.5
SHAPES = ("rectangle", "ellipse", "triangle")
SMALLEST_SHAPE = 4  # pixels


def load_digits(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """1,797 handwritten digits of 8x8 pixels."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / DIGITS_WHITE)).astype(np.uint8)
    return Source(
        name=name,
        kind="image",
        inputs=torch.from_numpy(images).unsqueeze(1),
        targets=torch.from_numpy(digits.target.astype(np.int64)),
        train_size=len(images),
        classes=tuple(map(str, range(10))),
    )


def make_images(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """Noisy copies of one prototype image a class, which clients name differently.

    All clients see the same images. Of its classes each client renames a share ``heterogeneity``, in a cycle of its
    own. A single model must give an image the same name everywhere: on the renamed share it is right for about one
    client in ``classes - 1``, so its best accuracy falls as the share grows, while that of a model a client does not.
    """
    _check_sizes(name, options)
    if not 0 <= options.heterogeneity <= 1:
        raise UserError(f"heterogeneity={options.heterogeneity:g}, allowed: 0 to 1")
    rng = generator(options.seed, name)
    side, samples = options.image_size or 8, options.samples or 100
    noise = IMAGE_NOISE if options.noise is None else options.noise
    prototypes = rng.random((options.classes, side, side))
    clients = options.clients or DEFAULT_CLIENTS
    shown = rng.integers(options.classes, size=(clients, samples))
    images = prototypes[shown] + rng.normal(0, noise, (clients, samples, side, side))
    renamed = np.stack([_renaming(options, rng) for _ in range(clients)])
    targets = np.take_along_axis(renamed, shown, axis=1)
    return Source(
        name=name,
        kind="image",
        inputs=torch.from_numpy((images.clip(0, 1) * 255).round().astype(np.uint8).reshape(-1, 1, side, side)),
        targets=torch.from_numpy(targets.reshape(-1)),
        train_size=targets.size,
        classes=tuple(map(str, range(options.classes))),
        owner=torch.arange(clients).repeat_interleave(samples),
        owners=tuple(map(str, range(clients))),
    )


def _renaming(options: SourceOptions, rng: np.random.Generator) -> np.ndarray:
    """A client's name for each class; the classes renamed at a lower heterogeneity are among those at a higher one."""
    order = rng.permutation(options.classes)
    share = round(options.heterogeneity * options.classes)
    cycle = order[: max(2, share)] if options.heterogeneity > 0 else order[:0]
    names = np.arange(options.classes)
    names[cycle] = np.roll(cycle, -1)
    return names


def make_detection(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """One to three shapes on noise, each in its own quarter; a class is a shape of one colour. Clients are alike."""
    _check_sizes(name, options)
    side, samples = options.image_size or 64, options.samples or 100
    if side < 4 * SMALLEST_SHAPE:
        raise UserError(f"data={name}: image_size={side}, allowed: at least {4 * SMALLEST_SHAPE}")
    rng = generator(options.seed, name)
    clients = options.clients or DEFAULT_CLIENTS
    drawn = [_scene(side, options, rng) for _ in range(clients * samples)]
    return Source(
        name=name,
        kind="image",
        inputs=torch.from_numpy(np.stack([image for image, _ in drawn])),
        targets=stack_objects([objects for _, objects in drawn]),
        train_size=len(drawn),
        classes=tuple(f"{SHAPES[label % len(SHAPES)]} {label}" for label in range(options.classes)),
        owner=torch.arange(clients).repeat_interleave(samples),
        owners=tuple(map(str, range(clients))),
    )


def _scene(side: int, options: SourceOptions, rng: np.random.Generator) -> tuple[np.ndarray, list[list[float]]]:
    """An image, uint8 [3, side, side], and its objects."""
    image = np.full((3, side, side), 0.5)
    half, objects = side // 2, []
    for quarter in rng.permutation(4)[: rng.integers(1, 4)]:
        label = int(rng.integers(options.classes))
        width, height = rng.integers(max(SMALLEST_SHAPE, half // 2), half, 2, endpoint=True)
        left = quarter % 2 * half + rng.integers(half - width + 1)
        top = quarter // 2 * half + rng.integers(half - height + 1)
        colour = np.array(colorsys.hsv_to_rgb(label / options.classes, 1, 1))
        there = image[:, top : top + height, left : left + width]
        there[:] = np.where(_shape(label, height, width), colour[:, None, None], there)
        corners = np.array([left, top, left + width, top + height]) / side
        objects.append([label, *corners.tolist(), 0])
    noise = DETECTION_NOISE if options.noise is None else options.noise
    image += rng.normal(0, noise, image.shape)
    return (image.clip(0, 1) * 255).round().astype(np.uint8), objects


def _shape(label: int, height: int, width: int) -> np.ndarray:
    """The pixels of a class's shape, booleans [height, width]; it touches all four sides."""
    down = (np.arange(height) + 0.5)[:, None] / height - 0.5
    across = (np.arange(width) + 0.5)[None] / width - 0.5
    shape = SHAPES[label % len(SHAPES)]
    if shape == "ellipse":
        return across**2 + down**2 <= 0.25
    # The tip of a triangle is a pixel wide, or two, where they are an even number.
    return np.abs(across) <= (down + 0.5 + 1 / width) / 2 if shape == "triangle" else np.ones((height, width), bool)


def make_regression(name: str, folder: Path | None, options: SourceOptions) -> Source:
    """The linear-regression federation of PPFE, section 6.1.

    x ~ N(0, Sigma_k), y = W_k x + noise (eq. 15), W_k = (1 - r_p) W_g + r_p W_l(k) (eq. 16). Where the paper is
    silent: sigma_g = 1, alpha_k ~ U(0.5, 1.5), and Sigma_k has random axes with variances from U(0.5, 1.5).
    """
    _check_sizes(name, options)
    rng = generator(options.seed, name)
    clients, dimension, samples = options.clients or DEFAULT_CLIENTS, options.dimension, options.samples or 200
    noise = REGRESSION_NOISE if options.noise is None else options.noise
    ratios = _ratios(options, rng)
    shared = rng.normal(size=dimension)
    inputs = np.empty((clients, samples, dimension))
    targets = np.empty((clients, samples))
    for client in range(clients):
        personal = rng.normal(size=dimension) * np.sqrt(rng.uniform(0.5, 1.5))
        weights = (1 - ratios[client]) * shared + ratios[client] * personal
        axes, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
        deviations = np.sqrt(rng.uniform(0.5, 1.5, dimension))
        inputs[client] = (rng.normal(size=(samples, dimension)) * deviations) @ axes.T
        targets[client] = inputs[client] @ weights + rng.normal(0, noise, samples)
    return Source(
        name=name,
        kind="features",
        inputs=torch.from_numpy(inputs.reshape(-1, dimension).astype(np.float32)),
        targets=torch.from_numpy(targets.reshape(-1).astype(np.float32)),
        train_size=targets.size,
        classes=(),
        owner=torch.arange(clients).repeat_interleave(samples),
        owners=tuple(map(str, range(clients))),
    )


def _ratios(options: SourceOptions, rng: np.random.Generator) -> np.ndarray:
    """The personalization ratio r_p of every client."""
    if options.personalization == "mixed":
        return rng.random(options.clients or DEFAULT_CLIENTS)
    if not 0 <= options.personalization <= 1:
        raise UserError(f"personalization={options.personalization:g}, allowed: 0 to 1, or mixed")
    return np.full(options.clients or DEFAULT_CLIENTS, options.personalization)


def _check_sizes(name: str, options: SourceOptions) -> None:
    smallest = {"clients": 1, "samples": 1, "classes": 2, "dimension": 1, "image_size": 2, "noise": 0}
    for option, least in smallest.items():
        value = getattr(options, option)
        if value is not None and value < least:
            raise UserError(f"data={name}: {option}={value}, allowed: at least {least}")

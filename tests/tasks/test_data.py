from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nni_petridish.errors import ConfigError, DataError
from nni_petridish.tasks.vision import kind
from nni_petridish.tasks.vision.data import DATA_NAMES, check_data, describe, load_data
from nni_petridish.tasks.vision.splits import Split, TensorSplit, pixel_statistics

MNIST_FOLDER = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.tobytes())


def write_mnist(root: Path, name: str, train: int = 20, test: int = 6) -> dict[str, np.ndarray]:
    raw = root / MNIST_FOLDER[name] / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(1)
    arrays = {}
    for part, n in (("train", train), ("t10k", test)):
        arrays[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[part + "-labels"] = rng.integers(0, 10, n, dtype=np.uint8)
        write_idx(raw / f"{part}-images-idx3-ubyte", arrays[part])
        write_idx(raw / f"{part}-labels-idx1-ubyte", arrays[part + "-labels"])
    return arrays


def write_cifar(root: Path, name: str, per_file: int = 4) -> dict[str, np.ndarray]:
    if name == "cifar10":
        folder, key = root / "cifar-10-batches-py", "labels"
        files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    else:
        folder, key, files = root / "cifar-100-python", "fine_labels", ["train", "test"]
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2)
    arrays = {}
    for file in files:
        arrays[file] = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = rng.integers(0, 10, per_file).tolist()
        arrays[file + "-labels"] = np.array(labels)
        (folder / file).write_bytes(pickle.dumps({"data": arrays[file], key: labels}, 2))
    return arrays


def write_folder(root: Path, per_class: int = 6) -> None:
    rng = np.random.default_rng(3)
    for part in ("train", "val"):
        for name in ("cat", "dog", "emu"):
            (root / part / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")


def images_of(split: Split) -> torch.Tensor:
    assert isinstance(split, TensorSplit)
    return split.images


def test_digits_parts_are_disjoint_and_complete() -> None:
    from sklearn.datasets import load_digits

    data = load_data("digits")
    parts = [data.train, data.validation, data.test]
    assert [len(part) for part in parts] == [1197, 300, 300]
    rows = torch.cat([torch.cat([images_of(p).flatten(1), p.labels[:, None]], 1) for p in parts])
    digits = load_digits()
    wanted = np.column_stack([digits.images.reshape(-1, 64), digits.target])
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, wanted.tolist()))


def test_the_seed_moves_digits_between_train_and_validation_but_never_the_test_set() -> None:
    a, b, again = load_data("digits"), load_data("digits", seed=1), load_data("digits")
    assert torch.equal(images_of(a.test), images_of(b.test))
    assert not torch.equal(images_of(a.validation), images_of(b.validation))
    assert torch.equal(images_of(a.validation), images_of(again.validation))


def test_validation_zero_trains_on_everything_but_the_test_set() -> None:
    some, everything = load_data("digits"), load_data("digits", validation=0)
    assert len(everything.train) == 1497
    assert not everything.validation
    both = torch.cat([images_of(some.train), images_of(some.validation)])
    assert torch.equal(images_of(everything.train), both)


def test_limit_keeps_the_first_training_images_and_the_same_validation() -> None:
    full, limited = load_data("digits"), load_data("digits", limit=100)
    assert torch.equal(images_of(limited.train), images_of(full.train)[:100])
    assert torch.equal(images_of(limited.validation), images_of(full.validation))
    assert len(load_data("digits", limit=10**6).train) == 1197


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_files_are_read_and_the_last_images_validate(name: str, tmp_path: Path) -> None:
    arrays = write_mnist(tmp_path, name)
    data = load_data(name, tmp_path, validation=5)
    assert np.array_equal(images_of(data.train).numpy()[:, 0], arrays["train"][:-5])
    assert np.array_equal(images_of(data.validation).numpy()[:, 0], arrays["train"][-5:])
    assert np.array_equal(data.validation.labels.numpy(), arrays["train-labels"][-5:])
    assert np.array_equal(images_of(data.test).numpy()[:, 0], arrays["t10k"])


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_pickles_of_unknown_md5_are_read(name: str, tmp_path: Path) -> None:
    arrays = write_cifar(tmp_path, name)
    data = load_data(name, tmp_path, validation=2)
    train = [k for k in arrays if "test" not in k and "labels" not in k]
    images = np.concatenate([arrays[k] for k in train]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([arrays[k + "-labels"] for k in train])
    assert np.array_equal(images_of(data.train).numpy(), images[:-2])
    assert np.array_equal(data.train.labels.numpy(), labels[:-2])
    assert np.array_equal(images_of(data.validation).numpy(), images[-2:])
    assert data.num_classes == int(name.removeprefix("cifar"))


def test_a_smaller_image_size_averages_squares_of_pixels(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    full, half = (load_data("cifar10", tmp_path, validation=2, image_size=s) for s in (None, 16))
    assert half.image_shape == describe("cifar10", image_size=16).image_shape == (3, 16, 16)
    wanted = torch.nn.functional.avg_pool2d(images_of(full.test).double(), 2).round()
    assert torch.equal(images_of(half.test).double(), wanted)
    assert torch.equal(half.train.labels, full.train.labels)
    with pytest.raises(DataError, match="image_size must divide 32, the images' own, but got 12"):
        load_data("cifar10", tmp_path, image_size=12)


def test_an_original_python_2_pickle_can_be_read(tmp_path: Path) -> None:
    # As Python 2 wrote it: text protocol 2 with byte strings and numpy.core.
    write_cifar(tmp_path, "cifar100")
    pixels = bytes(range(256)) * 12
    body = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
        b"U\x01btR(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T\x00\x0c\x00\x00" + pixels + b"tbU\x0bfine_labels]K\x07au."
    )
    for file in ("train", "test"):
        (tmp_path / "cifar-100-python" / file).write_bytes(body)
    data = load_data("cifar100", tmp_path, validation=0)
    assert bytes(images_of(data.test).contiguous().numpy()) == pixels
    assert data.test.labels.tolist() == [7]


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar100")
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, match=r"plain arrays.*mkdir"):
        load_data("cifar100", tmp_path)
    assert not marker.exists()


def test_normalized_training_images_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    data = load_data("cifar10", tmp_path, validation=3)
    images = data.train.normalize(images_of(data.train)).double()
    assert images.mean((0, 2, 3)).abs().max() < 1e-6
    assert (images.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-6
    # One image through the Dataset interface is the same.
    assert torch.equal(data.train[4][0], data.train.normalize(images_of(data.train))[4])
    assert isinstance(data.train[4][1], int)


def test_pixel_statistics_equal_numpys_and_survive_a_constant_channel() -> None:
    images = torch.randint(0, 256, (7, 2, 5, 5), dtype=torch.uint8)
    images[:, 1] = 9
    mean, std = pixel_statistics(images)
    assert mean[0].item() == pytest.approx(images[:, 0].numpy().mean(), rel=1e-6)
    assert std[0].item() == pytest.approx(images[:, 0].numpy().std(), rel=1e-6)
    assert (mean[1].item(), std[1].item()) == (9, 1)


def test_batches_in_order_are_the_split_and_shuffled_ones_a_permutation_of_it() -> None:
    labels = torch.arange(50)
    images = labels.to(torch.uint8)[:, None, None, None].expand(50, 3, 2, 2)
    images = images.contiguous(memory_format=torch.channels_last)
    split = TensorSplit(images, labels, *pixel_statistics(images))
    in_order = list(split.batches(16))
    assert torch.equal(torch.cat([y for _, y in in_order]), labels)
    shuffled = list(split.batches(16, torch.Generator().manual_seed(0)))
    assert [len(y) for _, y in shuffled] == [16, 16, 16]
    seen = torch.cat([y for _, y in shuffled])
    assert len(set(seen.tolist())) == 48
    assert all(torch.equal(x[:, 1, 1, 1].long(), y) for x, y in shuffled)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in shuffled)
    again = torch.cat([y for _, y in split.batches(16, torch.Generator().manual_seed(0))])
    assert torch.equal(seen, again)


def test_a_set_smaller_than_a_batch_is_one_batch() -> None:
    data = load_data("digits", limit=10)
    assert [len(y) for _, y in data.train.batches(32, torch.Generator())] == [10]


def test_an_image_folder_is_read_with_its_classes(tmp_path: Path) -> None:
    write_folder(tmp_path)
    data = load_data("image_folder", tmp_path, validation=4, image_size=16, workers=0)
    assert (data.image_shape, data.num_classes) == ((3, 16, 16), 3)
    assert (len(data.train), len(data.validation), len(data.test)) == (14, 4, 18)
    assert describe("image_folder", tmp_path, 16) == (data.image_shape, data.num_classes)
    assert data.train[0][0].shape == data.train.image_shape == data.image_shape
    # The sorted order would validate on the last class alone.
    assert len({data.validation[i][1] for i in range(4)}) > 1
    images, labels = next(iter(data.train.batches(8, torch.Generator().manual_seed(0))))
    assert (images.dtype, images.shape, len(labels)) == (torch.uint8, (8, 3, 16, 16), 8)
    assert [len(y) for _, y in data.test.batches(8)] == [8, 8, 2]
    # Evaluation is the standard central crop: resize to 8/7, then cut.
    picture = Image.open(tmp_path / "val" / "cat" / "0.png")
    resized = picture.resize((22, 18), Image.Resampling.BILINEAR)
    wanted = np.array(resized)[1:17, 3:19].transpose(2, 0, 1)
    got = next(iter(data.test.batches(8)))[0][0].numpy()
    assert np.abs(got.astype(int) - wanted.astype(int)).max() <= 2


def test_folder_workers_give_the_same_batches_under_one_seed(tmp_path: Path) -> None:
    write_folder(tmp_path, per_class=3)
    data = load_data("image_folder", tmp_path, image_size=8, workers=1)
    runs = [list(data.train.batches(4, torch.Generator().manual_seed(5))) for _ in range(2)]
    for (a, x), (b, y) in zip(*runs, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_no_image_is_named_in_one_line(tmp_path: Path, workers: int) -> None:
    write_folder(tmp_path, per_class=3)
    bad = tmp_path / "val" / "cat" / "1.png"
    bad.write_text("no image")
    data = load_data("image_folder", tmp_path, image_size=8, workers=workers)
    with pytest.raises(DataError, match=r"cat/1\.png cannot be read as an image") as caught:
        list(data.test.batches(4))
    assert "\n" not in str(caught.value)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_text("no image")
    with pytest.raises(DataError, match="must hold images but none can be read, such as"):
        load_data("image_folder", tmp_path, workers=workers)


def test_more_readers_than_cores_are_no_warning(tmp_path: Path) -> None:
    write_folder(tmp_path, per_class=3)
    data = load_data("image_folder", tmp_path, image_size=8, workers=(os.cpu_count() or 1) + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(len(labels) for _, labels in data.test.batches(4)) == len(data.test)


@pytest.mark.parametrize("name", sorted(set(DATA_NAMES) - {"digits", "teacher"}))
def test_a_missing_set_is_one_line_naming_folder_and_remedy(name: str, tmp_path: Path) -> None:
    for call in (check_data, load_data):
        with pytest.raises(DataError) as caught:
            call(name, tmp_path / "nowhere")
        text = str(caught.value)
        assert "\n" not in text
        assert str(tmp_path / "nowhere") in text
        assert "download" in text


def test_the_remedy_names_a_class_that_torchvision_has(tmp_path: Path) -> None:
    from torchvision import datasets

    for name in ("mnist", "fashion_mnist", "cifar10", "cifar100"):
        with pytest.raises(DataError) as caught:
            check_data(name, tmp_path)
        class_name = str(caught.value).split("import ")[1].split(" as")[0]
        # What that class would look for is what is checked here.
        with pytest.raises(RuntimeError, match="not found"):
            getattr(datasets, class_name)(str(tmp_path), download=False)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    assert check_data("cifar10", tmp_path) == tmp_path
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3"):
        check_data("cifar10", tmp_path)


def test_damaged_files_are_data_errors(tmp_path: Path) -> None:
    write_mnist(tmp_path, "mnist")
    images = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        load_data("mnist", tmp_path)
    write_cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps({"data": [1]}))
    with pytest.raises(DataError, match="not a CIFAR folder"):
        load_data("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "imagenet"}, "must be one of digits, mnist, .*got 'imagenet'"),
        ({"name": "digits", "validation": -1}, "validation must be at least 0 but got -1"),
        ({"name": "digits", "validation": 1497}, "validation must be below 1497"),
        ({"name": "digits", "limit": 0}, "limit must be at least 1 but got 0"),
    ],
)
def test_wrong_arguments_are_data_errors(arguments: dict, text: str) -> None:
    with pytest.raises(DataError, match=text):
        load_data(**arguments)


def test_descriptions_match_what_is_loaded(tmp_path: Path) -> None:
    for name in ("mnist", "fashion_mnist"):
        write_mnist(tmp_path, name)
    for name in ("cifar10", "cifar100"):
        write_cifar(tmp_path, name)
    for name in DATA_NAMES:
        if name in ("image_folder", "npz"):
            continue
        data = load_data(name, tmp_path, validation=1)
        assert describe(name) == (data.image_shape, data.num_classes)
        assert data.train[0][0].shape == data.train.image_shape == data.image_shape


def test_importing_the_module_loads_neither_torch_nor_sklearn() -> None:
    code = (
        "import sys, nni_petridish.tasks.vision.data, nni_petridish.tasks.vision.recipe;"
        "print({'torch', 'torchvision', 'sklearn', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stderr


def test_the_old_spelling_of_normalize_works_with_a_warning() -> None:
    split = load_data("digits", limit=8).train
    images = images_of(split)
    with pytest.warns(DeprecationWarning, match="normalize"):
        assert torch.equal(split.normalise(images), split.normalize(images))


def test_small_images_keep_their_size(tmp_path: Path) -> None:
    write_folder(tmp_path)  # 50 x 40
    assert describe("image_folder", tmp_path).image_shape == (3, 40, 40)
    assert load_data("image_folder", tmp_path, workers=0).image_shape == (3, 40, 40)
    large = tmp_path / "large"
    for part in ("train", "val"):
        (large / part / "cat").mkdir(parents=True)
        Image.new("RGB", (300, 280)).save(large / part / "cat" / "0.png")
    assert describe("image_folder", large).image_shape == (3, 224, 224)
    assert describe("image_folder", large, 64).image_shape == (3, 64, 64)


def test_a_configuration_names_the_size_of_small_images_and_too_much_validation(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path)
    given = {"name": "image_folder", "root": str(tmp_path), "validation": 4}
    assert kind.read_data(given, tmp_path)["image_size"] == 40
    assert kind.read_data({**given, "image_size": 8}, tmp_path)["image_size"] == 8
    with pytest.raises(ConfigError, match=r"data\.validation must be below 18 .*but got 10000"):
        kind.read_data({**given, "validation": 10000}, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.validation must be below 1497"):
        kind.read_data({"name": "digits", "validation": 1497}, tmp_path)
    with pytest.raises(ConfigError, match="val is the test set"):
        kind.read_data({"name": "image_folder", "root": str(tmp_path)}, tmp_path)


def write_npz(path: Path, **changes: object) -> Path:
    numbers = np.random.default_rng(0)
    arrays = {
        "x_train": numbers.integers(0, 256, (30, 9, 8, 3), dtype=np.uint8),
        "y_train": np.arange(30) % 3,
        "x_test": numbers.integers(0, 256, (6, 9, 8, 3), dtype=np.uint8),
        "y_test": np.arange(6) % 3,
        **changes,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_an_npz_file_is_read_with_its_classes(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", classes=np.array(["cat", "dog", "emu"]))
    data = load_data("npz", path)
    assert (data.image_shape, data.classes) == ((3, 9, 8), ("cat", "dog", "emu"))
    assert (len(data.train), len(data.validation), len(data.test)) == (27, 3, 6)
    assert describe("npz", path) == (data.image_shape, data.num_classes)
    stored = np.load(path)
    assert torch.equal(images_of(data.test), torch.from_numpy(stored["x_test"]).permute(0, 3, 1, 2))
    assert data.train.labels.tolist() != stored["y_train"][:27].tolist()


def test_an_npz_file_without_a_test_set_gives_a_sixth(tmp_path: Path) -> None:
    names = dict.fromkeys(("x_train", "y_train", "x_test", "y_test"))
    images = np.arange(30 * 64, dtype=np.uint8).reshape(30, 8, 8)
    path = write_npz(tmp_path / "a.npz", **names, x=images, y=np.arange(30)[:, None] % 2)
    one, other = (load_data("npz", path, seed=seed, validation=5) for seed in (0, 1))
    assert (len(one.train), len(one.validation), len(one.test)) == (20, 5, 5)
    assert one.image_shape == (1, 8, 8)
    assert torch.equal(images_of(one.test), images_of(other.test))
    assert not torch.equal(images_of(one.train), images_of(other.train))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": None}, "must hold x_train, y_train"),
        ({"x_train": np.zeros((30, 9, 8, 3))}, "whole numbers from 0 to 255 but is float64"),
        ({"x_train": np.zeros((30, 9), np.uint8)}, r"must have the shape \(n, h, w\)"),
        ({"x_train": np.full((30, 9, 8, 3), 300)}, "from 0 to 255 but has 300"),
        ({"y_train": np.arange(29) % 3}, "a label for each image: 30 and 29"),
        ({"y_train": np.arange(30) - 1}, "from 0 on"),
        ({"y_test": np.full(6, 7)}, "labels below 3 but holds 7"),
        ({"x_test": np.zeros((6, 5, 5), np.uint8)}, "must hold .* images"),
        ({"x_train": np.array([{}] * 30)}, "is object|cannot be read"),
    ],
)
def test_a_wrong_npz_file_is_one_line(tmp_path: Path, changes: dict, said: str) -> None:
    path = write_npz(tmp_path / "a.npz", **changes)
    with pytest.raises(DataError, match=said) as caught:
        load_data("npz", path)
    assert "\n" not in str(caught.value)


def test_what_is_no_npz_file_is_one_line(tmp_path: Path) -> None:
    for content in (b"no", bytes(range(256))):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.npz is not an \.npz file of plain arrays\.$"):
            load_data("npz", tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        load_data("npz", tmp_path / "b.npy")

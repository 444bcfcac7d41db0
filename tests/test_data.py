"""Presets, batches, splits, and loading by name and from .npz files."""
import numpy as np
import pytest
import torch

import cli
import data
import presets
import run_folder
from helpers import generator, make_image_folder

# ---------------------------------------------------------------- presets


def test_digits_and_house_numbers_are_never_flipped():
    assert {name: preset["flip"] for name, preset in presets.NAMED.items()} == dict(
        digits=False, cifar10=True, cifar100=True, svhn=False, svhn_extra=False, fashion_mnist=True,
        imagenet=True)


def test_presets_are_the_papers_table():
    table = dict(cifar10=("wrn-28-2", 5000, 1024, 0.02), svhn=("wrn-28-2", 7325, 500, 0.02),
                 cifar100=("wrn-28-8.4375", 5000, 300, 0.04), svhn_extra=("wrn-28-2", 7325, 500, 0.0001))
    for name, (arch, validation, epochs, weight_decay) in table.items():
        preset = presets.NAMED[name]
        assert (preset["arch"], preset["validation"], preset["steps"], preset["weight_decay"]) == (
            arch, validation, epochs * 1024, weight_decay)
        assert (preset["batch"], preset["lr"], preset["epoch"], preset["ema"], preset["bn_momentum"]) == (
            64, 0.002, 1024, 0.999, 0.001)
    assert presets.cifar100["labels"] == 10_000 and len({frozenset(p) for p in presets.NAMED.values()}) == 1


def test_imagenet_labels_are_the_papers_numbers():
    assert presets.imagenet_labeled("1%") == 13_762 and presets.imagenet_labeled("10%") == 128_866
    assert presets.imagenet_labeled("50%") == 640_584 and presets.imagenet_labeled(13_000) == 13_000
    one, ten = (presets.for_dataset("imagenet", k) for k in ("1%", "10%"))
    table = dict(validation=(5005, 50046), lr=(0.01, 0.1), weight_decay=(0.01, 0.001),
                 steps=(53_000, 100_600), epoch=(53, 503))
    for name, values in table.items():
        assert (one[name], ten[name]) == values, name
    shared = dict(arch="resnet50v2", batch=256, optimizer="sgd", ema=None, bn_momentum=0.01, rot_dim=16,
                  image_size=224, crop="resized", flip=True, decay_at=[0.7, 0.8, 0.9])
    for preset in one, ten:
        assert {name: preset[name] for name in shared} == shared
    assert one["warmup"] * 1000 == 10 and ten["warmup"] * 200 == 5
    assert (one["eval_epochs"], ten["eval_epochs"]) == (10, 1)
    assert presets.for_dataset("imagenet")["labels"] == "10%"
    assert presets.for_dataset("imagenet", 13_000)["lr"] == 0.01
    larger = presets.for_dataset("imagenet", "1%", batch=512)
    assert larger["epoch"] == 26 and larger["steps"] == 26_000


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("n, batch", [(10, 4), (7, 16), (64, 64)])
def test_every_epoch_is_a_new_permutation(n, batch):
    index = torch.arange(n) + 100
    batches = [data.batch_indices(index, batch, step, seed=3, stream="labeled") for step in range(3 * n)]
    stream = torch.cat(batches)
    assert len(stream) == 3 * n * batch                         # no batch is short
    epochs = stream.view(-1, n)
    assert all(torch.equal(epoch.sort().values, index) for epoch in epochs)
    assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test_a_batch_only_depends_on_seed_stream_and_step():
    index = torch.arange(50)
    late = data.batch_indices(index, 8, 1000, seed=0, stream="labeled")
    data.permutation.cache_clear()
    assert torch.equal(late, data.batch_indices(index, 8, 1000, seed=0, stream="labeled"))
    others = [data.batch_indices(index, 8, *rest)
              for rest in ((1001, 0, "labeled"), (1000, 1, "labeled"), (1000, 0, "unlabeled"))]
    assert not any(torch.equal(late, other) for other in others)


def test_an_empty_batch_has_no_images():
    assert data.batch_indices(torch.arange(5), 0, step=3, seed=0, stream="unlabeled").shape == (0,)


def test_an_empty_share_has_no_batches(tmp_path):
    files, *_ = data.load(make_image_folder(tmp_path / "images", n=2), "nowhere", 16, stream=True, workers=1)
    for images in files, torch.zeros(3, 3, 8, 8):
        assert list(data.test_batches(images, torch.arange(0), 4, "cpu")) == []


# ---------------------------------------------------------------- splits


def test_split_is_disjoint_complete_seeded_and_balanced():
    labels = torch.arange(10).repeat_interleave(500)
    parts = dict(train=np.arange(4500), test=np.arange(4500, 5000))
    labels = labels[torch.randperm(5000, generator=generator())]
    labels[:4500] = torch.arange(10).repeat(450)                # balanced, like CIFAR
    split = data.make_split(labels, parts, n_labels=250, validation=500, seed=1)
    sizes = {k: len(v) for k, v in split.items()}
    assert sizes == dict(labeled=250, unlabeled=3750, validation=500, test=500)
    assert np.array_equal(np.sort(np.concatenate(list(split.values()))), np.arange(5000))
    assert np.bincount(labels[split["labeled"]]).tolist() == [25] * 10
    again = data.make_split(labels, parts, 250, 500, seed=1)
    assert all(np.array_equal(split[k], again[k]) for k in split)
    other = data.make_split(labels, parts, 250, 500, seed=2)
    assert not np.array_equal(split["labeled"], other["labeled"])
    more = data.make_split(labels, parts, 500, 500, seed=1)     # more labels: the same images, and others
    assert set(split["labeled"]) < set(more["labeled"])
    assert np.array_equal(split["validation"], more["validation"])


def test_split_matches_the_class_distribution_of_svhn():
    # SVHN's training set by digit.
    counts = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]
    labels = torch.arange(10).repeat_interleave(torch.tensor(counts))
    split = data.make_split(labels, dict(train=np.arange(73257), test=np.arange(0)), 250, 7325, seed=0)
    assert np.bincount(labels[split["labeled"]]).tolist() == [17, 47, 36, 29, 25, 24, 20, 19, 17, 16]
    assert len(split["validation"]) == 7325 and len(split["unlabeled"]) == 73257 - 7325 - 250


def test_a_rare_class_still_gets_a_label():
    labels = torch.tensor([0] * 990 + [1] * 10)
    split = data.make_split(labels, dict(train=np.arange(1000), test=np.arange(0)), 4, 0.1, seed=0)
    assert np.bincount(labels[split["labeled"]]).tolist() == [3, 1]


def test_apportion_by_largest_remainder():
    assert data.apportion(np.array([50, 30, 20]), 10).tolist() == [5, 3, 2]
    assert data.apportion(np.array([2, 1, 1]), 3).tolist() == [1, 1, 1]
    assert data.apportion(np.array([1000, 1, 1]), 5, at_least=1).tolist() == [3, 1, 1]


def test_without_a_number_of_labels_all_training_images_are_labelled(capsys):
    labels = torch.tensor([0, 1] * 10 + [-1] * 7)
    parts = dict(train=np.arange(20), unlabeled=np.arange(20, 27))
    split = data.make_split(labels, parts, None, 0.1, seed=0)   # there is no test part: 10% are held out
    assert {k: len(v) for k, v in split.items()} == dict(labeled=18, unlabeled=7, validation=0, test=2)
    assert "2 of 20 training images (10%) are held out" in capsys.readouterr().out
    assert np.array_equal(split["test"], data.make_split(labels, parts, None, 0.1, seed=5)["test"])
    with pytest.raises(cli.Refused, match="--labels"):
        data.make_split(labels[:20], dict(train=np.arange(20)), None, 0.1, seed=0)


def test_the_unlabelled_part_joins_the_other_unlabelled_training_images():
    labels = torch.tensor([0, 1] * 10 + [-1] * 7)
    parts = dict(train=np.arange(20), test=np.arange(0), unlabeled=np.arange(20, 27))
    split = data.make_split(labels, parts, 4, 0.1, 0)
    assert len(split["unlabeled"]) == 20 - 2 - 4 + 7 and set(range(20, 27)) < set(split["unlabeled"])


def test_imagenet_split_is_s4ls(monkeypatch):
    """Images are drawn regardless of class, and the unlabelled images are all training images."""
    labels = torch.cat([torch.zeros(3000), torch.ones(1000), torch.arange(2)]).long()
    parts = dict(train=np.arange(4000), test=np.arange(4000, 4002))
    monkeypatch.setitem(presets.IMAGENET_LABELED, "1%", 400)
    config = dict(dataset="imagenet", labels="1%", validation=50, seed=0)

    def split_with(**changes):
        return run_folder.draw_split(config | changes, labels, parts)

    split = split_with()
    assert len(split["labeled"]) == 400 and len(split["validation"]) == 50
    assert not set(split["labeled"]) & set(split["validation"])
    assert np.array_equal(split["unlabeled"], parts["train"])
    counts = {np.sum(labels.numpy()[split_with(seed=s)["labeled"]] == 0) for s in range(20)}
    assert len(counts) > 5 and all(250 < n < 350 for n in counts)       # not exactly balanced
    assert np.array_equal(split["labeled"], split_with()["labeled"])
    elsewhere = split_with(dataset="images", labels="10%")      # balanced and disjoint
    assert np.bincount(labels.numpy()[elsewhere["labeled"]]).tolist() == [300, 100]
    assert len(elsewhere["unlabeled"]) == 4000 - 400 - 50


def test_few_labels_of_imagenet_may_leave_a_class_without_a_label():
    """ImageNet's labels are drawn regardless of class; elsewhere every class has a label."""
    labels = torch.cat([torch.zeros(990), torch.ones(10)]).long()
    parts = dict(train=np.arange(1000), test=np.arange(0))

    def labelled_classes(**changes):
        config = dict(dataset="imagenet", labels=5, validation=0, seed=0) | changes
        return len(np.unique(labels[run_folder.draw_split(config, labels, parts)["labeled"]]))

    assert any(labelled_classes(seed=s) == 1 for s in range(5))
    assert labelled_classes(dataset="x") == 2


# ---------------------------------------------------------------- named datasets


def test_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits
    digits = load_digits()
    images, labels, _, _ = data.load("digits", "nowhere")
    assert torch.equal(images[:, 0], torch.from_numpy(digits.images * (255 / 16)).round().byte())
    assert torch.equal(labels, torch.from_numpy(digits.target))


def test_digits():
    images, labels, parts, classes = data.load("digits", "nowhere")
    assert images.shape == (1797, 3, 8, 8) and images.dtype == torch.uint8 and images.max() == 255
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert len(parts["train"]) == 1297 and len(parts["test"]) == 500
    assert classes == [str(i) for i in range(10)]
    assert torch.equal(images[:, 0], images[:, 2]) and labels[:10].tolist() == list(range(10))


def test_named_datasets_come_from_torchvision(monkeypatch, tmp_path):
    grey = torch.arange(30 * 28 * 28).remainder(256).view(30, 28, 28).to(torch.uint8)
    colour = np.arange(30 * 3 * 32 * 32).reshape(30, 3, 32, 32).astype(np.uint8)
    asked = []

    def fake(name, images, labels, targets):
        def construct(root, download, **which):
            asked.append((name, str(root), download, *which.values()))
            made = type(name, (), {})()
            made.data, made.classes = images, [str(i) for i in range(10)]
            setattr(made, targets, labels)
            return made
        for attribute in "url", "mirrors", "resources", "split_list", "__name__":
            if hasattr(getattr(data.datasets, name), attribute):
                setattr(construct, attribute, getattr(getattr(data.datasets, name), attribute))
        monkeypatch.setattr(data.datasets, name, construct)

    fake("CIFAR10", colour.transpose(0, 2, 3, 1), list(range(10)) * 3, "targets")
    fake("FashionMNIST", grey, torch.arange(30) % 10, "targets")
    fake("SVHN", colour, np.arange(30) % 10, "labels")
    images, labels, parts, classes = data.load("cifar10", tmp_path)
    assert np.array_equal(images[:30].numpy(), colour) and labels[:12].tolist() == [*range(10), 0, 1]
    images, *_ = data.load("fashion_mnist", tmp_path)
    assert images.shape == (60, 3, 28, 28) and torch.equal(images[:30, 1], grey)
    images, labels, parts, _ = data.load("svhn_extra", tmp_path)
    assert np.array_equal(images[60:].numpy(), colour)
    assert {k: len(v) for k, v in parts.items()} == dict(train=30, test=30, unlabeled=30)
    assert (labels[parts["unlabeled"]] >= 0).all()              # known, but only used for metrics
    root = str(tmp_path)
    assert asked == [("CIFAR10", root, True, True), ("CIFAR10", root, True, False),
                     ("FashionMNIST", root, True, True), ("FashionMNIST", root, True, False),
                     *(("SVHN", root, True, name) for name in ("train", "test", "extra"))]


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "svhn", "svhn_extra", "fashion_mnist"])
def test_an_npz_file_replaces_the_download_of_a_named_dataset(tmp_path, dataset):
    n, C = 300, presets.NUM_CLASSES[dataset]
    x = np.random.default_rng(0).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)
    y = np.arange(n) % C
    arrays = dict(train_images=x[:200], train_labels=y[:200], test_images=x[200:], test_labels=y[200:],
                  unlabeled_images=x[:50])
    np.savez(tmp_path / f"{dataset}.npz", **arrays)
    images, labels, parts, classes = data.load(dataset, str(tmp_path))
    assert torch.equal(images[:200].permute(0, 2, 3, 1), torch.from_numpy(x[:200]))
    assert labels[:300].tolist() == y.tolist() and len(classes) == C and len(parts["test"]) == 100
    assert dict(cifar10="airplane", fashion_mnist="T-shirt/top").get(dataset, "0") == classes[0]
    np.savez(tmp_path / f"{dataset}.npz", **arrays | dict(train_labels=y[:200] + 1, test_labels=y[200:] + 1))
    with pytest.raises(cli.Refused, match=f"labels in {dataset}.npz must be 0 to {C - 1}"):
        data.load(dataset, str(tmp_path))
    needed = "unlabeled_images" if dataset == "svhn_extra" else "test_images"
    np.savez(tmp_path / f"{dataset}.npz", **{k: v for k, v in arrays.items() if needed[:4] not in k})
    with pytest.raises(cli.Refused, match=f"contains no {needed}"):
        data.load(dataset, str(tmp_path))
    val = dict(val_images=x[:50], val_labels=y[:50])
    for kept in arrays, {k: v for k, v in arrays.items() if not k.startswith("test")}:
        np.savez(tmp_path / f"{dataset}.npz", **kept | val)
        with pytest.raises(cli.Refused, match=f"{dataset}.npz contains val_images"):
            data.load(dataset, str(tmp_path))


@pytest.mark.parametrize("dataset, file", [
    ("cifar10", "cifar-10-python.tar.gz"), ("svhn", "train_32x32.mat"),
    ("cifar100", "cifar-100-python.tar.gz"), ("fashion_mnist", "t10k-labels-idx1-ubyte.gz")])
def test_a_failed_download_says_where_to_put_the_files(monkeypatch, tmp_path, dataset, file):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    for name in "CIFAR10", "CIFAR100", "SVHN", "FashionMNIST":
        monkeypatch.setattr(getattr(data.datasets, name), "__init__", offline)
    with pytest.raises(cli.Refused, match=file) as stop:
        data.load(dataset, str(tmp_path))
    assert "http" in str(stop.value) and "by hand" in str(stop.value) and "\n" not in str(stop.value)


# ---------------------------------------------------------------- .npz files


def save_npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = dict(train_images=rng.integers(0, 256, (40, 8, 8, 3), np.uint8), train_labels=np.arange(40) % 4,
                  test_images=rng.integers(0, 256, (12, 8, 8, 3), np.uint8), test_labels=np.arange(12) % 4)
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})
    return str(path)


def test_npz(tmp_path):
    extra = np.full((5, 8, 8, 3), 7, np.uint8)
    path = save_npz(tmp_path / "my.npz", unlabeled_images=extra)
    images, labels, parts, classes = data.load(path, "nowhere")
    assert images.shape == (57, 3, 8, 8) and classes == ["0", "1", "2", "3"]
    with np.load(path) as file:
        assert np.array_equal(images[parts["test"]].permute(0, 2, 3, 1).numpy(), file["test_images"])
    assert (images[parts["unlabeled"]] == 7).all() and labels[parts["unlabeled"]].tolist() == [-1] * 5


def test_medmnist_files_work_unchanged(tmp_path):
    grey = np.arange(40 * 28 * 28, dtype=np.uint8).reshape(40, 28, 28)
    column = (np.arange(40) % 2).reshape(-1, 1) + 5
    path = save_npz(tmp_path / "m.npz", train_images=grey, train_labels=column, val_images=grey[:6],
                    val_labels=column[:6], test_images=grey[:10], test_labels=column[:10])
    images, labels, parts, classes = data.load(path, "nowhere")
    assert images.shape == (56, 3, 28, 28) and classes == ["5", "6"] and labels[:4].tolist() == [0, 1, 0, 1]
    split = data.make_split(labels, parts, 10, 0.1, seed=0)     # uses the validation part of the file
    assert np.array_equal(split["validation"], parts["validation"]) and len(split["unlabeled"]) == 30


def test_image_size_and_class_names(tmp_path):
    wide = np.zeros((40, 16, 32, 3), np.uint8)
    wide[:, :, 6:26] = 200                                      # the centre stays, the sides are cropped
    path = save_npz(tmp_path / "w.npz", train_images=wide, train_labels=np.array(["ant", "bee"] * 20),
                    test_images=None, test_labels=None)
    images, _, parts, classes = data.load(path, "nowhere", image_size=8)
    assert images.shape == (40, 3, 8, 8) and (images == 200).all()
    assert classes == ["ant", "bee"] and "test" not in parts
    with pytest.raises(cli.Refused, match="--image_size"):
        data.load(path, "nowhere")


@pytest.mark.parametrize("changes, message", [
    (dict(train_labels=None), "train_images and train_labels"),
    (dict(test_labels=None), "no test_labels"),
    (dict(train_labels=np.arange(39) % 4), "one label for each of the 40"),
    (dict(train_labels=np.zeros((40, 14), int)), "one label for each of the 40"),
    (dict(train_labels=np.zeros(40, int), test_labels=np.zeros(12, int)), "only one class"),
    (dict(train_labels=np.linspace(0, 1, 40)), "integers or strings"),
    (dict(test_labels=np.full(12, 9)), "label 9"),
    (dict(train_images=np.zeros((40, 8, 8, 3))), "must be uint8"),
    (dict(train_images=np.zeros((40, 8, 8, 4), np.uint8)), "width, 1 or 3"),
    (dict(train_images=np.zeros((40, 8, 8, 8, 8), np.uint8)), "width, 1 or 3"),
    (dict(train_images=np.zeros((40, 16, 16, 3), np.uint8)), "different sizes"),
    (dict(train_images=np.zeros((40, 4, 4, 3), np.uint8)), "too small"),
    (dict(train_labels=np.array([{}] * 40, object)), "plain arrays"),
    (dict(train_labels=np.arange(40) % 4 - 1), "unlabeled_images"),
    (dict(train_images=np.zeros((40, 0, 8, 3), np.uint8)), "must be uint8 with shape"),
    (dict(train_images=np.zeros((0, 8, 8, 3), np.uint8), train_labels=np.zeros(0, int)),
     "must be uint8 with shape"),
])
def test_bad_npz(tmp_path, changes, message):
    with pytest.raises(cli.Refused, match=message) as stop:
        data.load(save_npz(tmp_path / "bad.npz", **changes), "nowhere")
    assert "\n" not in str(stop.value) and "bad.npz" in str(stop.value)


def test_files_that_are_not_npz_files(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "whole.npz", train_images=np.zeros((40, 8, 8, 3), np.uint8))
    damaged = bytearray((tmp_path / "whole.npz").read_bytes())
    damaged[80:120] = b"x" * 40
    array = (tmp_path / "array.npy").read_bytes()
    for content in b"", b"hello", b"PK\x03\x04 cut off", array, bytes(damaged):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(cli.Refused, match="cannot be read"):
            data.load(str(tmp_path / "x.npz"), "nowhere")

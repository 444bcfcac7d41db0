import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as TF
from torchvision.transforms.v2 import InterpolationMode

import data
import presets
import train_baselines
import train_crae
import training
from chaos import same

# ---------------------------------------------------------------- augmentation, rotation, mixing


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=6, size=8, seed=0):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator(seed))


def test_rotate4_is_rot90_and_its_z():
    x = pictures()
    copies, z = data.rotate4(x)
    assert copies.shape == (24, 3, 8, 8) and z.tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    for i in range(24):
        assert torch.equal(copies[i], torch.rot90(x[i % 6], int(z[i]), (1, 2)))
    assert copies[6, 0, 0, 0] == x[0, 0, 0, -1]                 # 90 degrees anticlockwise: top left was top right


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("flip", [True, False])
def test_augment_is_flip_then_reflect_pad_then_crop_and_reaches_every_offset(size, flip):
    pad = size // 8
    x = pictures(1, size).expand(4000, -1, -1, -1)
    out = data.augment(x, flip, generator())
    crops = {}
    for flipped in (False, True) if flip else (False,):
        image = x[0].numpy()[:, :, ::-1] if flipped else x[0].numpy()
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        for i in range(2 * pad + 1):
            for j in range(2 * pad + 1):
                crops[padded[:, i:i + size, j:j + size].tobytes()] = flipped, i, j
    seen = [crops[image.contiguous().numpy().tobytes()] for image in out]       # KeyError: not a crop at all
    assert len(set(seen)) == len(crops) == (2 if flip else 1) * (2 * pad + 1) ** 2       # 81 offsets at 32
    assert out.dtype == torch.uint8
    counts = np.unique([s[1] for s in seen], return_counts=True)[1]
    assert counts.min() > 0.6 * 4000 / (2 * pad + 1)            # about equally often
    if flip:
        assert 0.45 < np.mean([s[0] for s in seen]) < 0.55


def test_augment_draws_for_each_image_by_itself_and_only_from_its_generator():
    x = pictures(1, 32).expand(64, -1, -1, -1)
    a = data.augment(x, True, generator(1))
    assert len({image.contiguous().numpy().tobytes() for image in a}) > 30
    assert torch.equal(a, data.augment(x, True, generator(1)))
    assert not torch.equal(a, data.augment(x, True, generator(2)))


def test_digits_and_house_numbers_are_never_flipped():
    assert {name: preset["flip"] for name, preset in presets.NAMED.items()} == dict(
        digits=False, cifar10=True, cifar100=True, svhn=False, svhn_extra=False, fashion_mnist=True, imagenet=True)


def test_presets_are_the_papers_table():
    table = dict(cifar10=("wrn-28-2", 5000, 1024, 0.02), svhn=("wrn-28-2", 7325, 500, 0.02), cifar100=("wrn-28-8.4375", 5000, 300, 0.04),
                 svhn_extra=("wrn-28-2", 7325, 500, 0.0001))
    for name, (arch, validation, epochs, weight_decay) in table.items():
        preset = presets.NAMED[name]
        assert (preset["arch"], preset["validation"], preset["steps"], preset["weight_decay"]) == (
            arch, validation, epochs * 1024, weight_decay)
        assert (preset["batch"], preset["lr"], preset["epoch"], preset["ema"], preset["bn_momentum"]) == (
            64, 0.002, 1024, 0.999, 0.001)
    assert presets.cifar100["labels"] == 10_000 and len({frozenset(p) for p in presets.NAMED.values()}) == 1


def test_scale_is_mixmatch():
    x = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(data.scale(x), torch.tensor([i * 2 / 255 - 1 for i in range(256)]), atol=1e-6, rtol=0)
    assert x.dtype == torch.uint8 and x[255] == 255             # the images themselves are not touched


def test_mix_has_its_own_alpha_for_each_image():
    N = 500
    values = torch.arange(N).float()
    mixed = data.mix(values.view(N, 1, 1, 1).expand(N, 3, 2, 2), generator())
    gen = generator()
    alpha, partner = 0.5 + 0.5 * torch.rand(N, 1, 1, 1, generator=gen).flatten(), torch.randperm(N, generator=gen)
    for i in range(N):
        expected = alpha[i] * values[i] + (1 - alpha[i]) * values[partner[i]]
        torch.testing.assert_close(mixed[i], expected.expand(3, 2, 2))
    recovered = ((mixed[:, 0, 0, 0] - partner) / (values - partner))[values != partner]
    assert 0.5 <= recovered.min() < 0.51 and 0.99 < recovered.max() <= 1 and len(recovered.unique()) > 450


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("n, batch", [(10, 4), (7, 16), (64, 64)])
def test_every_pass_over_the_data_is_a_new_permutation(n, batch):
    index = torch.arange(n) + 100
    stream = torch.cat([data.batch_indices(index, batch, step, seed=3, stream=1) for step in range(3 * n)])
    assert len(stream) == 3 * n * batch                         # never a short batch
    passes = stream.view(-1, n)
    assert all(torch.equal(p.sort().values, index) for p in passes)
    assert len({tuple(p.tolist()) for p in passes}) > 1


def test_a_batch_depends_on_seed_stream_and_step_alone():
    index = torch.arange(50)
    late = data.batch_indices(index, 8, 1000, seed=0, stream=1)
    data.permutation.cache_clear()
    assert torch.equal(late, data.batch_indices(index, 8, 1000, seed=0, stream=1))
    others = [data.batch_indices(index, 8, *rest) for rest in ((1001, 0, 1), (1000, 1, 1), (1000, 0, 2))]
    assert not any(torch.equal(late, other) for other in others)


# ---------------------------------------------------------------- splits


def test_split_is_disjoint_complete_seeded_and_balanced():
    labels = torch.arange(10).repeat_interleave(500)
    parts = dict(train=np.arange(4500), test=np.arange(4500, 5000))
    labels = labels[torch.randperm(5000, generator=generator())]
    labels[:4500] = torch.arange(10).repeat(450)                # balanced, as CIFAR is
    split = data.make_split(labels, parts, n_labels=250, validation=500, seed=1)
    assert {k: len(v) for k, v in split.items()} == dict(labeled=250, unlabeled=3750, validation=500, test=500)
    assert np.array_equal(np.sort(np.concatenate(list(split.values()))), np.arange(5000))
    assert np.bincount(labels[split["labeled"]]).tolist() == [25] * 10
    again = data.make_split(labels, parts, 250, 500, seed=1)
    assert all(np.array_equal(split[k], again[k]) for k in split)
    assert not np.array_equal(split["labeled"], data.make_split(labels, parts, 250, 500, seed=2)["labeled"])
    more = data.make_split(labels, parts, 500, 500, seed=1)     # more labels: the same ones and others
    assert set(split["labeled"]) < set(more["labeled"]) and np.array_equal(split["validation"], more["validation"])


def test_split_matches_the_distribution_of_svhn():
    counts = [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]     # SVHN's training set by digit
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


def test_without_a_number_of_labels_all_of_train_is_labelled(capsys):
    labels = torch.tensor([0, 1] * 10 + [-1] * 7)
    parts = dict(train=np.arange(20), unlabeled=np.arange(20, 27))
    split = data.make_split(labels, parts, None, 0.1, seed=0)   # and no test part: 10 % are held out, and said
    assert {k: len(v) for k, v in split.items()} == dict(labeled=18, unlabeled=7, validation=0, test=2)
    assert "2 of 20 training images (10 %) are held out" in capsys.readouterr().out
    assert np.array_equal(split["test"], data.make_split(labels, parts, None, 0.1, seed=5)["test"])
    with pytest.raises(SystemExit, match="--labels"):
        data.make_split(labels[:20], dict(train=np.arange(20)), None, 0.1, seed=0)


def test_unlabeled_images_of_their_own_join_the_rest_of_train():
    labels = torch.tensor([0, 1] * 10 + [-1] * 7)
    split = data.make_split(labels, dict(train=np.arange(20), test=np.arange(0), unlabeled=np.arange(20, 27)), 4, 0.1, 0)
    assert len(split["unlabeled"]) == 20 - 2 - 4 + 7 and set(range(20, 27)) < set(split["unlabeled"])


# ---------------------------------------------------------------- loading


def test_digits():
    images, labels, parts, classes = data.load("digits", "nowhere")
    assert images.shape == (1797, 3, 8, 8) and images.dtype == torch.uint8 and images.max() == 255
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert len(parts["train"]) == 1297 and len(parts["test"]) == 500 and classes == [str(i) for i in range(10)]
    assert torch.equal(images[:, 0], images[:, 2]) and labels[:10].tolist() == list(range(10))


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


def test_medmnist_files_work_as_they_are(tmp_path):
    grey, column = np.arange(40 * 28 * 28, dtype=np.uint8).reshape(40, 28, 28), (np.arange(40) % 2).reshape(-1, 1) + 5
    path = save_npz(tmp_path / "m.npz", train_images=grey, train_labels=column, val_images=grey[:6], val_labels=column[:6],
                    test_images=grey[:10], test_labels=column[:10])
    images, labels, parts, classes = data.load(path, "nowhere")
    assert images.shape == (56, 3, 28, 28) and classes == ["5", "6"] and labels[:4].tolist() == [0, 1, 0, 1]
    split = data.make_split(labels, parts, 10, 0.1, seed=0)     # the file's own validation part is used
    assert np.array_equal(split["validation"], parts["validation"]) and len(split["unlabeled"]) == 30


def test_image_size_and_names_of_classes(tmp_path):
    wide = np.zeros((40, 16, 32, 3), np.uint8)
    wide[:, :, 6:26] = 200                                      # the centre stays, the sides are cropped
    path = save_npz(tmp_path / "w.npz", train_images=wide, train_labels=np.array(["ant", "bee"] * 20), test_images=None,
                    test_labels=None)
    images, _, parts, classes = data.load(path, "nowhere", image_size=8)
    assert images.shape == (40, 3, 8, 8) and (images == 200).all() and classes == ["ant", "bee"] and "test" not in parts
    with pytest.raises(SystemExit, match="--image_size"):
        data.load(path, "nowhere")


@pytest.mark.parametrize("changes, message", [
    (dict(train_labels=None), "train_images and train_labels"),
    (dict(test_labels=None), "no test_labels"),
    (dict(train_labels=np.arange(39) % 4), "one label for each of the 40"),
    (dict(train_labels=np.zeros((40, 14), int)), "one label for each of the 40"),
    (dict(train_labels=np.zeros(40, int), test_labels=np.zeros(12, int)), "one class only"),
    (dict(train_labels=np.linspace(0, 1, 40)), "whole numbers or strings"),
    (dict(test_labels=np.full(12, 9)), "label 9"),
    (dict(train_images=np.zeros((40, 8, 8, 3))), "must be uint8"),
    (dict(train_images=np.zeros((40, 8, 8, 4), np.uint8)), "last axis"),
    (dict(train_images=np.zeros((40, 8, 8, 8, 8), np.uint8)), "last axis"),
    (dict(train_images=np.zeros((40, 16, 16, 3), np.uint8)), "different sizes"),
    (dict(train_images=np.zeros((40, 4, 4, 3), np.uint8)), "too small"),
    (dict(train_labels=np.array([{}] * 40, object)), "plain arrays"),
    (dict(train_labels=np.arange(40) % 4 - 1), "unlabeled_images"),
    (dict(train_images=np.zeros((40, 0, 8, 3), np.uint8)), "must be uint8 of shape"),
    (dict(train_images=np.zeros((0, 8, 8, 3), np.uint8), train_labels=np.zeros(0, int)), "must be uint8 of shape"),
])
def test_bad_npz(tmp_path, changes, message):
    with pytest.raises(SystemExit, match=message) as stop:
        data.load(save_npz(tmp_path / "bad.npz", **changes), "nowhere")
    assert "\n" not in str(stop.value) and "bad.npz" in str(stop.value)


def test_an_npz_that_is_none(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "whole.npz", train_images=np.zeros((40, 8, 8, 3), np.uint8))
    damaged = bytearray((tmp_path / "whole.npz").read_bytes())
    damaged[80:120] = b"x" * 40
    for content in b"", b"hello", b"PK\x03\x04 cut off", (tmp_path / "array.npy").read_bytes(), bytes(damaged):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(SystemExit, match="cannot be read"):
            data.load(str(tmp_path / "x.npz"), "nowhere")


def make_folder(root, parts=("train", "test"), classes=("a b", "ö"), n=6):
    rng = np.random.default_rng(0)
    for part in parts:
        for c in classes:
            (root / part / c).mkdir(parents=True)
            for i in range(n):
                Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8)).save(root / part / c / f"{i}.png")
    return str(root)


def test_folder_of_any_size_and_mode(tmp_path):
    root = make_folder(tmp_path / "pictures", ("train", "val"))
    modes = dict(L=90, RGBA=(90,) * 3 + (255,), P=0, CMYK=(165,) * 3 + (0,), LA=(90, 255))
    modes["1"], modes["I;16"], modes["F"] = 1, 90 * 257, 90 / 255
    for mode, colour in modes.items():
        end = {"CMYK": "jpg", "F": "tif"}.get(mode, "png")
        Image.new(mode, (9, 40), colour).save(tmp_path / "pictures" / "train" / "ö" / f"z_{mode.replace(';', '')}.{end}")
    (tmp_path / "pictures" / "unlabeled" / "deep").mkdir(parents=True)
    Image.new("L", (1, 1), 5).save(tmp_path / "pictures" / "unlabeled" / "deep" / "dot.PNG")
    images, labels, parts, classes = data.load(root, "nowhere", image_size=16)
    assert images.shape == (12 + 8 + 12 + 1, 3, 16, 16) and classes == ["a b", "ö"]
    assert {k: len(v) for k, v in parts.items()} == dict(train=20, unlabeled=1, test=12)        # val/ is the test part
    by_mode = dict(zip(sorted(modes, key=lambda m: f"z_{m.replace(';', '')}"), images[12:20]))
    for mode in "L", "RGBA", "CMYK", "LA", "I;16", "F":
        assert (by_mode[mode].int() - 90).abs().max() <= 2, mode
    assert (images[parts["unlabeled"]] == 5).all() and labels[parts["unlabeled"]].tolist() == [-1]


def test_photographs_are_turned_upright(tmp_path):
    root = make_folder(tmp_path, n=2)
    picture = np.zeros((16, 16, 3), np.uint8)
    picture[:8] = 255                                           # white above
    exif = Image.Exif()
    exif[0x0112] = 3                                            # the camera was upside down
    Image.fromarray(picture[::-1, ::-1].copy()).save(tmp_path / "train" / "ö" / "z.png", exif=exif)
    images, *_ = data.load(root, "nowhere", image_size=16)
    assert images[4, 0].numpy().tolist() == picture[:, :, 0].tolist()


def test_bad_folders(tmp_path):
    def refused(root, message):
        with pytest.raises(SystemExit, match=message) as stop:
            data.load(str(root), "nowhere", image_size=16)
        assert "\n" not in str(stop.value)

    refused(tmp_path, "no folder train/")
    refused(make_folder(tmp_path / "one", classes=["only"]), "one class only")
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    refused(tmp_path / "empty", "no valid file|[Ff]ound no")
    root = make_folder(tmp_path / "differ")
    (tmp_path / "differ" / "test" / "ö").rename(tmp_path / "differ" / "test" / "o")
    refused(root, "differ: o, ö")
    for stream in False, True:
        with pytest.raises(SystemExit, match="--image_size 7: is too small; give 8 or more"):
            data.load(root, "nowhere", image_size=7, stream=stream)
    root = make_folder(tmp_path / "broken")
    (tmp_path / "broken" / "train" / "ö" / "bad.jpg").write_bytes(b"not a picture")
    refused(root, "bad.jpg")
    root = make_folder(tmp_path / "nothing")
    (tmp_path / "nothing" / "unlabeled").mkdir()
    refused(root, "'unlabeled' has no images")
    refused(tmp_path / "missing", "no such file or folder, and the known names are digits, cifar10")


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
    assert np.array_equal(images[60:].numpy(), colour) and {k: len(v) for k, v in parts.items()} == dict(
        train=30, test=30, unlabeled=30)
    assert (labels[parts["unlabeled"]] >= 0).all()              # known, but used for scoring only
    assert asked == [("CIFAR10", str(tmp_path), True, True), ("CIFAR10", str(tmp_path), True, False),
                     ("FashionMNIST", str(tmp_path), True, True), ("FashionMNIST", str(tmp_path), True, False),
                     *(("SVHN", str(tmp_path), True, name) for name in ("train", "test", "extra"))]


@pytest.mark.parametrize("dataset, file", [("cifar10", "cifar-10-python.tar.gz"), ("svhn", "train_32x32.mat"),
                                           ("cifar100", "cifar-100-python.tar.gz"), ("fashion_mnist", "t10k-labels-idx1-ubyte.gz")])
def test_a_download_that_fails_says_where_to_put_the_files(monkeypatch, tmp_path, dataset, file):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    for name in "CIFAR10", "CIFAR100", "SVHN", "FashionMNIST":
        monkeypatch.setattr(getattr(data.datasets, name), "__init__", offline)
    with pytest.raises(SystemExit, match=file) as stop:
        data.load(dataset, str(tmp_path))
    assert "http" in str(stop.value) and "by hand" in str(stop.value) and "\n" not in str(stop.value)


# ---------------------------------------------------------------- strong augmentation


def photos(N=12, size=20):
    return torch.randint(0, 256, (N, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).float().mul(
        0.6).add(torch.linspace(10, 90, size)).byte()           # not the full range, so that autocontrast does something


def test_colours_change_as_torchvision_changes_one_image_at_a_time():
    x, u = photos(), torch.linspace(0, 0.99, 12).view(-1, 1, 1, 1)
    ops = data.colour_ops(x, u)
    for i in range(12):
        keep, image = 0.05 + 0.9 * u[i].item(), x[i]
        expected = [TF.autocontrast(image), TF.equalize(image), TF.adjust_brightness(image, keep),
                    TF.adjust_saturation(image, keep), TF.adjust_contrast(image, keep), TF.adjust_sharpness(image, keep),
                    TF.posterize(image, 4 + int(5 * u[i].item())), TF.solarize(image, 256 * u[i].item())]
        for k, (ours, theirs) in enumerate(zip(ops, expected)):
            difference = (ours[i].int() - theirs.int()).abs()
            if k == 5:
                difference = difference[:, 1:-1, 1:-1]          # torchvision leaves the border unblurred
            assert difference.max() <= 1 and ours.dtype == torch.uint8, k
    assert len(ops) == 8 and all((op != x).any() for op in ops)


def test_moves_are_rotation_shear_and_translation_of_each_image():
    x = photos()
    assert torch.equal(data.move(x, torch.full((12, 1, 1, 1), 3), torch.rand(12, 1, 1, 1)), x)      # no move was drawn
    third = torch.full((12, 1, 1, 1), 2 / 3)                    # a third of 0.3 of 20 pixels: two pixels
    moved = data.move(x, torch.full((12, 1, 1, 1), 12), third)
    assert torch.equal(moved[..., :-2], x[..., 2:]) and (moved[..., -2:] == 127).all()
    moved = data.move(x, torch.full((12, 1, 1, 1), 13), third)
    assert torch.equal(moved[:, :, :-2], x[:, :, 2:]) and (moved[:, :, -2:] == 127).all()
    for op, turn in (9, dict(angle=-20.0, shear=[0.0, 0.0])), (10, dict(angle=0.0, shear=[0.2, 0.0])), (
            11, dict(angle=0.0, shear=[0.0, 0.2])):
        way = 20 / 30 if op == 9 else 0.2 / 0.3
        moved = data.move(x, torch.full((12, 1, 1, 1), op), torch.full((12, 1, 1, 1), (way + 1) / 2)).int()
        if op == 9:
            theirs = [TF.rotate(x, angle, InterpolationMode.BILINEAR, fill=127).int() for angle in (20.0, -20.0)]
        else:
            shear = [math.degrees(math.atan(0.2)) if s else 0.0 for s in turn["shear"]]
            theirs = [TF.affine(x, 0.0, [0, 0], 1.0, [sign * s for s in shear], InterpolationMode.BILINEAR, fill=127).int()
                      for sign in (1, -1)]
        inner = slice(5, 15)
        assert min((moved - t)[..., inner, inner].abs().max() for t in theirs) <= 2, op


def test_each_operation_is_drawn_equally_often_and_twice(monkeypatch):
    monkeypatch.setattr(data, "colour_ops", lambda x, u: [torch.full_like(x, 10 + k) for k in range(8)])
    monkeypatch.setattr(data, "move", lambda x, op, u: torch.zeros_like(x) + op.byte() + 10)
    monkeypatch.setattr(data, "cutout", lambda x, gen: x)
    x = data.strong_augment(torch.zeros(20_000, 3, 8, 8, dtype=torch.uint8), torch.Generator().manual_seed(0))
    values, counts = x[:, 0, 0, 0].unique(return_counts=True)
    assert values.tolist() == [0, *range(10, 18), *range(19, 24)]
    p = counts / 20_000
    assert abs(p[0] - 1 / 14 ** 2) < 0.003                      # nothing twice
    assert ((p[1:] - (1 / 14 + 1 / 14 ** 2)).abs() < 0.01).all()        # the second draw, or the first and then nothing


def test_cutout_greys_one_square_of_up_to_half_the_size_anywhere():
    size = 16
    x = torch.zeros(4000, 3, size, size, dtype=torch.uint8)
    grey = data.cutout(x, torch.Generator().manual_seed(0)) == 127              # (N, 3, S, S)
    assert (grey == grey[:, :1]).all()
    rows, cols = grey[:, 0].any(2), grey[:, 0].any(1)           # (N, S)
    assert torch.equal(grey[:, 0], rows[:, :, None] & cols[:, None, :])
    height, width = rows.sum(1), cols.sum(1)
    inside = ~(rows[:, 0] | rows[:, -1] | cols[:, 0] | cols[:, -1])
    assert height.max() == size // 2 and inside.sum() > 500 and ((height - width)[inside].abs() <= 1).all()
    often = grey[:, 0].float().mean(0)
    assert often.min() > 0.02 and len(height.unique()) == size // 2 + 1         # every pixel, every size


def test_strong_augmentation_is_repeatable_and_strong():
    x = photos(64)
    a, b, c = (data.strong_augment(x, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.dtype == torch.uint8 and a.shape == x.shape and a.is_contiguous(memory_format=torch.channels_last)
    assert ((a != x).flatten(1).any(1)).float().mean() > 0.8
    with torch.autocast("cpu", torch.bfloat16):                 # as on a GPU
        assert torch.equal(data.strong_augment(x, torch.Generator().manual_seed(0)), a)


def test_strong_augmentation_ends_with_cutout(monkeypatch):
    monkeypatch.setattr(data, "colour_ops", lambda x, u: [x] * 8)
    monkeypatch.setattr(data, "move", lambda x, op, u: x)
    x = torch.zeros(500, 3, 16, 16, dtype=torch.uint8)
    grey = (data.strong_augment(x, torch.Generator().manual_seed(0)) == 127).flatten(1).any(1)
    assert grey.float().mean() > 0.8                            # a few squares are smaller than a pixel


def test_an_empty_batch_has_no_images():
    assert data.batch_indices(torch.arange(5), 0, step=3, seed=0, stream=2).shape == (0,)


# ---------------------------------------------------------------- pictures that stay on the disk


def rows_of(folder):
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def state_of(folder):
    return {k: v for k, v in torch.load(folder / "last.pt", weights_only=True).items() if k != "run"}


def test_a_run_from_disk_has_the_bits_of_one_in_memory_whoever_reads(tmp_path):
    root = make_folder(tmp_path / "pictures", n=12)
    flags = dict(dataset=root, labels="50%", image_size=16, steps=4, batch=4, arch="wrn-10-0.25", device="cpu", flip=True)
    train_crae.train(**flags, out=str(tmp_path / "memory"))
    for workers in 0, 1, 2:
        out = tmp_path / str(workers)
        train_crae.train(**flags, stream=True, workers=workers, out=str(out))
        assert same(state_of(out), state_of(tmp_path / "memory")), workers
        timed = dict(seconds=0, images_per_second=0)
        assert [row | timed for row in rows_of(out)] == [row | timed for row in rows_of(tmp_path / "memory")]
    for part, index in np.load(tmp_path / "memory" / "split.npz").items():
        assert np.array_equal(index, np.load(out / "split.npz")[part])


def test_pieces_of_pictures_depend_on_seed_step_and_place_alone(tmp_path):
    """In any order, by any number of workers, from any step on; every epoch of an image has another piece."""
    root = make_folder(tmp_path / "pictures", n=6)
    index = dict(labeled=torch.arange(4), unlabeled=torch.arange(4, 12))

    def batches(workers, first, rank=0, world=1):
        images, labels, *_ = data.load(root, "nowhere", 16, crop="resized", flip=True, workers=workers)
        assert isinstance(images, data.Files) and images.shape == (24, 3, 16, 16)
        return list(data.training_batches(images, labels, index, 4, 2, range(first, 4), 7, rank, world, 1))

    one = batches(0, 0)
    assert len(one) == 4 and one[0][0].dtype == torch.uint8 and [len(t) for t in one[0]] == [4, 4, 8]
    for again in batches(2, 0), [None, None, *batches(1, 2)]:
        for a, b in zip(one, again):
            assert b is None or all(map(torch.equal, a, b))
    for rank in 0, 1:
        for whole, half in zip(one, batches(0, 0, rank, 2)):
            assert all(torch.equal(w.chunk(2)[rank], h) for w, h in zip(whole, half))
    assert torch.equal(one[0][1].sort().values, one[1][1].sort().values)        # the same four images in every step
    assert not any(torch.equal(a, b) for a in one[0][0] for b in one[1][0])     # and never the same piece
    images, labels, *_ = data.load(root, "nowhere", 16, crop="resized", workers=0)
    twice, = data.training_batches(images, labels, dict(labeled=torch.zeros(1).long(), unlabeled=torch.arange(2)), 2, 1, range(1), 7, 0, 1, 1)
    assert not torch.equal(*twice[0])                           # one image at two places of a batch


def test_pieces_have_s4ls_areas_and_shapes_and_flips(tmp_path):
    """A picture whose red tells the row and whose green tells the column: a piece shows where it was cut out."""
    side = 200
    rows, cols = np.mgrid[:side, :side]
    Image.fromarray(np.stack([rows, cols, 0 * rows], -1).astype(np.uint8)).save(tmp_path / "map.png")
    files = data.Files([str(tmp_path / "map.png")], 32, "resized", True, 0)
    areas, aspects, flips = [], [], 0
    for seed in range(300):
        piece = files[0, seed].double()                         # (32, 32, 3)
        assert torch.equal(files[0, seed].double(), piece)
        height, width = ((piece[-1, 16, 0] - piece[0, 16, 0]) * 32 / 31).item(), ((piece[16, -1, 1] - piece[16, 0, 1]) * 32 / 31).item()
        flips += width < 0
        areas.append(height * abs(width) / side ** 2)
        aspects.append(abs(width) / height)
    assert 0.04 < min(areas) < 0.075 and 0.9 < max(areas) < 1.1 and 0.4 < np.mean(areas) < 0.6
    assert 0.68 < min(aspects) < 0.85 and 1.2 < max(aspects) < 1.45 and 100 < flips < 200
    files = data.Files([str(tmp_path / "map.png")], 32, "resized", False, 0)
    assert all(files[0, seed][16, -1, 1] > files[0, seed][16, 0, 1] for seed in range(30))      # no flip where none is asked for


def test_test_pictures_are_scaled_to_256_of_224_and_cropped_in_the_middle(tmp_path):
    rows, cols = np.mgrid[:256, :320]
    Image.fromarray(np.stack([rows, cols // 2, 0 * rows], -1).astype(np.uint8)).save(tmp_path / "map.png")
    for image in data.decode(tmp_path / "map.png", 224, "resized"), data.Files([str(tmp_path / "map.png")], 224, "resized", True, 0)[0, None].numpy():
        assert image.shape == (224, 224, 3)
        assert image[:, :, 0].tolist() == rows[16:240, 48:272].tolist() and image[:, :, 1].tolist() == (cols // 2)[16:240, 48:272].tolist()
    assert data.decode(tmp_path / "map.png", 128)[0, 0, 0] <= 1 and data.decode(tmp_path / "map.png", 128)[-1, 0, 0] >= 253     # pad: the whole height


def test_memory_decides_and_a_line_tells(tmp_path, monkeypatch, capsys):
    root = make_folder(tmp_path / "pictures", n=2)
    size = 8 * 3 * 16 * 16
    for free, kind in (2 * size + 1, torch.Tensor), (2 * size - 1, data.Files):
        monkeypatch.setattr(data, "free_memory", lambda device: free)
        images, labels, parts, classes = data.load(root, "nowhere", 16)
        assert isinstance(images, kind) and len(images) == len(labels) == 8
        assert ("held in memory" in capsys.readouterr().out) == (kind is torch.Tensor)
    monkeypatch.setattr(data, "free_memory", lambda device: 4 * size + 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")                 # both hold all of them
    assert isinstance(data.load(root, "nowhere", 16)[0], torch.Tensor)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert isinstance(data.load(root, "nowhere", 16)[0], data.Files)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert isinstance(data.load(root, "nowhere", 16, stream=False)[0], torch.Tensor)
    with pytest.raises(SystemExit, match="--nostream: --crop resized"):
        data.load(root, "nowhere", 16, stream=False, crop="resized")
    for flags in dict(stream=True), dict(crop="resized"), dict(labels_file="x"):
        with pytest.raises(SystemExit, match="is for folders of pictures"):
            data.load("digits", "nowhere", **flags)


def test_broken_files_on_disk_are_found_before_and_while_training(tmp_path, capsys):
    root = make_folder(tmp_path / "pictures", n=6)
    bad = tmp_path / "pictures" / "train" / "ö" / "bad.jpg"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(bad)
    whole = bad.read_bytes()
    bad.write_bytes(whole[:len(whole) // 2])                    # its head is good
    with pytest.raises(SystemExit, match="1 images cannot be read, .*bad.jpg"):
        data.load(root, "nowhere", 16, stream=True)
    images, *_ = data.load(root, "nowhere", 16, skip_broken=True, stream=True)
    assert len(images) == 24 and "going on without 1 images" in capsys.readouterr().out
    bad.write_bytes(whole)
    flags = dict(dataset=root, labels=4, image_size=16, steps=3, batch=4, arch="wrn-10-0.25", device="cpu", stream=True)
    real = training.draw_split

    def damage(*args):
        for file in (tmp_path / "pictures" / "train").rglob("*.png"):
            file.write_bytes(b"")
        return real(*args)

    for workers in 0, 1:
        make_folder(tmp_path / f"again{workers}", n=6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "draw_split", damage)
            with pytest.raises(SystemExit, match="^cannot read .*png any more: ") as stop:
                train_crae.train(**flags, workers=workers, out=str(tmp_path / f"run{workers}"))
        assert "\n" not in str(stop.value)
        for file in (tmp_path / "pictures" / "train").rglob("*.png"):
            file.write_bytes((tmp_path / f"again{workers}" / file.relative_to(tmp_path / "pictures")).read_bytes())


def test_labels_from_a_list_of_files(tmp_path):
    root = make_folder(tmp_path / "pictures", n=5)
    for c in "a b", "ö":
        for i in range(5):
            (tmp_path / "pictures" / "train" / c / f"{i}.png").rename(tmp_path / "pictures" / "train" / c / f"{c[0]}_{i}.png")
    listed = tmp_path / "list.txt"
    for text in "a_1.png\nö_3.png\nö_4.png\n", "a b/a_1.png\n\nö/ö_3.png\n./train/ö/ö_4.png":
        listed.write_text(text)
        for stream in False, True:
            images, labels, parts, _ = data.load(root, "nowhere", 16, labels_file=listed, stream=stream)
            split = data.make_split(labels, parts, None, 2, seed=0)
            assert split["labeled"].tolist() == [1, 8, 9] and len(split["validation"]) == 2 and len(split["unlabeled"]) == 5
            assert sorted(np.concatenate([split[k] for k in ("labeled", "unlabeled", "validation")])) == list(range(10))
    for text, message in ("a_1.png\nx.png\ny.png", "x.png is not among the training images; 1 more like it"), ("", "names no image"):
        listed.write_text(text)
        with pytest.raises(SystemExit, match=message):
            data.load(root, "nowhere", 16, labels_file=listed)
    (tmp_path / "pictures" / "train" / "ö" / "a_1.png").write_bytes((tmp_path / "pictures" / "train" / "ö" / "ö_3.png").read_bytes())
    listed.write_text("a_1.png")
    with pytest.raises(SystemExit, match="is the name of several training images"):
        data.load(root, "nowhere", 16, labels_file=listed)
    listed.write_text("a b/a_1.png\nö_3.png")
    row = train_crae.train(dataset=root, labels_file=str(listed), image_size=16, steps=1, batch=2, arch="wrn-10-0.25", device="cpu",
                           out=str(tmp_path / "run"))
    assert row["step"] == 1 and np.load(tmp_path / "run" / "split.npz")["labeled"].tolist() == [1, 9]
    with pytest.raises(SystemExit, match="leave one of them out"):
        train_crae.train(dataset=root, labels_file=str(listed), labels=4)


# ---------------------------------------------------------------- ImageNet


def imagenet(tmp_path, n=6):
    """A small stand-in with the layout of ILSVRC-2012: train/<wnid>/ and val/<wnid>/."""
    make_folder(tmp_path / "ilsvrc", ("train", "val"), classes=[f"n0000000{c}" for c in range(3)], n=n)
    return str(tmp_path / "ilsvrc")


def test_imagenet_labels_are_the_papers_numbers():
    assert presets.imagenet_labeled("1%") == 13_762 and presets.imagenet_labeled("10%") == 128_866
    assert presets.imagenet_labeled("50%") == 640_584 and presets.imagenet_labeled(13_000) == 13_000
    one, ten = (presets.for_dataset("imagenet", k) for k in ("1%", "10%"))
    table = dict(validation=(5005, 50046), lr=(0.01, 0.1), weight_decay=(0.01, 0.001), steps=(53_000, 100_600), epoch=(53, 503))
    for name, values in table.items():
        assert (one[name], ten[name]) == values, name
    for preset in one, ten:
        assert (preset["arch"], preset["batch"], preset["optimizer"], preset["ema"], preset["bn_momentum"], preset["rot_dim"]) == (
            "resnet50v2", 256, "sgd", None, 0.01, 16)
        assert (preset["image_size"], preset["crop"], preset["flip"], preset["decay_at"]) == (224, "resized", True, [0.7, 0.8, 0.9])
    assert one["warmup"] * 1000 == 10 and ten["warmup"] * 200 == 5 and (one["eval_epochs"], ten["eval_epochs"]) == (10, 1)
    assert presets.for_dataset("imagenet")["labels"] == "10%" and presets.for_dataset("imagenet", 13_000)["lr"] == 0.01
    assert presets.for_dataset("imagenet", "1%", batch=512)["epoch"] == 26 and presets.for_dataset("imagenet", "1%", batch=512)["steps"] == 26_000


def test_imagenet_split_is_s4ls(monkeypatch):
    """Drawn whatever the class, and the unlabelled images are all of train."""
    labels = torch.cat([torch.zeros(3000), torch.ones(1000), torch.arange(2)]).long()
    parts = dict(train=np.arange(4000), test=np.arange(4000, 4002))
    monkeypatch.setitem(presets.IMAGENET_LABELED, "1%", 400)
    config = dict(dataset="imagenet", labels="1%", validation=50, seed=0)
    split = training.draw_split(config, labels, parts)
    assert len(split["labeled"]) == 400 and len(split["validation"]) == 50 and not set(split["labeled"]) & set(split["validation"])
    assert np.array_equal(split["unlabeled"], parts["train"])
    counts = {np.sum(labels.numpy()[training.draw_split(config | dict(seed=s), labels, parts)["labeled"]] == 0) for s in range(20)}
    assert len(counts) > 5 and all(250 < n < 350 for n in counts)               # not balanced to the image
    assert np.array_equal(split["labeled"], training.draw_split(config, labels, parts)["labeled"])
    elsewhere = training.draw_split(config | dict(dataset="pictures", labels="10%"), labels, parts)     # that share, balanced, disjoint
    assert np.bincount(labels.numpy()[elsewhere["labeled"]]).tolist() == [300, 100] and len(elsewhere["unlabeled"]) == 4000 - 400 - 50


@pytest.mark.parametrize("script, flags", [(train_crae, {}), (train_baselines, dict(method="s4l")), (train_baselines, dict(method="labeled_only"))])
def test_imagenet_from_end_to_end(tmp_path, monkeypatch, capsys, script, flags):
    """The preset as it is but for sizes: streaming, S4L's crops, SGD with warm-up and steps down, no average, top-5."""
    monkeypatch.setitem(presets.IMAGENET_LABELED, "1%", 8)
    monkeypatch.setitem(presets.imagenet_1, "validation", 3)
    row = script.train(dataset="imagenet", data_dir=imagenet(tmp_path), labels="1%", batch=4, steps=10, image_size=32, arch="wrn-10-0.25",
                       device="cpu", out=str(tmp_path / "run"), **flags)
    assert "note: 18 training images in " in capsys.readouterr().out            # a part of ILSVRC-2012, and that is said
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["resolved"]["images"] == dict(labeled=8, unlabeled=18, validation=3, test=18) and config["epoch"] == 2
    assert config["resolved"]["rotation_heads"] == (3 if script is train_crae else int(flags["method"] == "s4l"))
    assert config["rot_dim"] == (16 if script is train_crae else None)
    heads = {k: tuple(v.shape) for k, v in torch.load(tmp_path / "run" / "last.pt", weights_only=True)["net"].items() if k.startswith(("red", "rot"))}
    assert heads == ({"reduce.weight": (16, 16), "rotation.weight": (12, 16), "rotation.bias": (12,)} if script is train_crae else
                     {"rotation.weight": (4, 16), "rotation.bias": (4,)} if flags["method"] == "s4l" else {})
    assert row["lr"] == pytest.approx(0.01 * 1e-3) and row["test_error"] == row["test_error_raw"] == row["median_test_error"]
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert all(torch.equal(saved["net"][k], saved["ema"][k]) for k in saved["net"])
    group, _ = saved["optimizer"]["param_groups"]
    assert group["momentum"] == 0.9 and not group["nesterov"] and group["weight_decay"] == 0.01


def test_imagenet_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="--data_dir nowhere: there is no such folder"):
        data.load("imagenet", "nowhere", 32, crop="resized")
    with pytest.raises(SystemExit, match="--data_dir .*: has no train/<wnid>/ and val/<wnid>/ of ILSVRC-2012, nor its archives") as stop:
        data.load("imagenet", str(tmp_path), 32, crop="resized")
    assert "\n" not in str(stop.value)


def test_few_labels_of_imagenet_may_leave_a_class_without():
    """As drawn whatever the class; elsewhere every class has one."""
    labels = torch.cat([torch.zeros(990), torch.ones(10)]).long()
    config, parts = dict(dataset="imagenet", labels=5, validation=0, seed=0), dict(train=np.arange(1000), test=np.arange(0))
    assert any(len(np.unique(labels[training.draw_split(config | dict(seed=s), labels, parts)["labeled"]])) == 1 for s in range(5))
    assert len(np.unique(labels[training.draw_split(config | dict(dataset="x"), labels, parts)["labeled"]])) == 2


def test_processes_unpack_one_after_another(tmp_path):
    import fcntl
    with data.one_at_a_time(tmp_path / "data"):
        with (tmp_path / "data" / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with data.one_at_a_time("/proc/data"):                      # not to be written: what is there is read
        pass


def test_an_empty_share_is_no_batch(tmp_path):
    images, *_ = data.load(make_folder(tmp_path / "pictures", n=2), "nowhere", 16, stream=True, workers=1)
    assert list(data.in_pieces(images, torch.arange(0), 4, "cpu")) == list(data.in_pieces(torch.zeros(3, 3, 8, 8), torch.arange(0), 4, "cpu")) == []


def test_methods_with_several_views_are_refused_where_there_is_one(tmp_path):
    for method in train_baselines.SEVERAL_VIEWS:
        with pytest.raises(SystemExit, match=f"--method {method}: needs several views"):
            train_baselines.train(method=method, dataset="imagenet", data_dir=str(tmp_path), labels="1%", device="cpu")

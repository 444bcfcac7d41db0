"""Image folders and ImageNet are listed, checked and read, with the same bits in memory and from disk."""
import fcntl
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import cli
import data
import devices
import evaluate
import folders
import predictions
import presets
import run_folder
import train_baselines
import train_crae
from helpers import QUICK, make_image_folder, rows_of, same

# ---------------------------------------------------------------- list and decode


def test_images_of_any_size_and_mode(tmp_path):
    root = make_image_folder(tmp_path / "images", ("train", "val"))
    modes = dict(L=90, RGBA=(90,) * 3 + (255,), P=0, CMYK=(165,) * 3 + (0,), LA=(90, 255))
    modes["1"], modes["I;16"], modes["F"] = 1, 90 * 257, 90 / 255
    for mode, colour in modes.items():
        end = {"CMYK": "jpg", "F": "tif"}.get(mode, "png")
        name = f"z_{mode.replace(';', '')}.{end}"
        Image.new(mode, (9, 40), colour).save(tmp_path / "images" / "train" / "ö" / name)
    (tmp_path / "images" / "unlabeled" / "deep").mkdir(parents=True)
    Image.new("L", (1, 1), 5).save(tmp_path / "images" / "unlabeled" / "deep" / "dot.PNG")
    images, labels, parts, classes = data.load(root, "nowhere", image_size=16)
    assert images.shape == (12 + 8 + 12 + 1, 3, 16, 16) and classes == ["a b", "ö"]
    sizes = {k: len(v) for k, v in parts.items()}
    assert sizes == dict(train=20, unlabeled=1, test=12)        # val/ is the test part
    by_mode = dict(zip(sorted(modes, key=lambda m: f"z_{m.replace(';', '')}"), images[12:20]))
    for mode in "L", "RGBA", "CMYK", "LA", "I;16", "F":
        assert (by_mode[mode].int() - 90).abs().max() <= 2, mode
    assert (images[parts["unlabeled"]] == 5).all() and labels[parts["unlabeled"]].tolist() == [-1]


def test_photographs_are_turned_upright(tmp_path):
    root = make_image_folder(tmp_path, n=2)
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8] = 255                                             # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 3                                            # the camera was upside down
    Image.fromarray(image[::-1, ::-1].copy()).save(tmp_path / "train" / "ö" / "z.png", exif=exif)
    images, *_ = data.load(root, "nowhere", image_size=16)
    assert images[4, 0].numpy().tolist() == image[:, :, 0].tolist()


def test_bad_folders(tmp_path):
    def refused(root, message):
        with pytest.raises(cli.Refused, match=message) as stop:
            data.load(str(root), "nowhere", image_size=16)
        assert "\n" not in str(stop.value)

    refused(tmp_path, "no folder train/")
    refused(make_image_folder(tmp_path / "one", classes=["only"]), "only one class")
    (tmp_path / "empty" / "train" / "a").mkdir(parents=True)
    refused(tmp_path / "empty", "no valid file|[Ff]ound no")
    root = make_image_folder(tmp_path / "differ")
    (tmp_path / "differ" / "test" / "ö").rename(tmp_path / "differ" / "test" / "o")
    refused(root, "differ: o, ö")
    for stream in False, True:
        with pytest.raises(cli.Refused, match="--image_size 7: too small; give 8 or more"):
            data.load(root, "nowhere", image_size=7, stream=stream)
    root = make_image_folder(tmp_path / "broken")
    (tmp_path / "broken" / "train" / "ö" / "bad.jpg").write_bytes(b"not an image")
    refused(root, "bad.jpg")
    root = make_image_folder(tmp_path / "nothing")
    (tmp_path / "nothing" / "unlabeled").mkdir()
    refused(root, "'unlabeled' contains no images")
    refused(tmp_path / "missing", "no such file or folder; the named datasets are digits, cifar10")


def test_test_images_are_resized_to_256_of_224_and_cropped_to_the_centre(tmp_path):
    rows, cols = np.mgrid[:256, :320]
    file = tmp_path / "map.png"
    Image.fromarray(np.stack([rows, cols // 2, 0 * rows], -1).astype(np.uint8)).save(file)
    from_disk = folders.Files([str(file)], 224, "resized", True, 0)[0, None].numpy()
    for image in folders.decode(file, 224, "resized"), from_disk:
        assert image.shape == (224, 224, 3)
        assert image[:, :, 0].tolist() == rows[16:240, 48:272].tolist()
        assert image[:, :, 1].tolist() == (cols // 2)[16:240, 48:272].tolist()
    padded = folders.decode(file, 128)                          # crop "pad" keeps the whole height
    assert padded[0, 0, 0] <= 1 and padded[-1, 0, 0] >= 253


def test_labels_from_a_list_of_files(tmp_path):
    root = make_image_folder(tmp_path / "images", n=5)
    train = tmp_path / "images" / "train"
    for c in "a b", "ö":
        for i in range(5):
            (train / c / f"{i}.png").rename(train / c / f"{c[0]}_{i}.png")
    listed = tmp_path / "list.txt"
    for text in "a_1.png\nö_3.png\nö_4.png\n", "a b/a_1.png\n\nö/ö_3.png\n./train/ö/ö_4.png":
        listed.write_text(text)
        for stream in False, True:
            images, labels, parts, _ = data.load(root, "nowhere", 16, labels_file=listed, stream=stream)
            split = data.make_split(labels, parts, None, 2, seed=0)
            assert split["labeled"].tolist() == [1, 8, 9]
            assert len(split["validation"]) == 2 and len(split["unlabeled"]) == 5
            together = np.concatenate([split[k] for k in ("labeled", "unlabeled", "validation")])
            assert sorted(together) == list(range(10))
    for text, message in [
            ("a_1.png\nx.png\ny.png", r"x.png is not among the training images \(1 more like it\)"),
            ("", "contains no image names")]:
        listed.write_text(text)
        with pytest.raises(cli.Refused, match=message):
            data.load(root, "nowhere", 16, labels_file=listed)
    (train / "ö" / "a_1.png").write_bytes((train / "ö" / "ö_3.png").read_bytes())
    listed.write_text("a_1.png")
    with pytest.raises(cli.Refused, match="is the name of several training images"):
        data.load(root, "nowhere", 16, labels_file=listed)
    listed.write_text("a b/a_1.png\nö_3.png")
    flags = QUICK | dict(batch=2, image_size=16, steps=1, out=str(tmp_path / "run"))
    row = train_crae.train(dataset=root, labels_file=str(listed), **flags)
    assert row["step"] == 1 and np.load(tmp_path / "run" / "split.npz")["labeled"].tolist() == [1, 9]
    with pytest.raises(cli.Refused, match="omit one"):
        train_crae.train(dataset=root, labels_file=str(listed), labels=4)


# ---------------------------------------------------------------- images with more than 8 bits


def make_deep_folder(root, grey, kind=np.uint16, end="png"):
    """root/{train,test}/{a,b}/<i> with images `grey` (10, 24, 24) as files with more than 8 bits."""
    for part in "train", "test":
        for name in "ab":
            (root / part / name).mkdir(parents=True)
            for i, pixels in enumerate(grey):
                Image.fromarray(pixels.astype(kind)).save(root / part / name / f"{i}.{end}")
    return str(root)


def twelve_bits():
    """Images with grey values from 100 to 4000, of different brightness, and two defective pixels."""
    grey = np.linspace(100, 4000, 24 * 24).reshape(24, 24)
    grey = np.stack([grey * (0.5 + 0.05 * i) for i in range(10)])
    grey[3, 0, 0], grey[4, 0, 0] = 65535, 0
    return grey


@pytest.mark.parametrize("kind, end", [(np.uint16, "png"), (np.uint16, "tif"), (np.int32, "tif"),
                                       (np.float32, "tif")])
@pytest.mark.parametrize("stream", [False, True])
def test_images_with_12_bits_share_one_scale(tmp_path, capsys, kind, end, stream):
    grey = twelve_bits()
    root = make_deep_folder(tmp_path / "deep", grey, kind, end)
    Image.new("L", (24, 24), 77).save(tmp_path / "deep" / "train" / "b" / "eight.png")
    images, _, parts, _ = data.load(root, "nowhere", 24, stream=stream, workers=0)
    (black, white), = images.levels.values()
    assert 50 <= black < 70 and 3700 < white < 3900             # the two defective pixels do not matter
    words = "floating-point numbers" if kind == np.float32 else "12 or 16 bits"
    assert f"20 of 21 images have {words}: grey values from {black:g} to {white:g}" in capsys.readouterr().out
    (x, _), = data.test_batches(images, torch.arange(len(images)), 100, "cpu")
    for part in "train", "test":
        for i in range(10):
            expected = np.clip((grey[i] - black) / (white - black) * 255, 0, 255)
            assert np.abs(x[parts[part][i], 1].numpy() - expected).max() <= 1
    assert (x[parts["train"][20]] == 77).all()                  # 8 bits stay as they are


def test_the_scale_does_not_depend_on_test_images_and_ignores_broken_files(tmp_path):
    root = make_deep_folder(tmp_path / "deep", twelve_bits())
    before = data.load(root, "nowhere", 24)[0].levels
    for file in (tmp_path / "deep" / "test").rglob("*.png"):
        Image.fromarray(np.full((24, 24), 60_000, np.uint16)).save(file)
    file = tmp_path / "deep" / "train" / "a" / "cut.png"
    whole = (tmp_path / "deep" / "train" / "a" / "0.png").read_bytes()
    file.write_bytes(whole[:len(whole) // 2])
    assert data.load(root, "nowhere", 24, skip_broken=True)[0].levels == before


def test_16_bits_per_colour_are_noted(tmp_path, capsys):
    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    rows = b"".join(b"\0" + np.full(24 * 3, 4095, ">u2").tobytes() for _ in range(24))
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 24, 24, 16, 2, 0, 0, 0))
    root = make_image_folder(tmp_path / "images", n=3)
    file = tmp_path / "images" / "train" / "ö" / "z.png"
    file.write_bytes(png + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    images, _, parts, _ = data.load(root, "nowhere", 24)
    assert (images[parts["train"][6]] == 15).all() and images.levels == {}
    assert "note: 1 of 7 images have 16 bits per colour" in capsys.readouterr().out


def test_predict_export_and_resume_use_the_scale_of_training(tmp_path, capsys):
    root = make_deep_folder(tmp_path / "deep", twelve_bits())
    run, flags = tmp_path / "run", dict(QUICK, dataset=root, labels=4, image_size=24)
    train_crae.train(**flags, steps=1, out=str(run))
    config, saved = json.loads((run / "config.json").read_text()), evaluate.load_model(run)[1]
    assert saved["levels"] == config["levels"] == data.load(root, "nowhere", 24)[0].levels
    evaluate.use_model("export", str(run), device="cpu")
    assert "first map their grey values from" in capsys.readouterr().out
    extra = {"model.json": ""}
    torch.export.load(run / "model.pt2", extra_files=extra)
    assert json.loads(extra["model.json"])["levels"] == saved["levels"]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "probabilities", lambda net, x, device: seen.append(x) or torch.eye(2)[:1])
        file = tmp_path / "deep" / "test" / "a" / "7.png"
        evaluate.use_model("predict", str(run), str(file), out=str(tmp_path / "p.csv"), device="cpu")
    images, _, parts, _ = data.load(root, "nowhere", 24)
    assert torch.equal(seen[0][0], images[parts["test"][7]]) and seen[0].max() > 100
    assert not evaluate.use_model("test", str(run), device="cpu")["images"] == 0
    assert train_crae.train(**flags, steps=2, out=str(run), resume=True)["step"] == 2
    assert json.loads((run / "config.json").read_text())["levels"] == saved["levels"]
    config["steps"] = 2
    # The run keeps its own scale, even if it is another one; a run without a scale is from before it existed.
    for levels in {"I": [0, 9000]}, None:
        loaded = run_folder.load_data(resumed := saved_as(run, config, levels))
        expected = dict(levels=levels) if levels else {}
        assert {k: v for k, v in resumed.items() if k == "levels"} == expected
        assert loaded[0][9, 0, -1, -1] == (round(3800 * 255 / 9000) if levels else 3800 // 257)


def saved_as(run, config, levels):
    """The config of a run, written to its folder with other levels (None: without)."""
    config = {k: v for k, v in config.items() if k != "levels"} | ({"levels": levels} if levels else {})
    (run / "config.json").write_text(json.dumps(config))
    return dict(config)


# ---------------------------------------------------------------- images that stay on disk


def state_of(folder):
    return {k: v for k, v in torch.load(folder / "last.pt", weights_only=True).items() if k != "run"}


@pytest.mark.slow
def test_a_run_from_disk_has_the_bits_of_a_run_in_memory_with_any_number_of_workers(tmp_path):
    root = make_image_folder(tmp_path / "images", n=12)
    flags = dict(dataset=root, labels="50%", image_size=16, steps=4, flip=True, **QUICK)
    train_crae.train(**flags, out=str(tmp_path / "memory"))
    for workers in 0, 1, 2:
        out = tmp_path / str(workers)
        train_crae.train(**flags, stream=True, workers=workers, out=str(out))
        assert same(state_of(out), state_of(tmp_path / "memory")), workers
        assert rows_of(out) == rows_of(tmp_path / "memory")
    for part, index in np.load(tmp_path / "memory" / "split.npz").items():
        assert np.array_equal(index, np.load(out / "split.npz")[part])


def test_random_crops_only_depend_on_seed_step_and_place(tmp_path):
    """In any order, with any number of workers, from any step on; every epoch crops an image afresh."""
    root = make_image_folder(tmp_path / "images", n=6)
    index = dict(labeled=torch.arange(4), unlabeled=torch.arange(4, 12))

    def batches(workers, first, rank=0, world=1):
        images, labels, *_ = data.load(root, "nowhere", 16, crop="resized", flip=True, workers=workers)
        assert isinstance(images, folders.Files) and images.shape == (24, 3, 16, 16)
        return list(data.training_batches(images, labels, index, 4, 8, range(first, 4), 7, rank, world, 1))

    one = batches(0, 0)
    assert len(one) == 4 and one[0][0].dtype == torch.uint8 and [len(t) for t in one[0]] == [4, 4, 8]
    for again in batches(2, 0), [None, None, *batches(1, 2)]:
        for a, b in zip(one, again):
            assert b is None or all(map(torch.equal, a, b))
    for rank in 0, 1:
        for whole, half in zip(one, batches(0, 0, rank, 2)):
            assert all(torch.equal(w.chunk(2)[rank], h) for w, h in zip(whole, half))
    assert torch.equal(one[0][1].sort().values, one[1][1].sort().values)        # always the same images
    assert not any(torch.equal(a, b) for a in one[0][0] for b in one[1][0])     # but never the same crop
    images, labels, *_ = data.load(root, "nowhere", 16, crop="resized", workers=0)
    index = dict(labeled=torch.zeros(1).long(), unlabeled=torch.arange(2))
    twice, = data.training_batches(images, labels, index, 2, 2, range(1), 7, 0, 1, 1)
    assert not torch.equal(*twice[0])                           # one image at two places of a batch


@pytest.mark.slow
def test_random_crops_have_s4ls_areas_aspect_ratios_and_flips(tmp_path):
    """Red is the row of a pixel and green its column, so a crop shows where it was taken."""
    side = 200
    rows, cols = np.mgrid[:side, :side]
    file = str(tmp_path / "map.png")
    Image.fromarray(np.stack([rows, cols, 0 * rows], -1).astype(np.uint8)).save(file)
    files = folders.Files([file], 32, "resized", True, 0)
    areas, aspects, flips = [], [], 0
    for seed in range(300):
        crop = files[0, seed].double()                          # (32, 32, 3)
        assert torch.equal(files[0, seed].double(), crop)
        height = ((crop[-1, 16, 0] - crop[0, 16, 0]) * 32 / 31).item()
        width = ((crop[16, -1, 1] - crop[16, 0, 1]) * 32 / 31).item()
        flips += width < 0
        areas.append(height * abs(width) / side ** 2)
        aspects.append(abs(width) / height)
    assert 0.04 < min(areas) < 0.075 and 0.9 < max(areas) < 1.1 and 0.4 < np.mean(areas) < 0.6
    assert 0.68 < min(aspects) < 0.85 and 1.2 < max(aspects) < 1.45 and 100 < flips < 200
    files = folders.Files([file], 32, "resized", False, 0)      # without flips
    assert all(files[0, seed][16, -1, 1] > files[0, seed][16, 0, 1] for seed in range(30))


def test_memory_decides_and_the_decision_is_printed(tmp_path, monkeypatch, capsys):
    root = make_image_folder(tmp_path / "images", n=2)
    size = 8 * 3 * 16 * 16

    def load(**reading):
        return data.load(root, "nowhere", 16, **reading)[0]

    for free, kind in (2 * size + 1, torch.Tensor), (2 * size - 1, folders.Files):
        monkeypatch.setattr(devices, "free_memory", lambda device: free)
        images, labels, parts, classes = data.load(root, "nowhere", 16)
        assert isinstance(images, kind) and len(images) == len(labels) == 8
        assert ("held in memory" in capsys.readouterr().out) == (kind is torch.Tensor)
    monkeypatch.setattr(devices, "free_memory", lambda device: 4 * size + 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")                 # each process holds all images
    assert isinstance(load(), torch.Tensor)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert isinstance(load(), folders.Files)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert isinstance(load(stream=False), torch.Tensor)
    with pytest.raises(cli.Refused, match="--nostream: --crop resized"):
        load(stream=False, crop="resized")
    for flags in dict(stream=True), dict(crop="resized"), dict(labels_file="x"):
        with pytest.raises(cli.Refused, match="only applies to image folders"):
            data.load("digits", "nowhere", **flags)


@pytest.mark.slow
def test_broken_files_on_disk_are_found_before_and_during_training(tmp_path, capsys):
    root = make_image_folder(tmp_path / "images", n=6)
    train = tmp_path / "images" / "train"
    bad = train / "ö" / "bad.jpg"
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(bad)
    whole = bad.read_bytes()
    bad.write_bytes(whole[:len(whole) // 2])                    # the header is intact
    with pytest.raises(cli.Refused, match="1 of 25 images cannot be read, .*bad.jpg"):
        data.load(root, "nowhere", 16, stream=True)
    images, *_ = data.load(root, "nowhere", 16, skip_broken=True, stream=True)
    assert len(images) == 24 and "skipping 1 of 25 images" in capsys.readouterr().out
    bad.write_bytes(whole)
    flags = dict(dataset=root, labels=4, image_size=16, steps=3, stream=True, **QUICK)
    real = run_folder.draw_split

    def damage(*args):
        for file in train.rglob("*.png"):
            file.write_bytes(b"")
        return real(*args)

    for workers in 0, 1:
        copy = tmp_path / f"again{workers}"
        make_image_folder(copy, n=6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "draw_split", damage)
            with pytest.raises(cli.Refused, match="^--dataset: .*png can no longer be read ") as stop:
                train_crae.train(**flags, workers=workers, out=str(tmp_path / f"run{workers}"))
        assert "\n" not in str(stop.value)
        for file in train.rglob("*.png"):
            file.write_bytes((copy / file.relative_to(tmp_path / "images")).read_bytes())


# ---------------------------------------------------------------- ImageNet


def make_imagenet(tmp_path, n=6):
    """A small stand-in with the layout of ILSVRC-2012: train/<wnid>/ and val/<wnid>/."""
    wnids = [f"n0000000{c}" for c in range(3)]
    return make_image_folder(tmp_path / "ilsvrc", ("train", "val"), classes=wnids, n=n)


@pytest.mark.slow
@pytest.mark.parametrize("script, flags", [
    (train_crae, {}), (train_baselines, dict(method="s4l")), (train_baselines, dict(method="labeled_only"))])
def test_imagenet_end_to_end(tmp_path, monkeypatch, capsys, script, flags):
    """The preset with smaller sizes: streaming, S4L's crops, SGD, warm-up, learning-rate steps, no EMA."""
    monkeypatch.setitem(presets.IMAGENET_LABELED, "1%", 8)
    monkeypatch.setitem(presets.imagenet_1, "validation", 3)
    row = script.train(dataset="imagenet", data_dir=make_imagenet(tmp_path), labels="1%", steps=10,
                       image_size=32, out=str(tmp_path / "run"), **QUICK, **flags)
    assert "note: 18 training images in " in capsys.readouterr().out    # only a part of ILSVRC-2012
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["resolved"]["images"] == dict(labeled=8, unlabeled=18, validation=3, test=18)
    assert config["epoch"] == 2
    method, crae = flags.get("method"), script is train_crae
    assert config["resolved"]["rotation_heads"] == (3 if crae else int(method == "s4l"))
    assert config["rot_dim"] == (16 if crae else None)
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    heads = {k: tuple(v.shape) for k, v in saved["net"].items() if k.startswith(("red", "rot"))}
    expected = {"rotation.weight": (4, 16), "rotation.bias": (4,)} if method == "s4l" else {}
    if crae:
        expected = {"reduce.weight": (16, 16), "rotation.weight": (12, 16), "rotation.bias": (12,)}
    assert heads == expected
    assert row["lr"] == pytest.approx(0.01 * 1e-3)
    assert row["test_error"] == row["test_error_raw"] == row["median_test_error"]
    assert all(torch.equal(saved["net"][k], saved["ema"][k]) for k in saved["net"])
    group, _ = saved["optimizer"]["param_groups"]
    assert group["momentum"] == 0.9 and not group["nesterov"] and group["weight_decay"] == 0.01


def test_missing_imagenet(tmp_path):
    with pytest.raises(cli.Refused, match="--data_dir nowhere: no such folder"):
        data.load("imagenet", "nowhere", 32, crop="resized")
    message = "--data_dir .*: contains neither train/<wnid>/ and val/<wnid>/ of ILSVRC-2012 nor its archives"
    with pytest.raises(cli.Refused, match=message) as stop:
        data.load("imagenet", str(tmp_path), 32, crop="resized")
    assert "\n" not in str(stop.value)


def test_only_one_process_unpacks_at_a_time(tmp_path):
    with folders.one_at_a_time(tmp_path / "data"):
        with (tmp_path / "data" / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with folders.one_at_a_time("/proc/data"):                   # cannot be written: existing files are read
        pass


def test_methods_that_need_several_views_are_refused_if_there_is_only_one(tmp_path):
    for method in train_baselines.SEVERAL_VIEWS:
        with pytest.raises(cli.Refused, match=f"--method {method}: needs several views"):
            train_baselines.train(method=method, dataset="imagenet", data_dir=str(tmp_path), labels="1%",
                                  device="cpu")

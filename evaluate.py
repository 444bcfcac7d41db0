"""What a trained classifier does: its errors in detail, predictions for your own pictures, and a file without this code.

    python evaluate.py test runs/digits_100_crae_plus_0         error by class, confusion matrix, calibration
    python evaluate.py predict runs/digits_100_crae_plus_0 photos/ more/a.png   to predictions.csv
    python evaluate.py export runs/digits_100_crae_plus_0       a torch.export program, model.pt2

A run is finished when it has a model.pt; its folder is written by train_crae.py and train_baselines.py.
"""
import csv
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import torch
from tqdm import tqdm

import data
import training
from models import make_model

matplotlib.use("Agg")                                           # no screen needed
from matplotlib import pyplot as plt  # noqa: E402

BINS = 15                                                       # Guo et al. 2017: bins of the expected calibration error


def evaluate(what: Literal["test", "predict", "export"], run: str, *images: str, out: str | None = None,
             data_dir: str | None = None, batch: int = 256, device: str | None = None) -> dict:
    """WHAT RUN [IMAGES...]    what is one of
        test            test error, error by class, confusion matrix (confusion.csv, confusion.png), calibration, and with
                        more than ten classes the top-5 error; into RUN/evaluation/
        predict         the class of each picture: files, or folders with all pictures in them; to predictions.csv with
                        file, class, probability, error. A file that cannot be read, or a link in a folder that leads
                        out of it, has an error there, and the command then ends with exit code 1
        export          RUN/model.pt2: torch.export.load(...).module() takes uint8 RGB images (N, 3, S, S), any N, and gives
                        logits (N, C); the names of the classes are its extra file classes.json

    --out           predict: the file to write; without it predictions.csv
    --data_dir      test: where downloaded datasets are kept; without it where the run had them
    --batch         images in one pass
    --device        cpu, cuda, cuda:1; without it cuda where there is one
    --help          this text
    """
    training.refuse_torchrun("evaluate.py")
    run = Path(run)
    if batch < 1:
        sys.exit(f"--batch {batch}: must be 1 or more")
    if images and what != "predict":
        sys.exit(f"{images[0]}: {what} takes no images")
    if out and what != "predict":
        sys.exit(f"--out {out}: is for predict; {what} writes into the run's folder")
    if what == "predict" and not images:
        sys.exit("IMAGES are missing; give files or folders")
    if what == "predict" and not any(map(os.path.exists, images)):
        sys.exit(f"IMAGES {images[0]}: there is no such file or folder")
    device = training.check_device(device)
    net, saved = load_model(run)
    net = net.to(device, memory_format=torch.channels_last)
    if what == "predict":
        return predict(net, saved, images, Path(out or "predictions.csv"), batch, device)
    if what == "export":
        return export(net.cpu(), saved, run)
    return test(net, saved, run, data_dir, batch, device)


def load_model(run):
    """The run's tested classifier, averaged weights, in evaluation mode; and what model.pt says about it."""
    path = run / "model.pt"
    if not path.is_file():
        why = "its run is not finished" if (run / "config.json").exists() else "there is no such run"
        sys.exit(f"RUN {run}: has no model.pt: {why}")
    try:
        saved = training.read_tensors(path)
        net = make_model(saved["arch"], len(saved["classes"]), rot_heads=0, aux=False)
        net.load_state_dict(saved["state"])
        saved["image_size"], saved["classes"], saved["crop"]
        first_stage = saved["method"] == "rotation"
    except Exception as error:                                  # whatever a damaged or foreign file makes torch raise
        sys.exit(f"RUN {run}: its model.pt cannot be read ({data.in_short(error)})")
    if first_stage:
        sys.exit(f"RUN {run}: is the first stage of fine_tune, whose classifier was never trained; the run is {run.parent}")
    return net.eval(), saved


@torch.inference_mode()
def probabilities(net, x, device):
    """p(y|x) for uint8 images (N, 3, S, S). (N, C), on the CPU"""
    return net(data.scale(x.to(device)))[0].float().softmax(-1).cpu()


# ---------------------------------------------------------------- test


def test(net, saved, run, data_dir, batch, device):
    try:
        config = json.loads((run / "config.json").read_text())
        config |= dict(device=device, data_dir=data_dir or config["data_dir"])
        with np.load(run / "split.npz", allow_pickle=False) as split:
            index = torch.as_tensor(split["test"])
        out = run / "evaluation"
        out.mkdir(exist_ok=True)
    except Exception as error:                                  # a file that is missing, damaged or foreign
        sys.exit(f"RUN {run}: its config.json or split.npz cannot be used, or evaluation/ not be made ({training.cause(error)})")
    images, labels, parts, classes = training.load_images(config)
    if classes != saved["classes"] or data.fingerprint(images, labels, parts) != config.get("data"):
        sys.exit(f"RUN {run}: its dataset {config['dataset']} has other images or classes now")
    pieces = tqdm(data.in_pieces(images, index, batch, device), "testing", -(-len(index) // batch), disable=None, leave=False)
    p, y = torch.cat([probabilities(net, x, device) for x, _ in pieces]), labels[index]
    scores = score(p, y)
    matrix = confusion(p.argmax(1), y, len(classes))
    by_class = [{"class": name, "images": int(row.sum()), "error": f"{100 * (1 - row[i] / row.sum()):.2f}" if row.sum() else ""}
                for i, (name, row) in enumerate(zip(classes, matrix))]
    training.write_whole(out / "classes.csv", lambda tmp: training.write_rows(tmp, by_class, "w"))
    rows = [{"true class": name} | dict(zip(classes, row)) for name, row in zip(classes, matrix.tolist())]
    training.write_whole(out / "confusion.csv", lambda tmp: training.write_rows(tmp, rows, "w"))
    training.write_whole(out / "confusion.png", lambda tmp: draw_confusion(matrix, classes, f"{run.name}: {scores['error']:.2f} %", tmp))
    training.write_whole(out / "scores.json", lambda tmp: tmp.write_text(json.dumps(scores, indent=2) + "\n"))
    for row in by_class[:20]:
        print(f"{row['class']:>20}  {row['error']:>6} %  of {row['images']}")
    if len(by_class) > 20:
        print(f"{'...':>20}  {len(by_class) - 20} more in {out / 'classes.csv'}")
    top5 = f", top-5 error {scores['top5_error']:.2f} %" if "top5_error" in scores else ""
    print(f"{run}: test error {scores['error']:.2f} %{top5}, expected calibration error {scores['ece']:.2f} %, {len(y)} images; "
          f"see {out}/")
    return scores


def score(p, y):
    """Error, top-5 error where there are more than ten classes, and expected calibration error, in percent."""
    confidence, guess = p.max(1)
    scores = dict(error=100 * (guess != y).double().mean().item(), images=len(y))
    if p.shape[1] > 10:
        scores["top5_error"] = 100 * (1 - (p.topk(5).indices == y[:, None]).any(1).double().mean().item())
    return scores | dict(ece=100 * calibration_error(confidence, guess == y))


def calibration_error(confidence, right):
    """Guo et al. 2017: |accuracy - mean confidence| in BINS equal bins of confidence, weighted by their images."""
    which = (confidence * BINS).ceil().long().clamp(1, BINS) - 1                # bins (a, b]
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, which, right.double() - confidence.double())
    return (gap.abs().sum() / len(right)).item()


def confusion(guess, y, num_classes):
    """How many images of true class i were taken for j. (C, C)"""
    return torch.bincount(y * num_classes + guess, minlength=num_classes ** 2).view(num_classes, num_classes)


def draw_confusion(matrix, classes, title, path):
    share = matrix / matrix.sum(1, keepdim=True).clamp_min(1)
    C = len(classes)
    size = max(5.5, 0.5 * C) if C <= 20 else 7
    figure, axes = plt.subplots(figsize=(size + 1, size), layout="constrained")
    classes = [name if len(name) < 16 else name[:14] + "…" for name in classes]
    shown = axes.imshow(share.numpy(), vmin=0, vmax=1, cmap="Blues")
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.set_title(title, parse_math=False, fontsize=9)
    if C <= 20:
        for axis, rotation in (axes.xaxis, 90 if max(map(len, classes)) > 2 else 0), (axes.yaxis, 0):
            axis.set_ticks(range(C), classes, rotation=rotation, parse_math=False)
        for i in range(C):
            for j in range(C):
                if matrix[i, j]:
                    axes.text(j, i, int(matrix[i, j]), ha="center", va="center", fontsize=8, color="white" if share[i, j] > 0.5 else "black")
    figure.colorbar(shown, label="share of the true class")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------- predict


def find_images(arguments):
    """Files as they are given, and of a folder all pictures in it, as (file, None), or (file, what is wrong with it)."""
    found = []
    for argument in map(Path, arguments):
        if not argument.exists():
            found.append((argument, "no such file or folder"))
            continue
        if not argument.is_dir():
            found.append((argument, None))
            continue
        inside = sorted(p for p in argument.rglob("*") if p.suffix.lower() in data.ENDINGS and not p.is_dir())
        found += [(p, None if stays_in(p, argument) else "a link that leaves the folder") for p in inside]
        links = [Path(folder, name) for folder, names, _ in os.walk(argument) for name in names if Path(folder, name).is_symlink()]
        found += [(p, "a link that leaves the folder") for p in sorted(links) if not stays_in(p, argument)]      # what it leads to is not read
        if not inside:
            found.append((argument, f"no pictures in it; their names end in {', '.join(data.ENDINGS)}"))
    return found


def stays_in(path, folder):
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))


def read(item, image_size, crop):
    file, problem = item
    try:
        return (None, problem) if problem else (data.decode(file, image_size, crop), None)
    except Exception as error:                                  # PIL raises many things for bad files
        return None, data.in_short(error)


def predict(net, saved, arguments, out, batch, device):
    """One row a file, written batch by batch."""
    files = find_images(arguments)
    failed = 0
    try:
        with out.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file, ThreadPoolExecutor() as pool, tqdm(
                total=len(files), unit="image", disable=None, leave=False) as bar:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["file", "class", "probability", "error"])
            for k in range(0, len(files), batch):
                read_images = list(pool.map(partial(read, image_size=saved["image_size"], crop=saved["crop"]), files[k:k + batch]))
                good = [image for image, _ in read_images if image is not None]
                p = probabilities(net, torch.as_tensor(np.stack(good)).permute(0, 3, 1, 2), device) if good else torch.zeros(0, 1)
                answers = iter(zip(*(v.tolist() for v in p.max(1))))
                for (name, _), (image, problem) in zip(files[k:k + batch], read_images):
                    if image is None:
                        writer.writerow([name, "", "", problem])
                        failed += 1
                    else:
                        probability, c = next(answers)
                        writer.writerow([name, saved["classes"][c], f"{probability:.6f}", ""])
                bar.update(len(read_images))
    except OSError as error:
        sys.exit(f"--out {out}: cannot be written ({error.strerror})")
    print(f"{out}: {len(files) - failed} pictures predicted" + (f", {failed} could not be read (see its column error)" if failed else ""))
    if failed:
        sys.exit(1)
    return dict(predicted=len(files), failed=failed)


# ---------------------------------------------------------------- export


class Classifier(torch.nn.Module):
    """uint8 images to logits, with the scaling inside."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.float() * (2 / 255) - 1)[0]


def export(net, saved, run):
    size = saved["image_size"]
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (5, 3, size, size), dtype=torch.uint8, generator=gen)
    classifier = Classifier(net.to(memory_format=torch.contiguous_format)).eval()
    program = torch.export.export(classifier, (x,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},))
    path = run / "model.pt2"
    training.write_whole(path, lambda tmp: torch.export.save(program, tmp, extra_files={"classes.json": json.dumps(saved["classes"])}))
    loaded = torch.export.load(path).module()
    worst = 0.0
    with torch.inference_mode():
        for n in 1, 2, 5, 64:                                   # the file, not the program in memory, at several sizes
            x = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=gen)
            worst = max(worst, (loaded(x) - net(data.scale(x))[0]).abs().max().item())
    if not worst < 1e-4:
        path.unlink()
        sys.exit(f"RUN {run}: the exported program differs from the model by {worst:g}; it was removed")
    print(f"{path}: takes uint8 (N, 3, {size}, {size}); largest difference of its logits to the model's: {worst:.1g}")
    return dict(path=str(path), difference=worst)


if __name__ == "__main__":
    training.command_line(evaluate)

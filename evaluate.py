"""Use a trained classifier: test it, predict the classes of your images, export it, or show how CRAE works.

    python evaluate.py test runs/digits_100_crae_plus_0
    python evaluate.py predict runs/digits_100_crae_plus_0 photos/ more/a.png
    python evaluate.py export runs/digits_100_crae_plus_0
    python evaluate.py explain runs/digits_100_crae_plus_0 --image 7

A run is finished when its folder contains model.pt. train_crae.py and train_baselines.py write it.
"""
import cli

FLAGS = {
    "what": (("test", "predict", "export", "explain"), cli.WORD, """\
test      test error, error per class, confusion matrix and calibration; with more than
          ten classes also the top-5 error; written to RUN/evaluation/
predict   the class of each image; written to predictions.csv with the columns file,
          class, probability, error. If a file cannot be read, or a link leaves its folder,
          the last column gives the reason, and the exit code is 1
export    a torch.export program, RUN/model.pt2: torch.export.load(...).module() maps uint8
          RGB images (N, 3, S, S) to logits (N, C) for any N; its extra file classes.json
          contains the names of the classes
explain   a figure that shows how CRAE or CRAE+ predicts the rotation of one test image"""),
    "run": (str, cli.WORD, "folder of a finished run"),
    "images": (str, cli.WORDS, "predict: image files, or folders that are searched for images"),
    "image": (int, None, "explain: index of the image in the test set "
                         "(default: the first image whose class and rotations are all predicted correctly)"),
    "out": (str, None, "predict, explain: file to write "
                       "(default: predictions.csv for predict, RUN/evaluation/method.png for explain)"),
    "data_dir": (str, None, "test, explain: folder of downloaded datasets (default: that of the run)"),
    "batch": (int, 256, "images per forward pass"),
    "device": (str, None, "cpu, cuda or cuda:<number> (default: cuda if available)"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import csv
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import augmentation
import data
import devices
import folders
import models
import plots
import run_folder
from losses import log_p_z

BINS = 15                                       # Guo et al. 2017: bins of the expected calibration error


@cli.strict(FLAGS)
def use_model(what, run, images, image, out, data_dir, batch, device):
    """Test a trained classifier, predict with it, export it or explain it. Returns a dict with the result."""
    cli.refuse_torchrun("evaluate.py")
    run = Path(run)
    check_flags(what, images, image, out, batch)
    device = devices.select(device)
    net, saved = load_model(run)
    net = net.to(device, memory_format=torch.channels_last)
    if what == "predict":
        return predict(net, saved, images, Path(out or "predictions.csv"), batch, device)
    if what == "export":
        return export(net.cpu(), saved, run)
    if what == "explain":
        return explain(saved, run, image, out, data_dir, batch, device)
    return test(net, saved, run, data_dir, batch, device)


def check_flags(what, images, image, out, batch):
    """Refuse bad flags before anything is loaded."""
    if batch < 1:
        raise cli.Refused(f"--batch {batch}: must be 1 or more")
    if images and what != "predict":
        raise cli.Refused(f"{images[0]}: {what} takes no images")
    if image is not None and what != "explain":
        raise cli.Refused(f"--image {image}: is for explain only")
    if out and what not in ("predict", "explain"):
        raise cli.Refused(f"--out {out}: is for predict and explain; {what} writes to the run folder")
    if out and what == "explain" and not out.endswith(".png"):
        raise cli.Refused(f"--out {out}: must end in .png")
    if what == "predict" and not images:
        raise cli.Refused("IMAGES are missing; give files or folders")
    if what == "predict" and not any(map(os.path.exists, images)):
        raise cli.Refused(f"IMAGES {images[0]}: no such file or folder")


def load_model(run):
    """The tested classifier of a run, with averaged weights, and all contents of model.pt."""
    path = run / "model.pt"
    if not path.is_file():
        why = "the run is not finished" if (run / "config.json").exists() else "there is no such run"
        raise cli.Refused(f"RUN {run}: has no model.pt; {why}")
    try:
        saved = run_folder.read_tensors(path)
        net = models.make_model(saved["arch"], len(saved["classes"]), rot_heads=0, aux=False)
        net.load_state_dict(saved["state"])
        if not {"method", "image_size", "crop"} <= saved.keys():
            raise ValueError("not written by this repository")
    except Exception as error:                  # torch raises many types for damaged files
        raise cli.Refused(f"RUN {run}: model.pt cannot be read ({cli.reason(error)})")
    if saved["method"] == "rotation":
        raise cli.Refused(f"RUN {run}: is the first stage of fine_tune, whose classifier is untrained; "
                          f"the run is {run.parent}")
    return net.eval(), saved


def load_test_set(saved, run, data_dir, device):
    """The images and labels of a run, and the index of its test images. Refuses data that has changed."""
    try:
        config = json.loads((run / "config.json").read_text())
        config |= dict(device=device, data_dir=data_dir or config["data_dir"])
        with np.load(run / "split.npz", allow_pickle=False) as split:
            index = torch.as_tensor(split["test"])
    except Exception as error:                  # a file is missing or damaged, or not from this repository
        raise cli.Refused(f"RUN {run}: config.json or split.npz cannot be read ({cli.reason(error)})")
    images, labels, parts, classes = run_folder.load_images(config)
    if classes != saved["classes"] or data.fingerprint(images, labels, parts) != config.get("data"):
        raise cli.Refused(f"RUN {run}: the images or classes of its dataset {config['dataset']} have changed")
    return images, labels, index


def make_evaluation(run):
    """Create evaluation/ in the run folder, and return it."""
    try:
        (run / "evaluation").mkdir(exist_ok=True)
    except OSError as error:
        raise cli.Refused(f"RUN {run}: evaluation/ cannot be created in it ({error.strerror})")
    return run / "evaluation"


@torch.inference_mode()
def probabilities(net, x, device):
    """p(y|x) for uint8 images (N, 3, S, S). Returns (N, C) on the CPU."""
    return net(augmentation.scale(x.to(device)))[0].float().softmax(-1).cpu()


# ---------------------------------------------------------------- test


def test(net, saved, run, data_dir, batch, device):
    """Write classes.csv, confusion.csv, confusion.png and scores.json. Returns the scores."""
    classes = saved["classes"]
    images, labels, index = load_test_set(saved, run, data_dir, device)
    out = make_evaluation(run)
    batches = tqdm(data.test_batches(images, index, batch, device), "testing", -(-len(index) // batch),
                   disable=None, leave=False)
    p, y = torch.cat([probabilities(net, x, device) for x, _ in batches]), labels[index]        # (N, C), (N,)
    scores = score(p, y)
    matrix = confusion_matrix(p.argmax(1), y, len(classes))
    per_class = errors_per_class(matrix, classes)
    counts = [{"true class": name} | dict(zip(classes, row)) for name, row in zip(classes, matrix.tolist())]
    title = f"{run.name}: {scores['error']:.2f} %"
    for name, write in {
        "classes.csv": lambda tmp: run_folder.write_rows(tmp, per_class, "w"),
        "confusion.csv": lambda tmp: run_folder.write_rows(tmp, counts, "w"),
        "confusion.png": lambda tmp: plots.plot_confusion(matrix, classes, title, tmp),
        "scores.json": lambda tmp: tmp.write_text(json.dumps(scores, indent=2) + "\n"),
    }.items():
        run_folder.write_whole(out / name, write)
    print_scores(run, out, scores, per_class)
    return scores


def score(p, y):
    """Error, top-5 error (for more than ten classes) and expected calibration error, in percent."""
    confidence, top = p.max(1)
    scores = dict(error=100 * (top != y).double().mean().item(), images=len(y))
    if p.shape[1] > 10:
        scores["top5_error"] = 100 * (1 - (p.topk(5).indices == y[:, None]).any(1).double().mean().item())
    return scores | dict(ece=100 * calibration_error(confidence, top == y))


def calibration_error(confidence, right):
    """Guo et al. 2017: |accuracy - mean confidence| in BINS bins of equal width, weighted by image counts."""
    which = (confidence * BINS).ceil().long().clamp(1, BINS) - 1                # bins (a, b]
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, which, right.double() - confidence.double())
    return (gap.abs().sum() / len(right)).item()


def confusion_matrix(predicted, y, num_classes):
    """Entry (i, j): how many images of class i were predicted as class j. (C, C)"""
    counts = torch.bincount(y * num_classes + predicted, minlength=num_classes ** 2)
    return counts.view(num_classes, num_classes)


def errors_per_class(matrix, classes):
    """The rows of classes.csv; a class without test images has no error."""
    rows = []
    for i, (name, counts) in enumerate(zip(classes, matrix)):
        n = int(counts.sum())
        rows.append({"class": name, "images": n, "error": f"{100 * (1 - counts[i] / n):.2f}" if n else ""})
    return rows


def print_scores(run, out, scores, per_class):
    for row in per_class[:20]:
        print(f"{row['class']:>20}  {row['error']:>6} %  of {row['images']}")
    if len(per_class) > 20:
        print(f"{'...':>20}  {len(per_class) - 20} more in {out / 'classes.csv'}")
    top5 = f", top-5 error {scores['top5_error']:.2f} %" if "top5_error" in scores else ""
    print(f"{run}: test error {scores['error']:.2f} %{top5}, "
          f"expected calibration error {scores['ece']:.2f} %, {scores['images']} images; see {out}/")


# ---------------------------------------------------------------- predict


def predict(net, saved, arguments, out, batch, device):
    """Write one row per file, batch by batch. Raises Refused at the end if some files could not be read."""
    files = find_images(arguments)
    failed = 0
    decode = partial(try_decode, image_size=saved["image_size"], crop=saved["crop"])
    try:
        with (out.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
              ThreadPoolExecutor() as pool,
              tqdm(total=len(files), unit="image", disable=None, leave=False) as bar):
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["file", "class", "probability", "error"])
            for k in range(0, len(files), batch):
                decoded = list(pool.map(decode, files[k:k + batch]))
                rows = prediction_rows(net, saved["classes"], files[k:k + batch], decoded, device)
                writer.writerows(rows)
                failed += sum(bool(problem) for *_, problem in rows)
                bar.update(len(rows))
    except OSError as error:
        raise cli.Refused(f"--out {out}: cannot be written ({error.strerror})")
    good = len(files) - failed
    unread = f", {failed} could not be read (see the error column)" if failed else ""
    print(f"{out}: {good} image{'' if good == 1 else 's'} predicted{unread}")
    if failed:
        raise cli.Refused(f"{failed} of {len(files)} files could not be read; {out} lists the reasons")
    return dict(predicted=len(files), failed=failed)


def prediction_rows(net, classes, files, decoded, device):
    """The rows (file, class, probability, error) of one batch."""
    good = [image for image, _ in decoded if image is not None]                 # (S, S, 3) each
    answers = iter(())
    if good:
        x = torch.as_tensor(np.stack(good)).permute(0, 3, 1, 2)
        answers = zip(*(v.tolist() for v in probabilities(net, x, device).max(1)))
    rows = []
    for (file, _), (image, problem) in zip(files, decoded):
        if image is None:
            rows.append([file, "", "", problem])
        else:
            probability, c = next(answers)
            rows.append([file, classes[c], f"{probability:.6f}", ""])
    return rows


def find_images(arguments):
    """The given files and all images in the given folders: (file, None), or (file, what is wrong with it)."""
    found = []
    for argument in map(Path, arguments):
        if not argument.exists():
            found.append((argument, "no such file or folder"))
        elif argument.is_dir():
            found += images_in(argument)
        else:
            found.append((argument, None))
    return found


def images_in(folder):
    """All images in a folder. Links that leave the folder are listed, but not followed."""
    outside = "a link that leaves the folder"
    inside = sorted(p for p in folder.rglob("*") if p.suffix.lower() in folders.ENDINGS and not p.is_dir())
    found = [(p, None if stays_in(p, folder) else outside) for p in inside]
    subfolders = [Path(parent, name) for parent, names, _ in os.walk(folder) for name in names]
    found += [(p, outside) for p in sorted(subfolders) if p.is_symlink() and not stays_in(p, folder)]
    if not inside:
        found.append((folder, f"contains no images; their names must end in {', '.join(folders.ENDINGS)}"))
    return found


def stays_in(path, folder):
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))


def try_decode(item, image_size, crop):
    """Returns (image, None), or (None, what is wrong with the file)."""
    file, problem = item
    try:
        return (None, problem) if problem else (folders.decode(file, image_size, crop), None)
    except Exception as error:                  # PIL raises many types for broken files
        return None, cli.reason(error)


# ---------------------------------------------------------------- export


class Classifier(torch.nn.Module):
    """uint8 images to logits, including the scaling."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.float() * (2 / 255) - 1)[0]


def export(net, saved, run):
    """Write model.pt2, read it back and compare it with the model at several batch sizes."""
    size = saved["image_size"]
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (5, 3, size, size), dtype=torch.uint8, generator=gen)
    classifier = Classifier(net.to(memory_format=torch.contiguous_format)).eval()
    program = torch.export.export(classifier, (x,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},))
    path, extra = run / "model.pt2", {"classes.json": json.dumps(saved["classes"])}
    run_folder.write_whole(path, lambda tmp: torch.export.save(program, tmp, extra_files=extra))
    loaded = torch.export.load(path).module()   # the file, not the program in memory
    worst = 0.0
    with torch.inference_mode():
        for n in 1, 2, 5, 64:
            x = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=gen)
            worst = max(worst, (loaded(x) - net(augmentation.scale(x))[0]).abs().max().item())
    if not worst < 1e-4:
        path.unlink()
        raise cli.Refused(f"RUN {run}: the exported program differs from the model by {worst:g}; "
                          "it was removed")
    print(f"{path}: takes uint8 images (N, 3, {size}, {size}); "
          f"its logits differ from the model's by at most {worst:.1g}")
    return dict(path=str(path), difference=worst)


# ---------------------------------------------------------------- explain


def explain(saved, run, image, out, data_dir, batch, device):
    """Plot p(y|x), the rotation heads R_k(z|x) and p(z|x) for the four rotations of one test image."""
    net = load_with_heads(saved, run).to(device, memory_format=torch.channels_last)
    images, labels, index = load_test_set(saved, run, data_dir, device)
    if image is None:
        image = first_correct(net, images, labels, index, batch, device)
    if not 0 <= image < len(index):
        raise cli.Refused(f"--image {image}: must be from 0 to {len(index) - 1}, the images of the test set")
    (x, i), = data.test_batches(images, index[image:image + 1], 1, device)
    copies, _, p_y, R, p_z = predict_rotations(net, x)          # of one image: 4 copies
    numbers = [v.cpu().numpy() for v in (copies.permute(0, 2, 3, 1), p_y, R, p_z)]
    classes, y = saved["classes"], labels[i].item()
    path = Path(out) if out else make_evaluation(run) / "method.png"
    run_folder.write_whole(path, lambda tmp: plots.plot_method(*numbers, classes, y, tmp))
    true = ", ".join(f"{p:.2f}" for p in p_z.diagonal().tolist())
    print(f"{path}: test image {image}, class {classes[y]}; p(z|x) of the true rotation: {true}")
    return dict(path=str(path), image=image)


def load_with_heads(saved, run):
    """The averaged network with its class-conditional rotation heads, which only the checkpoint contains."""
    C = len(saved["classes"])
    try:
        config = json.loads((run / "config.json").read_text())
        heads = config["resolved"]["rotation_heads"]
        conditional = heads == C and config.get("select") in ("marginal", "detach")
    except Exception as error:                  # a file is missing or damaged, or not from this repository
        raise cli.Refused(f"RUN {run}: config.json cannot be read ({cli.reason(error)})")
    if not conditional:
        raise cli.Refused(f"RUN {run}: its method {saved['method']} has no class-conditional rotation heads; "
                          "give a run of CRAE or CRAE+")
    try:
        aux = config["aux"] not in (False, "none")              # False in runs before --aux had choices
        net = models.make_model(config["arch"], C, heads, config["rot_dim"], aux)
        net.load_state_dict(run_folder.read_tensors(run / "last.pt")["ema"])
    except Exception as error:                  # torch raises many types for damaged files
        raise cli.Refused(f"RUN {run}: last.pt, which contains the rotation heads, cannot be read "
                          f"({cli.reason(error)})")
    return net.eval()


@torch.inference_mode()
def predict_rotations(net, x):
    """The four rotations of images (n, 3, S, S), z (4n,), p(y|x) (4n, C), R (4n, C, 4), p(z|x) (4n, 4)."""
    copies, z = augmentation.rotate4(x)
    class_logits, _, rot_logits = net(augmentation.scale(copies))
    p_y, R = class_logits.float().softmax(-1), rot_logits.float().softmax(-1)
    return copies, z, p_y, R, log_p_z(class_logits, rot_logits).exp()           # Eq. 1


def first_correct(net, images, labels, index, batch, device):
    """The first test image whose class and rotation are right for all four copies; 0 if there is none."""
    before = 0
    for x, i in data.test_batches(images, index, batch, device):
        _, z, p_y, _, p_z = predict_rotations(net, x)
        y = labels[i].to(device).repeat(4)                      # (4n,)
        right = ((p_y.argmax(1) == y) & (p_z.argmax(1) == z)).view(4, -1).all(0)                # (n,)
        if right.any():
            return before + right.nonzero()[0].item()
        before += len(i)
    return 0


if __name__ == "__main__":
    cli.run(use_model, ARGUMENTS)

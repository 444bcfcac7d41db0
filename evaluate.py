"""Use a trained classifier: test it, predict the classes of your images, export it, or show how CRAE works.

    python evaluate.py test runs/digits_100_crae_plus_0
    python evaluate.py predict runs/digits_100_crae_plus_0 photos/ more/a.png
    python evaluate.py embed runs/digits_100_crae_plus_0 photos/
    python evaluate.py export runs/digits_100_crae_plus_0
    python evaluate.py explain runs/digits_100_crae_plus_0 --image 7

A run is finished when its folder contains model.pt. train_crae.py and train_baselines.py write it.
"""
import cli

FLAGS = {
    "what": (("test", "predict", "embed", "export", "explain"), cli.WORD, """\
test      test error with its 95 % interval, balanced accuracy, AUC and calibration; error,
          precision, recall and AUC per class; with more than ten classes also the top-5
          error; confusion matrix, every prediction and a sheet of the wrong ones; written to
          RUN/evaluation/
predict   the class of each image; written to predictions.csv with the columns file, class,
          probability, error and one column per class, and to a sheet, predictions.png. If a
          file cannot be read, or a link leaves its folder, the column error gives the reason,
          and the exit code is 1
embed     the features of each image, the output of the backbone; written to embeddings.npz
          with the arrays files (N,) and features (N, F). Without IMAGES: the test set of the
          run, with its classes in the array labels (N,)
export    a torch.export program, RUN/model.pt2: torch.export.load(...).module() maps uint8
          RGB images (N, 3, S, S) to logits (N, C) for any N; its extra file model.json
          contains the names of the classes, the size S and, if the images had more than 8
          bits, the grey values that were mapped to 0 and 255 (docs/runs.md)
explain   a figure that shows how CRAE or CRAE+ predicts the rotation of one test image"""),
    "run": (str, cli.WORD, "folder of a finished run"),
    "images": (str, cli.WORDS, "predict, embed: image files, or folders that are searched for images"),
    "other": (str, None, "test: test on other labelled images of the same classes, a folder OTHER/<class>/*, "
                         "OTHER/test/<class>/* or OTHER/val/<class>/*, or an .npz file with test_images and "
                         "test_labels; "
                         "written to RUN/evaluation/other_<name>/"),
    "top": (int, None, "test, predict: the TOP most probable classes instead of one column per class"),
    "image": (int, None, "explain: index of the image in the test set "
                         "(default: the first image whose class and rotations are all predicted correctly)"),
    "out": (str, None, "predict, embed, explain: file to write (default: predictions.csv, embeddings.npz, "
                       "RUN/evaluation/method.png)"),
    "force": (bool, False, "predict, embed: overwrite the file if it exists"),
    "dataset": (str, None, "test, embed, explain: where the run's folder or .npz file is now, "
                           "if it was moved"),
    "data_dir": (str, None, "test, embed, explain: folder of downloaded datasets (default: that of the run)"),
    "batch": (int, 256, "images per forward pass"),
    "device": (str, None, "cpu, cuda or cuda:<number> (default: cuda if available)"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import augmentation
import data
import devices
import exports
import folders
import listing
import metrics
import models
import plots
import predictions
import run_folder
import sheets
from losses import log_p_z

# Which commands a flag is for, and what the name of the file must end in.
ONLY = dict(images=("predict", "embed"), other=("test",), top=("test", "predict"), image=("explain",),
            out=("predict", "embed", "explain"), force=("predict", "embed"),
            dataset=("test", "embed", "explain"))
ENDING = dict(predict=".csv", embed=".npz", explain=".png")


@cli.strict(FLAGS)
def use_model(what, run, **flags):
    """Test a trained classifier, predict with it, export it or explain it. Returns a dict with the result."""
    cli.refuse_torchrun("evaluate.py")
    run = Path(run)
    check_flags(what, **flags)
    device, batch = devices.select(flags["device"]), flags["batch"]
    place = dict(dataset=flags["dataset"], data_dir=flags["data_dir"], device=device)
    net, saved = load_model(run)
    check_top(flags["top"], saved["classes"])
    net = net.to(device, memory_format=torch.channels_last)
    with predictions.quiet():
        if what == "predict":
            out = Path(flags["out"] or "predictions.csv")
            return predict(net, saved, flags["images"], out, flags["top"], batch, device)
        if what == "embed":
            out = Path(flags["out"] or "embeddings.npz")
            return embed(net, saved, run, flags["images"], out, place, batch)
        if what == "export":
            return exports.write_program(net.cpu(), saved, run)
        if what == "explain":
            return explain(saved, run, flags["image"], flags["out"], place, batch)
        return test(net, saved, run, flags["other"], flags["top"], place, batch)


def check_flags(what, images, out, force, batch, **flags):
    """Refuse bad flags before anything is loaded."""
    if batch < 1:
        raise cli.Refused(f"--batch {batch}: must be 1 or more")
    if images and what not in ONLY["images"]:
        raise cli.Refused(f"{images[0]}: {what} takes no images; predict and embed do")
    for name, value in dict(flags, out=out, force=force or None).items():
        if value is not None and name in ONLY and what not in ONLY[name]:
            *first, last = ONLY[name]
            these = f"{', '.join(first)} and {last}" if first else last
            raise cli.Refused(f"--{name} {value}: is for {these} only; omit it")
    if out and not out.endswith(ENDING[what]):
        raise cli.Refused(f"--out {out}: must end in {ENDING[what]}")
    if what == "predict" and not images:
        raise cli.Refused("IMAGES are missing; give files or folders")
    if images and not any(map(os.path.exists, images)):
        raise cli.Refused(f"IMAGES {images[0]}: no such file or folder")
    if what in ONLY["force"] and not force:
        refuse_to_overwrite(Path(out or dict(predict="predictions.csv", embed="embeddings.npz")[what]))


def refuse_to_overwrite(out):
    """Refuse a table, or the sheet next to it, that exists."""
    for path in out, predictions.sheet_of(out):
        if path.exists() and (path == out or out.suffix == ".csv"):
            which = "" if path == out else f"{path} "
            raise cli.Refused(f"--out {out}: {which}already exists; give --force to overwrite it, "
                              "or another --out")


def check_top(top, classes):
    if top is not None and not 1 <= top <= len(classes):
        raise cli.Refused(f"--top {top}: must be from 1 to {len(classes)}, the number of classes")


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


def load_test_set(saved, run, dataset=None, data_dir=None, device="cpu"):
    """The images, labels and parts of a run, and the index of its test images. Refuses changed data."""
    try:
        config = json.loads((run / "config.json").read_text())
        config |= dict(device=device, data_dir=data_dir or config["data_dir"], out=str(run))
        with np.load(run / "split.npz", allow_pickle=False) as split:
            index = torch.as_tensor(split["test"])
    except Exception as error:                  # a file is missing or damaged, or not from this repository
        raise cli.Refused(f"RUN {run}: config.json or split.npz cannot be read ({cli.reason(error)})")
    return *run_folder.load_again(config, saved["classes"], dataset), index


def names_of(images, parts, index):
    """The files of these images; for arrays, the part and the place in it, such as test[17]."""
    if hasattr(images, "files"):
        return [str(images.files[i]) for i in index]
    names = {int(i): f"{part}[{k}]" for part, numbers in parts.items() for k, i in enumerate(numbers)}
    return [names[int(i)] for i in index]


def make_evaluation(run, other=None):
    """Create evaluation/ in the run folder, for --other a folder in it, and return it."""
    folder = run / "evaluation"
    if other:
        folder /= f"other_{os.path.basename(os.path.abspath(other)).removesuffix('.npz')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cli.Refused(f"RUN {run}: {folder.relative_to(run)}/ cannot be created in it ({error.strerror})")
    return folder


# ---------------------------------------------------------------- test


def test(net, saved, run, other, top, place, batch):
    """Write predictions.csv, wrong.png, classes.csv, confusion.csv and .png, scores.json. Returns the scores.

    other: None for the test set of the run, or the path to other labelled images. place: where the data is.
    """
    classes, device = saved["classes"], place["device"]
    if other:
        images, labels, names = predictions.load_other(other, saved, decoder(saved))
        index = torch.arange(len(labels))
    else:
        images, labels, parts, index = load_test_set(saved, run, **place)
        names = names_of(images, parts, index)
    out = make_evaluation(run, other)
    batches = tqdm(data.test_batches(images, index, batch, device), "testing", -(-len(index) // batch),
                   disable=None, leave=False)
    p = torch.cat([predictions.probabilities(net, x, device) for x, _ in batches])              # (N, C)
    y = labels[index]                                                                           # (N,)
    scores, matrix = metrics.scores_of(p, y), metrics.confusion_matrix(p.argmax(1), y, len(classes))
    per_class = metrics.class_rows(matrix, p, y, classes)
    counts = [{"true class": name} | dict(zip(classes, row)) for name, row in zip(classes, matrix.tolist())]
    rows = predictions.tested_rows(names, y, p, classes, top)
    title = f"{run.name}{f' on {other}' if other else ''}: {scores['error']:.2f} %"
    for name, write in {
        "predictions.csv": lambda tmp: run_folder.write_rows(tmp, rows, "w"),
        "classes.csv": lambda tmp: run_folder.write_rows(tmp, per_class, "w"),
        "confusion.csv": lambda tmp: run_folder.write_rows(tmp, counts, "w"),
        "confusion.png": lambda tmp: plots.plot_confusion(matrix, classes, title, tmp),
        "scores.json": lambda tmp: tmp.write_text(json.dumps(scores, indent=2) + "\n"),
    }.items():
        run_folder.write_whole(out / name, write)
    predictions.write_wrong(images, index, names, p, y, classes, out / "wrong.png")
    print_scores(f"{run}{f' on {other}' if other else ''}", out, scores, per_class)
    predicted = p.argmax(1).unique()
    if len(predicted) == 1:
        print(f"warning: the model predicts class {classes[predicted]} for every image; train it longer, "
              "or check the labels", file=sys.stderr)
    return scores


def print_scores(name, out, scores, per_class):
    """One line per class, at most 20, and one line for all of them."""
    columns = [k for k in per_class[0] if k != "class"]
    print(f"{'class':>20}" + "".join(f"{column:>11}" for column in columns))
    for row in per_class[:20]:
        print(f"{plots.shorten(row['class'], 20):>20}" + "".join(f"{row[column]:>11}" for column in columns))
    if len(per_class) > 20:
        print(f"{'...':>20}  {len(per_class) - 20} more in {out / 'classes.csv'}")
    top5 = f", top-5 error {scores['top5_error']:.2f} %" if "top5_error" in scores else ""
    auc = "" if scores["auc"] is None else f", AUC {scores['auc']:.4f}"
    print(f"{name}: test error {scores['error']:.2f} % (95 % interval {scores['error_low']:.2f} to "
          f"{scores['error_high']:.2f} %, {scores['images']} images){top5}, balanced accuracy "
          f"{scores['balanced_accuracy']:.2f} %{auc}, expected calibration error {scores['ece']:.2f} %; "
          f"see {out}/")


# ---------------------------------------------------------------- predict, embed


def decoder(saved):
    """try_decode with the values of a run."""
    return partial(try_decode, image_size=saved["image_size"], crop=saved["crop"], levels=saved.get("levels"))


def predict(net, saved, arguments, out, top, batch, device):
    """Write one row per file, batch by batch. Raises Refused at the end if some files could not be read."""
    files = find_images(arguments)
    classify = partial(predictions.probabilities, net, device=device)
    try:
        failed = predictions.write_predictions(files, decoder(saved), classify, saved["classes"], top, out,
                                               batch)
    except OSError as error:
        raise cli.Refused(f"--out {out}: cannot be written ({error.strerror})")
    sheet = f"; {predictions.sheet_of(out)} shows them" if failed < len(files) else ""
    report_unread(out, len(files), failed, "predicted", "lists the reasons", sheet)
    return dict(predicted=len(files), failed=failed)


def report_unread(out, n, failed, done, where, more=""):
    """Print how many of n images were read. Raises Refused if some could not be read."""
    good = n - failed
    unread = f", {failed} could not be read" if failed else ""
    print(f"{out}: {good} image{'' if good == 1 else 's'} {done}{unread}{more}")
    if failed:
        raise cli.Refused(f"{failed} of {n} files could not be read; {out} {where}")


def embed(net, saved, run, arguments, out, place, batch):
    """Write the features of images, or of the test set of the run, to an .npz file; then as `predict`."""
    device, problems = place["device"], {}
    features = partial(predictions.features_of, net, device=device)
    if arguments:
        decoded = predictions.decoded_batches(find_images(arguments), decoder(saved), batch)
        arrays, problems = predictions.features_of_files(decoded, features, net.backbone.num_features)
    else:
        images, labels, parts, index = load_test_set(saved, run, **place)
        rows = [features(x) for x, _ in data.test_batches(images, index, batch, device)]
        arrays = dict(files=names_of(images, parts, index), features=torch.cat(rows).numpy(),
                      labels=[saved["classes"][c] for c in labels[index]])
    run_folder.write_whole(out, lambda tmp: np.savez(tmp, **arrays))
    for path, problem in problems.items():
        print(f"cannot read {path}: {problem}", file=sys.stderr)
    n, F = arrays["features"].shape
    report_unread(out, n + len(problems), len(problems), f"with {F} features each", "does not contain them")
    return dict(embedded=n, failed=len(problems))


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
    """All images in a folder, and files that look like images.

    As in training, hidden folders are ignored. Links that leave the folder are not followed.
    """
    outside = "a link that leaves the folder"
    files = sorted(p for p in folder.rglob("*") if not p.is_dir())
    visible = [p for p in files if not listing.is_in_hidden_folder(str(p), folder)]
    inside = [p for p in visible if listing.is_image(p)]
    found = [(p, None if stays_in(p, folder) else outside) for p in inside]
    unread = [(p, listing.why_unread(p)) for p in visible if listing.why_unread(p)]
    found += unread
    others = len(files) - len(found)
    if others:
        print(f"{folder}: {others} other file{'' if others == 1 else 's'} ignored")
    subfolders = [Path(parent, name) for parent, names, _ in os.walk(folder) for name in names]
    found += [(p, outside) for p in sorted(subfolders) if p.is_symlink() and not stays_in(p, folder)]
    if not inside and not unread:
        endings = ", ".join(listing.endings())
        found.append((folder, f"contains no images; their names must end in {endings}"))
    return found


def stays_in(path, folder):
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))


def try_decode(item, image_size, crop, levels=None):
    """Returns (image, None), or (None, what is wrong with the file)."""
    file, problem = item
    try:
        return (None, problem) if problem else (folders.decode(file, image_size, crop, levels), None)
    except Exception as error:                  # PIL raises many types for broken files
        return None, listing.why_unread(file) or cli.reason(error)


# ---------------------------------------------------------------- explain


def explain(saved, run, image, out, place, batch):
    """Plot p(y|x), the rotation heads R_k(z|x) and p(z|x) for the four rotations of one test image."""
    device = place["device"]
    net = load_with_heads(saved, run).to(device, memory_format=torch.channels_last)
    images, labels, _, index = load_test_set(saved, run, **place)
    if image is None:
        image = first_correct(net, images, labels, index, batch, device)
    if not 0 <= image < len(index):
        raise cli.Refused(f"--image {image}: must be from 0 to {len(index) - 1}, the images of the test set")
    (x, i), = data.test_batches(images, index[image:image + 1], 1, device)
    copies, _, p_y, R, p_z = predict_rotations(net, x)          # of one image: 4 copies
    numbers = [v.cpu().numpy() for v in (copies.permute(0, 2, 3, 1), p_y, R, p_z)]
    classes, y = saved["classes"], labels[i].item()
    path = Path(out) if out else make_evaluation(run) / "method.png"
    run_folder.write_whole(path, lambda tmp: sheets.plot_method(*numbers, classes, y, tmp))
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

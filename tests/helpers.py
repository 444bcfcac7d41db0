"""What several test files share: a tiny model, flags for short runs, calls of scripts, and comparisons."""
import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import cli
import data
import run_folder

HERE = Path(__file__).parent.parent                             # the repository
# The smallest network, for a few steps of the paper's recipe; tests/test_recipe.py has runs of the fast one.
QUICK = dict(recipe="paper", batch=4, arch="wrn-10-0.25", device="cpu")
FOUR_STEPS = dict(QUICK, steps=4)


def words_of(**flags):
    """Flags as words of a command line: words_of(steps=4) == ["--steps=4"]."""
    return [f"--{name}={value}" for name, value in flags.items()]


def run_script(script, *words, cwd=None, **more):
    """Run a script as a user would, in a process of its own."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **more)


def command_line(module, words, function=None):
    """Do what `python module.py words` does, in this process; function: the script's main function."""
    before = signal.getsignal(signal.SIGINT)
    try:
        return cli.run(function or module.train, cli.parse(module.FLAGS, module.__doc__, list(words)))
    finally:
        signal.signal(signal.SIGINT, before)


class Linear(nn.Module):
    """A model without BN, so that the logits of an image do not depend on the rest of the batch.

    Class logits, additional class logits (None without aux) and logits of K rotation heads; S x S images.
    """

    def __init__(self, S, C, K, aux=False, seed=0, sureness=1):
        super().__init__()
        torch.manual_seed(seed)
        self.y = nn.Linear(3 * S * S, C)
        self.aux = nn.Linear(3 * S * S, C) if aux else None
        self.R = nn.Linear(3 * S * S, 4 * K)
        self.y.weight.data *= sureness                          # above 1, some predictions are confident

    def forward(self, x, detach=None, detach_heads=False):      # there are no features to detach from
        x = x.flatten(1)
        return self.y(x), self.aux(x) if self.aux else None, self.R(x).unflatten(1, (-1, 4))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def random_images(n, size=8, seed=0):
    """uint8 images (n, 3, size, size)."""
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=generator(seed))


def make_image_folder(root, parts=("train", "test"), classes=("a b", "ö"), n=6):
    """Write n random images per part and class to root/<part>/<class>/<i>.png. Returns the root as str."""
    rng = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i in range(n):
                image = Image.fromarray(rng.integers(0, 256, (20, 30, 3), np.uint8))
                image.save(root / part / name / f"{i}.png")
    return str(root)


def tiny_batch(y_l, unlabeled, size):
    """Random images x_l with the labels y_l, and x_u, for objectives."""
    x = random_images(len(y_l) + unlabeled, size, seed=1)
    return x[:len(y_l)], torch.tensor(y_l), x[len(y_l):]


def digits_batch(n, mu=1):
    """n labelled digits with their labels, and mu * n others."""
    images, labels, *_ = data.load("digits", "nowhere")
    return images[:n], labels[:n], images[n:n + mu * n]


def assert_same_terms(terms, expected, model, slow, rtol=1e-4):
    """Assert that loss terms of `model`, and their gradients, equal those of its float64 copy `slow`.

    Returns, for each term, the names of the modules that it sends gradient into.
    """
    assert terms.keys() == expected.keys()
    reached = {}
    for name in terms:
        torch.testing.assert_close(terms[name].double(), expected[name], atol=1e-5, rtol=rtol)
        gradients = [torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, retain_graph=True)
                     for loss, net in ((terms[name], model), (expected[name], slow))]
        reached[name] = set()
        for (parameter, _), g, h in zip(model.named_parameters(), *gradients):
            assert (g is None) == (h is None), (name, parameter)
            if g is not None:
                torch.testing.assert_close(g.double(), h, atol=1e-5, rtol=10 * rtol)
                reached[name].add(parameter.split(".")[0])
    return reached


def rows_of(folder):
    """log.csv without the times."""
    with Path(folder, "log.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}
                for row in csv.DictReader(file)]


def everything_in(folder):
    """All files of a run and of its stages, without times and without the checkpoint before the last."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".csv":
            with path.open() as file:
                found[name] = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")}
                               for row in csv.DictReader(file)]
        elif path.suffix == ".npz":
            found[name] = {k: torch.as_tensor(v) for k, v in np.load(path).items()}
        elif path.name in ("last.pt", "model.pt"):
            found[name] = torch.load(path, weights_only=True)
            found[name].get("run", {}).pop("seconds", None)
        elif path.name == "data.png":
            found[name] = torch.as_tensor(np.array(Image.open(path)))
        elif path.name == "curve.png":
            found[name] = path.exists()
    return found


def same(a, b):
    """Whether two nested results are equal, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# The methods of train_baselines.py in the order of its help, and the terms of their losses.
BASELINES = dict(
    labeled_only=["class"], fine_tune=["class"], s4l=["class", "rotation"], pi_model=["class", "consistency"],
    pseudo_label=["class", "pseudo"], mixup=["class", "mixup"], vat=["class", "vat", "entropy"],
    mean_teacher=["class", "consistency"], mixmatch=["class", "guess"], ict=["class", "consistency"],
    swa=["class", "consistency"], fixmatch=["class", "pseudo"])


def save_few_digits(path):
    """An npz file with two digits of each class as training, test and unlabelled images. Returns its name."""
    images, labels, *_ = data.load("digits", "nowhere")
    few = torch.cat([(labels == c).nonzero()[:2, 0] for c in range(10)])
    x, y = images[few].permute(0, 2, 3, 1).numpy(), labels[few].numpy()
    np.savez(path, train_images=x, train_labels=y, test_images=x, test_labels=y, unlabeled_images=x)
    return str(path)


def make_run(folder, method="crae", dataset="digits", labels=50, seed=0, errors=(30.0, 20.0), changed=(),
             rot_dim=None, finished=True, heads=3, diversity=True, name=None, tested=200):
    """Write the files of a run that report.py reads, with one evaluation per error. Returns its folder."""
    changed = dict(changed)
    others = "_".join(map(str, [*changed.values(), rot_dim]))
    path = folder / (name or f"{dataset}_{labels}_{method}_{seed}_{others}")
    path.mkdir(parents=True)
    steps = 20 * len(errors) if finished else 20 * len(errors) + 20
    config = dict(method=method, dataset=dataset, labels=labels, seed=seed, steps=steps, epoch=20,
                  rot_dim=rot_dim, changed=changed | (dict(rot_dim=rot_dim) if rot_dim else {}),
                  resolved=dict(rotation_heads=heads, num_classes=3, parameters=1000 + (rot_dim or 0),
                                images=dict(labeled=50, test=tested)))
    (path / "config.json").write_text(json.dumps(config))
    rows = [dict(step=20 * (i + 1), epoch=i + 1, seconds=30.0 * (i + 1), test_error=e, unlabeled_error=e + 1,
                 rotation_accuracy=50) for i, e in enumerate(errors)]
    run_folder.write_rows(path / "log.csv", rows, "w")
    if diversity:
        shares = [[0.8, 0.15, 0.15], [0.05, 0.8, 0.15], [0.05, 0.05, 0.8]]      # one row per class
        for i in range(len(errors)):
            matrix = [{"step": 20 * (i + 1), "class": name}
                      | {f"head_{j}": share / (1 + i) for j, share in enumerate(row)}
                      for name, row in zip(("cat", "dog", "$x$"), shares)]
            run_folder.write_rows(path / "diversity.csv", matrix, "a")
    return path


def change_config(run, **values):
    path = run / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))

"""What unlabelled images are worth: labelled-only and CRAE+ on digits with 50 labels, side by side.

    python demo.py                              trains both, prints both errors and draws demo.png

The two are ordinary runs of train_baselines.py and train_crae.py. Finished runs are not repeated.
"""
import cli

FLAGS = {
    "labels": (int, 50, "number of labelled images"),
    "seed": (int, 0, "seed of the split, the weights and the batches"),
    "steps": (int, None, "training steps of each run (default: the preset's)"),
    "out": (str, "runs", "folder of the two runs and of demo.png"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)      # before torch is imported: a mistyped flag is reported at once

import json
from pathlib import Path

import evaluate
import predictions
import run_folder
import sheets
import train_baselines
import train_crae

EXAMPLES = 12                                   # test images in the figure; we chose what fits


@cli.strict(FLAGS)
def compare(labels, seed, steps, out):
    """Train both models, print their errors and draw demo.png. Returns the two errors."""
    folder = Path(out)
    common = dict(labels=labels, seed=seed, steps=steps, resume=True)
    runs = {"labelled images only": folder / f"demo_labeled_only_{labels}_{seed}",
            "CRAE+": folder / f"demo_crae_plus_{labels}_{seed}"}
    alone, plus = runs.values()
    print("1 of 2: labelled images only", flush=True)
    train_baselines.train(method="labeled_only", out=str(alone), **common)
    print("2 of 2: CRAE+", flush=True)
    train_crae.train(plus=True, out=str(plus), **common)

    tested = {name: test(run) for name, run in runs.items()}
    images, y, unlabeled, _ = tested["CRAE+"]
    predicted = {name: p.argmax(1) for name, (*_, p) in tested.items()}
    errors = {name: 100 * (k != y).float().mean().item() for name, k in predicted.items()}
    curves = {name: curve_of(run) for name, run in runs.items()}
    first, second = predicted.values()
    chosen = ((first != y) & (second == y)).nonzero()[:EXAMPLES, 0]
    examples = [dict(image=images[i].permute(1, 2, 0).numpy(), wrong=int(first[i]), right=int(second[i]))
                for i in chosen]
    title = f"Digits: {labels} labelled and {unlabeled:,} unlabelled images, {len(y)} test images"
    run_folder.write_whole(folder / "demo.png", lambda tmp: sheets.plot_demo(curves, examples, title, tmp))
    print_errors(errors, {name: int((k != y).sum()) for name, k in predicted.items()}, title)
    print(f"{folder / 'demo.png'} shows digits that only CRAE+ reads correctly")
    return errors


def test(run):
    """The test images of a run, their labels, the number of unlabelled images, and p(y|x) of its model."""
    net, saved = evaluate.load_model(run)
    images, labels, _, index = evaluate.load_test_set(saved, run)
    config = json.loads((run / "config.json").read_text())
    p = predictions.probabilities(net, images[index], "cpu")
    return images[index], labels[index], config["resolved"]["images"]["unlabeled"], p


def curve_of(run):
    """(step, test error) at each evaluation."""
    rows = run_folder.read_rows(run / "log.csv", float("inf"))
    return [(int(row["step"]), float(row["test_error"])) for row in rows]


def print_errors(errors, wrong, title):
    print(f"\n{title}")
    for name, error in errors.items():
        more = " and the unlabelled ones" if name == "CRAE+" else ""
        print(f"  test error {error:5.2f} %  ({wrong[name]} wrong)   {name}{more}")


if __name__ == "__main__":
    cli.run(compare, ARGUMENTS)

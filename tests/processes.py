"""Ten steps in which the number of processes must not matter; test_distributed.py starts it with torchrun.

    torchrun --standalone --nproc_per_node 2 tests/processes.py OUT '[{"method": "s4l"}, ...]'

BN is in evaluation mode, because each process uses the batch statistics of its own share. The optimiser is
plain SGD, because the first steps of Adam turn rounding errors into full steps.
"""
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import nn

import cli
import helpers
import run_folder
import train_baselines
import train_crae
import training

TEN_STEPS = dict(helpers.QUICK, steps=10, batch=8, lr=0.02)     # with 0.05, rounding errors grow too fast


def set_bn_to_evaluation_mode(net):
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval().train = lambda mode=True: None             # and keep it there


def plain_sgd(net, lr, weight_decay, beta2):
    return torch.optim.SGD(net.parameters(), lr)


def break_second_process(what):
    """what: "loss" divides the loss by zero at the step of the evaluation; otherwise an image is missing."""
    crae, load_images = train_crae.crae, run_folder.load_images

    def crae_until_step_9(*args, step, **more):
        return {k: v / (step < 9) for k, v in crae(*args, step=step, **more).items()}

    def load_all_but_the_first(config):
        images, labels, *rest = load_images(config)
        return images[1:], labels[1:], *rest

    if what == "loss":
        train_crae.crae = crae_until_step_9
    else:
        run_folder.load_images = load_all_but_the_first


def ten_steps(out, method="crae", broken=None, **flags):
    """The losses and the errors in the last row of the log, and the final weights.

    broken: what is wrong in the second process.
    """
    module = train_crae if method == "crae" else train_baselines
    flags = TEN_STEPS | flags | ({} if method == "crae" else dict(method=method))
    assert flags.keys() <= module.FLAGS.keys()
    before = training.fit, training.make_adam

    def fit(net, *rest, **loop):
        set_bn_to_evaluation_mode(net)
        loop.pop("optimizer", None)
        return before[0](net, *rest, **loop)

    if broken and int(os.environ.get("RANK", 0)) == 1:
        break_second_process(broken)
    training.fit, training.make_adam = fit, plain_sgd
    try:
        row = module.train(**flags, out=str(out))
    finally:
        training.fit, training.make_adam = before
    saved = torch.load(Path(out, "last.pt"), weights_only=True)
    losses = {k: v for k, v in row.items() if k.startswith("loss")}
    scores = {k: v for k, v in row.items()
              if k.endswith(("_error", "_raw", "_accuracy")) and "median" not in k}
    return losses, scores, saved["net"] | {f"ema.{k}": v for k, v in saved["ema"].items()}


def run_jobs(out, jobs):
    for k, flags in enumerate(jobs):
        ten_steps(Path(out, str(k)), **flags)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cli.run(run_jobs, dict(out=sys.argv[1], jobs=json.loads(sys.argv[2])))

"""Ten steps in which the number of processes must not matter; started by torchrun from test_processes.py.

    torchrun --standalone --nproc_per_node 2 tests/processes.py OUT '[{"method": "s4l"}, ...]'

BN is in evaluation mode, since a process's batch statistics are those of its own share, and the optimiser is plain SGD,
since Adam's first steps turn rounding into full steps.
"""
import inspect
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import train_baselines  # noqa: E402
import train_crae  # noqa: E402
import training  # noqa: E402

SMALL = dict(steps=10, batch=8, arch="wrn-10-0.25", device="cpu", lr=0.05)


def in_evaluation_mode(net):
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval().train = lambda mode=True: None


def ten_steps(out, method="crae", broken=None, **flags):
    """The losses of the log's last row, its errors, and the final weights. broken: what is wrong in the second process."""
    module = train_crae if method == "crae" else train_baselines
    flags = SMALL | flags | ({} if method == "crae" else dict(method=method))
    assert flags.keys() <= inspect.signature(module.train).parameters.keys()
    before = training.fit, training.make_optimizer

    def fit(net, *rest, **loop):
        in_evaluation_mode(net)
        loop.pop("optimizer", None)
        return before[0](net, *rest, **loop)

    if broken and int(os.environ.get("RANK", 0)) == 1:
        crae, load = train_crae.crae, training.load_images
        if broken == "loss":                                    # at the step of the evaluation
            train_crae.crae = lambda *rest, step, **more: {k: v / (step < 9) for k, v in crae(*rest, step=step, **more).items()}
        else:                                                   # an image that is missing
            training.load_images = lambda config: (load(config)[0][1:], load(config)[1][1:], *load(config)[2:])
    training.fit, training.make_optimizer = fit, lambda net, lr, weight_decay: torch.optim.SGD(net.parameters(), lr)
    try:
        row = module.train(**flags, out=str(out))
    finally:
        training.fit, training.make_optimizer = before
    saved = torch.load(Path(out, "last.pt"), weights_only=True)
    return ({k: v for k, v in row.items() if k.startswith("loss")}, {k: v for k, v in row.items() if k.endswith(("_error", "_raw", "_accuracy")) and "median" not in k},
            saved["net"] | {f"ema.{k}": v for k, v in saved["ema"].items()})


def everything(out, jobs):
    for k, flags in enumerate(jobs):
        ten_steps(Path(out, str(k)), **flags)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    everything(sys.argv[1], json.loads(sys.argv[2]))

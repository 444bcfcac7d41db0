"""Kills runs at random moments, resumes each until it is done, and compares all it leaves with an undisturbed run.

    python tests/chaos.py --kills 100                           CRAE+, MixMatch and fine-tune, about a second a kill

A run saves about every step here, so that many kills hit a save; the runs are forked from one process that has imported
torch already, so that they do not spend their lives on imports. Most kills are SIGKILL, some SIGTERM, SIGUSR1 or Ctrl-C.
"""
import csv
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")                   # a forked process must not count on threads of its parent
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402, F401    imported once, here
from tqdm import tqdm  # noqa: E402

import train_baselines  # noqa: E402
import train_crae  # noqa: E402
import training  # noqa: E402

SMALL = dict(steps=45, batch=4, arch="wrn-10-0.25", device="cpu", resume=True, save_minutes=1e-5)
RUNS = {"CRAE+": (train_crae.train, dict(plus=True)), "MixMatch": (train_baselines.train, dict(method="mixmatch")),
        "fine-tune": (train_baselines.train, dict(method="fine_tune"))}


def start(train, flags, out):
    """A run in a process of its own; its number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        error = os.open(out.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(error, 2)
        torch.set_num_threads(1)
        tqdm.set_lock(threading.RLock())                        # tqdm's own is shared with processes that may have been killed holding it
        train(**SMALL, **flags, out=str(out))
        code = 0
    except SystemExit as stop:
        print(stop.code, file=sys.stderr, flush=True)
        code = stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def everything(folder):
    """All files of a run and its stages but the save before the last; times taken out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".csv":
            rows = list(csv.DictReader(path.open()))
            found[name] = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]
        elif path.suffix == ".npz":
            found[name] = {k: torch.as_tensor(v) for k, v in np.load(path).items()}
        elif path.name in ("last.pt", "model.pt"):
            found[name] = torch.load(path, weights_only=True)
            found[name].get("run", {}).pop("seconds", None)
        elif path.name == "curve.png":
            found[name] = path.exists()
    return found


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def wait(process, seconds):
    """The exit code of a process if it ends in that time, else None."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def chaos(kills: int = 100, seed: int = 0, methods: str = "CRAE+,MixMatch,fine-tune") -> dict:
    """Flags:

    --kills        how often a run is killed, shared out among the methods
    --seed         of the moments and signals
    --methods      which of CRAE+,MixMatch,fine-tune
    --help         this text
    """
    for name in methods.split(","):
        if name not in RUNS:
            sys.exit(f"--methods {name}: must be among {', '.join(RUNS)}")
    if kills < 1:
        sys.exit(f"--kills {kills}: must be 1 or more")
    dice, killed, finished = random.Random(seed), 0, 0
    names = methods.split(",")
    with tempfile.TemporaryDirectory() as folder, tqdm(total=kills, unit="kill", disable=None) as bar:
        folder, whole, length = Path(folder), {}, {}
        for name in names:
            out, before = folder / f"whole {name}", time.monotonic()
            code = wait(start(*RUNS[name], out), 600)
            if code != 0:
                sys.exit(f"{name}: the undisturbed run ended with {code}: {out.with_suffix('.err').read_text()[-300:]}")
            whole[name], length[name] = everything(out), time.monotonic() - before
        k = 0
        while killed < kills:
            name = names[k % len(names)]
            out = folder / f"run {k}"
            k += 1
            while True:
                process = start(*RUNS[name], out)
                code = wait(process, dice.uniform(0, 0.4 * length[name]) if killed < kills else 600)
                if code is None:
                    number = dice.choice([signal.SIGKILL] * 7 + [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
                    os.kill(process, number)
                    code = wait(process, 60)
                    killed += 1
                    bar.update()
                    if code in (-number, -signal.SIGKILL, 128 + number, 143, 130, 0):
                        if code != 0:
                            continue
                if code != 0:
                    sys.exit(f"{name}, after {killed} kills: ended with {code}: {out.with_suffix('.err').read_text()[-500:]}")
                break
            left = everything(out)
            if not same(left, whole[name]):
                differ = [n for n in sorted({*left, *whole[name]}) if not same(left.get(n), whole[name].get(n))]
                sys.exit(f"{name}, after {killed} kills: {', '.join(differ)} differ from those of the undisturbed run")
            finished += 1
    print(f"{killed} kills survived: {finished} runs of {', '.join(names)} ended with the files of an undisturbed run")
    return dict(kills=killed, finished=finished)


if __name__ == "__main__":
    training.command_line(chaos)

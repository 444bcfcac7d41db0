"""Kill runs at random moments, resume them until they are finished, and compare them with undisturbed runs.

    python tests/chaos.py --kills 100           CRAE+, MixMatch and fine-tune, and CRAE+ with the fast recipe,
                                                about a second per kill

Here, runs write a checkpoint after almost every step, so that many kills hit a checkpoint being written. They
are forked from one process that has already imported torch, so that they spend no time on imports. Most kills
are SIGKILL; some are SIGTERM, SIGUSR1 or Ctrl-C.
"""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")           # a forked process has none of its parent's threads
sys.path.insert(0, str(Path(__file__).parent.parent))

import cli

METHODS = "CRAE+", "MixMatch", "fine-tune", "fast"
FLAGS = {
    "kills": (int, 100, "number of kills, divided among the methods"),
    "seed": (int, 0, "seed for the times and signals of the kills"),
    "methods": ([str], list(METHODS), f"which of {','.join(METHODS)}"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)

import random
import signal
import tempfile
import threading
import time
import traceback

import torch
from tqdm import tqdm

import helpers
import train_baselines
import train_crae

SAVING = dict(helpers.QUICK, steps=45, resume=True, save_minutes=1e-5)
RUNS = {"CRAE+": (train_crae.train, dict(plus=True)),
        "MixMatch": (train_baselines.train, dict(method="mixmatch")),
        "fine-tune": (train_baselines.train, dict(method="fine_tune")),
        "fast": (train_crae.train, dict(plus=True, recipe="fast", arch="fast-4-8-8", unlabeled=4))}


def start(train, flags, out):
    """Start a run in a process of its own. Returns the process ID."""
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
        # tqdm's own lock is shared with processes that may have been killed while they held it.
        tqdm.set_lock(threading.RLock())
        train(**SAVING | flags, out=str(out))
        code = 0
    except cli.Refused as error:
        print(error, file=sys.stderr, flush=True)
    except cli.Stopped as stop:
        print(stop, file=sys.stderr, flush=True)
        code = 128 + stop.number
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:                          # a signal before the training loop: cli.run's handler
        code = stop.code
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(process, seconds):
    """The exit code of a process if it ends within this time, else None."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(0.005)


def kill_until_finished(name, out, length, dice, left):
    """Kill and resume a run, at most `left` times, until it is finished. Returns the number of kills."""
    killed = 0
    while True:
        process = start(*RUNS[name], out)
        code = wait(process, dice.uniform(0, 0.4 * length) if killed < left else 600)
        if code is None:
            number = dice.choice([signal.SIGKILL] * 7 + [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
            os.kill(process, number)
            code = wait(process, 60)
            killed += 1
            if code != 0 and code in (-number, -signal.SIGKILL, 128 + number, 143, 130):
                continue
        if code != 0:
            error = out.with_suffix(".err").read_text()[-500:]
            raise cli.Refused(f"{name}, after {killed} kills: ended with {code}: {error}")
        return killed


@cli.strict(FLAGS)
def chaos(kills, seed, methods):
    """Kill runs and compare their final files. Returns the numbers of kills and of finished runs."""
    for name in methods:
        if name not in RUNS:
            raise cli.Refused(f"--methods {name}: must be one of {', '.join(RUNS)}")
    if kills < 1:
        raise cli.Refused(f"--kills {kills}: must be 1 or more")
    dice, killed, finished = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder, tqdm(total=kills, unit="kill", disable=None) as bar:
        folder, whole, length = Path(folder), {}, {}
        for name in methods:
            out, before = folder / f"whole {name}", time.monotonic()
            code = wait(start(*RUNS[name], out), 600)
            if code != 0:
                error = out.with_suffix(".err").read_text()[-300:]
                raise cli.Refused(f"{name}: the undisturbed run ended with {code}: {error}")
            whole[name], length[name] = helpers.everything_in(out), time.monotonic() - before
        while killed < kills:
            name, out = methods[finished % len(methods)], folder / f"run {finished}"
            killed += kill_until_finished(name, out, length[name], dice, kills - killed)
            bar.update(killed - bar.n)
            left = helpers.everything_in(out)
            differ = [n for n in sorted({*left, *whole[name]})
                      if not helpers.same(left.get(n), whole[name].get(n))]
            if differ:
                raise cli.Refused(f"{name}, after {killed} kills: {', '.join(differ)} differ from those of "
                                  "the undisturbed run")
            finished += 1
    print(f"{killed} kills survived: {finished} runs of {', '.join(methods)} ended with the files of an "
          "undisturbed run")
    return dict(kills=killed, finished=finished)


if __name__ == "__main__":
    cli.run(chaos, ARGUMENTS)

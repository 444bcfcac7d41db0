"""Train many runs as processes of the training scripts, or estimate how long they would take.

    runs = [plan_run(dict(labels=50, seed=seed), "runs") for seed in range(3)]
    print_plan(runs, num_classes=10, image_size=8, jobs=1, processes=1)
    failed = sweep(runs, jobs=2, processes=1, device=None)
"""
import collections
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

import budget
import cli
import devices
import estimates
import progress
import report
import run_folder
import train_baselines
import train_crae

SCRIPTS = {"train_crae.py": train_crae, "train_baselines.py": train_baselines}

# ---------------------------------------------------------------- runs


def plan_run(flags, out):
    """A run before it starts: script, flags, values, and the folder, named as the script would name it."""
    script = flags.get("script", "train_crae.py")
    table = SCRIPTS[script].FLAGS
    flags = {name: value for name, value in flags.items() if name != "script" and value != table[name][1]}
    config = SCRIPTS[script].configure(**flags)
    return dict(script=script, flags=flags, config=config, folder=Path(out, Path(config["out"]).name))


def stages_of(run):
    """The stages of a run, each with the function that builds it and its folder. Only fine_tune has two."""
    stages = [(SCRIPTS[run["script"]].build, run["folder"])]
    if run["config"].get("base") == "fine_tune":
        stages.insert(0, (train_baselines.build_stage_one, run["folder"] / "pretrain"))
    return stages


def steps_of(run):
    """The steps of each stage. With --minutes or --pflop, 0 until the run has started."""
    if run["config"]["steps"]:
        return run["config"]["steps"]
    try:
        return int(json.loads((run["folder"] / "config.json").read_text())["steps"])
    except (OSError, ValueError, KeyError):
        return 0


def steps_done(run):
    """The logged steps of each stage."""
    return [logged_steps(folder / "log.csv", steps_of(run)) for _, folder in stages_of(run)]


def part_done(run):
    """The finished part of a run, from 0 to 1."""
    done = steps_done(run)
    return sum(done) / (len(done) * steps_of(run)) if steps_of(run) else 0.0


def logged_steps(log, steps):
    try:
        rows = run_folder.read_rows(log, steps)
        return int(rows[-1]["step"]) if rows else 0
    except (OSError, ValueError, KeyError, csv.Error):          # a damaged log, which the run itself reports
        return 0


def is_finished(run):
    return 0 < steps_of(run) == steps_done(run)[-1] and (run["folder"] / "model.pt").exists()


def launcher(processes):
    """The words between python and the script: torchrun, if several processes train one model."""
    if processes == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


# ---------------------------------------------------------------- the estimate


def print_plan(runs, num_classes, image_size, jobs, processes):
    """Print the command of each run with an estimate of its time. Returns one dict per run."""
    config, flops, plan = runs[0]["config"], {}, []
    net, *_ = SCRIPTS[runs[0]["script"]].build(config | dict(steps=config["steps"] or 1), num_classes)
    rate = devices.flop_rate(net, config, image_size)
    gpus = torch.cuda.device_count() if config["device"] == "cuda" else 1       # CPU: runs share the cores
    for run in runs:
        row = run["config"]["method"], run["config"]["rot_dim"]         # seeds and labels cost nothing
        if row not in flops:
            any_steps = run["config"] | dict(steps=run["config"]["steps"] or 1)         # or None
            flops[row] = [devices.step_flops(build, any_steps, num_classes, image_size)
                          for build, _ in stages_of(run)]
        plan.append(estimate(run, flops[row], rate * min(processes, gpus), processes))
        print_planned(run, plan[-1])
    finished = sum(planned["finished"] for planned in plan)
    at_once = max(1, min(jobs, gpus // processes))
    total, left = (sum(planned[key] for planned in plan) / at_once for key in ("hours", "hours_left"))
    threads = f" with {torch.get_num_threads()} threads" if config["device"] == "cpu" else ""
    total, left = progress.duration(3600 * total), progress.duration(3600 * left)
    print(f"# {len(runs)} runs, {finished} of them finished: about {total} in total, {left} left\n"
          f"# Estimated from the FLOPs of all forward and backward passes, at {rate / 1e9:,.0f} GFLOP/s "
          f"(measured just now: {config['arch']}, {config['device']}{threads}).\n"
          "# Evaluations, augmentation, the optimiser and reading images take additional time.")
    flops_of_all = sum(planned["flops"] for planned in plan)
    pflop = f"{flops_of_all / 1e15:,.0f}" if flops_of_all > 1e16 else f"{flops_of_all / 1e15:.2g}"
    print(f"# {pflop} PFLOP. An A100 at {estimates.SHARE_OF_PEAK:.0%} of its peak would take "
          f"{progress.duration(3600 * flops_of_all / estimates.GPU_HOUR)} (calculated).")
    return plan


def estimate(run, flops, rate, processes):
    """The command of a run, its steps, FLOPs and hours. flops: of a step of each stage; rate: FLOP/s."""
    steps, done, finished = steps_of(run), steps_done(run), is_finished(run)
    if run["config"]["pflop"]:
        steps = budget.steps_of_pflop(run["config"]["pflop"], sum(flops))
    hours = steps * sum(flops) / rate / 3600
    hours_left = sum(n * (steps - k) for n, k in zip(flops, done)) / rate / 3600
    if run["config"]["minutes"]:
        hours = run["config"]["minutes"] / 60
        hours_left = hours * (1 - part_done(run))
    command = run["config"]["command"].replace("python", " ".join(["python", *launcher(processes)]), 1)
    return dict(command=f"{command} --out={shlex.quote(str(run['folder']))} --resume", finished=finished,
                steps=len(flops) * steps, steps_done=sum(done), flops=steps * sum(flops),
                hours=hours, hours_left=0 if finished else hours_left)


def print_planned(run, planned):
    """A comment and the command, ready to be copied into a shell."""
    config = run["config"]
    name = report.METHODS.get(config["method"], config["method"])
    if "rot_dim" in run["flags"]:
        name += f", dimension {config['rot_dim']}" if config["rot_dim"] else ", no reduction"
    if planned["finished"]:
        state = "finished"
    else:
        state = f"about {progress.duration(3600 * planned['hours'])}"
        state += f", {planned['steps_done']:,} steps done" if planned["steps_done"] else ""
    steps = f"{planned['steps']:,} steps, " if planned["steps"] else ""
    print(f"# {name}, {config['labels'] or 'all'} labels, seed {config['seed']}: {steps}{state}\n"
          f"{planned['command']}", flush=True)


# ---------------------------------------------------------------- the sweep


def start_run(run, slot, jobs, processes, device):
    """Start a training script with its share of the CPU cores, or with as many GPUs as it has processes."""
    words = [f"--{name}={value}" for name, value in run["flags"].items()]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, devices.cores() // (jobs * processes))))
    environment = dict(os.environ, OMP_NUM_THREADS=threads)
    if device in (None, "cuda") and torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
        own = range(slot * processes, (slot + 1) * processes)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[k % len(gpus)] for k in own)
    output = tempfile.TemporaryFile("w+")
    script = Path(__file__).with_name(run["script"])
    command = [sys.executable, *launcher(processes), script, *words, f"--out={run['folder']}", "--resume"]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment,
                               start_new_session=True)
    return dict(process=process, output=output, run=run, slot=slot)


def last_line(output):
    """The last line of the script. What torchrun adds about a failed process comes after it.

    So does C++, now and then, if a process ends while threads of its communication still run.
    """
    output.seek(0)
    text = re.split(r"^(?:[EW]\d{4} |terminate called)", output.read(), maxsplit=1, flags=re.MULTILINE)[0]
    return (text.strip().splitlines() or ["no output"])[-1]


def sweep(runs, jobs, processes, device):
    """Finish all runs, `jobs` at a time. Returns one line per run that failed."""
    waiting = collections.deque(run for run in runs if not is_finished(run))
    print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them already finished", flush=True)
    running, failed = [], []
    done = {run["folder"]: part_done(run) for run in runs}
    shown = "{l_bar}{bar}| {n:.2f} of {total_fmt} runs [{elapsed}<{remaining}]"
    with cli.stop_signals() as stop, tqdm(total=len(runs), initial=sum(done.values()), bar_format=shown,
                                          disable=None, smoothing=0) as bar:
        try:
            while (running or waiting) and not stop:
                while waiting and len(running) < jobs:
                    slot = min(set(range(jobs)) - {job["slot"] for job in running})
                    running.append(start_run(waiting.popleft(), slot, jobs, processes, device))
                time.sleep(0.5)
                done |= {job["run"]["folder"]: part_done(job["run"]) for job in running}
                for job in [job for job in running if job["process"].poll() is not None]:
                    running.remove(job)
                    line = last_line(job["output"])
                    bar.write(line)
                    if job["process"].returncode:
                        failed.append(f"{job['run']['folder']}: {line}")
                bar.n = sum(done.values())
                bar.refresh()
        finally:                                # whatever ends the sweep, its runs save and end as well
            for job in running:
                job["process"].send_signal(signal.SIGTERM)
            for job in running:
                job["process"].wait()
    if stop:
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        raise cli.Stopped(stop[0], f"stopped; to continue: python {command}")
    return failed

"""--minutes and --pflop: how many steps of a run fit into a given time, or into a number of FLOPs."""
import time

import devices
import distributed
import metrics
import progress
import settings
import training

# We chose these: steps before the clock starts (the first ones are slower), how long it runs, and images of
# each set of an evaluation.
WARM_UP, SECONDS, MOST_STEPS, MOST_IMAGES = 3, 3.0, 30, 512


def set_steps(config, builds, loaded):
    """Set the steps of a run so that it takes config["minutes"] or config["pflop"].

    builds: the functions that build the stages of the run; all stages have the same number of steps. From
    here on, the run is the same as with --steps.
    """
    if config["pflop"]:
        any_steps = config | dict(steps=1)
        per_step = sum(devices.step_flops(build, any_steps, len(loaded[-1]), loaded[0].shape[-1])
                       for build in builds)
        settings.set_steps(config, steps_of_pflop(config["pflop"], per_step))
        print(f"{config['steps']} steps are {config['pflop']:g} PFLOP: {per_step / 1e9:.3g} GFLOP per step")
    else:
        fit_into_minutes(config, builds, loaded)


def steps_of_pflop(pflop, flops_per_step):
    return max(1, int(pflop * 1e15 / flops_per_step))


def fit_into_minutes(config, builds, loaded):
    """Set the steps so that the run takes config["minutes"], with evaluations and this measurement.

    The steps that are timed change copies.
    """
    began = time.perf_counter()
    print("measuring how long a step and an evaluation take", flush=True)
    trial = dict(config)
    settings.set_steps(trial, 10_000)                           # any number that the timed steps do not reach
    times = [measure(build, loaded, trial) for build in builds]
    seconds = 60 * config["minutes"] - (time.perf_counter() - began)
    steps = steps_in(seconds, config, *(sum(column) for column in zip(*times)))
    steps = -int(distributed.agree(-steps)[0])                  # the smallest number of all processes
    settings.set_steps(config, steps)
    per_step = sum(step for step, *_ in times)
    if steps == 1:
        print(f"note: --minutes {config['minutes']:g} is not enough for more than one step of "
              f"{per_step:.3g} s and its evaluation", flush=True)
    else:
        print(f"{steps} steps fit into {config['minutes']:g} minutes: {per_step:.3g} s per step", flush=True)


def steps_in(seconds, config, per_step, quick, full):
    """The number of steps, at least one. quick, full: seconds per evaluation before and at the end."""
    if config["quick_eval"]:
        return max(1, int((seconds - (settings.EVALUATIONS - 1) * quick - full) / per_step))
    every = config["epoch"] * config["eval_epochs"]
    return max(1, int((seconds - full) / (per_step + full / every)))


def measure(build, loaded, config):
    """Seconds per step, per quick and per full evaluation of one stage."""
    net, objective, loop = build(config, len(loaded[-1]))
    state = training.make_state(net, objective, loaded, config, **loop)
    training.make_ready(state, config)
    for step in range(WARM_UP):
        training.take_step(state, config, step)
    training.check_finite(state, config)                        # waits for the device
    began, step, passed = time.perf_counter(), WARM_UP, 0.0
    while passed < SECONDS and step < WARM_UP + MOST_STEPS:
        training.take_step(state, config, step)
        step += 1
        passed, = distributed.agree(time.perf_counter() - began)
    training.check_finite(state, config)
    passed = time.perf_counter() - began
    state.batches.close()
    quick = timed_evaluation(state, config, True) if config["quick_eval"] else 0.0
    return passed / (step - WARM_UP), quick, timed_evaluation(state, config, False)


def timed_evaluation(state, config, quick):
    """Seconds per evaluation, from a part of its images."""
    some = {part: i[:MOST_IMAGES] for part, i in state.index.items()}
    has_heads = state.net.rotation is not None
    timed, all_of_them = (metrics.images_measured(index, quick, has_heads) for index in (some, state.index))
    for _ in range(2):                                          # the first evaluation is slower
        began = time.perf_counter()
        training.measure_state(state, config, some, quick, progress.unwatched)
        seconds = time.perf_counter() - began
    return seconds * all_of_them / timed

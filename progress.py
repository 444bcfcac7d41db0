"""What the user sees during a run: its values, a bar or lines, the losses and the time left.

On a terminal there is a bar, elsewhere (for example in a log file) lines. Only the first process of torchrun
shows anything. Each process has its own clock, so nothing here communicates with the others: they would wait
for each other forever if their clocks disagreed about what to do.
"""
import sys
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from tqdm import tqdm

import devices
import distributed

# In seconds; we chose all of them.
READ_EVERY = 10         # the losses are read from the device; a GPU waits for the CPU at each read
FIRST_READ = 5          # after the first step; this read also gives the first estimate of the time left
LINE_EVERY = 30         # a line is printed if there is no terminal
BAR_AFTER = 2           # a shorter evaluation has no bar of its own
LONG = 3600             # a run on a CPU that takes longer prints what would make it shorter

STAGES = "stage 1 of 2", "stage 2 of 2"

# ---------------------------------------------------------------- before the first step


def print_config(config, resolved):
    for name, value in config.items():
        print(f"{name:>14}  {value}")
    sizes = ", ".join(f"{n:,} {part}" for part, n in resolved["images"].items())
    print(f"{'images':>14}  {sizes.replace('labeled', 'labelled')}")
    world = distributed.world()
    if world > 1:
        print(f"{'processes':>14}  {world}, each with {config['batch'] // world} labelled images of a batch")
    print(f"{'network':>14}  {resolved['parameters']:,} parameters, "
          f"{resolved['rotation_heads']} rotation heads, {resolved['num_classes']} classes, "
          f"{resolved['image_size']} pixels")
    every = config["epoch"] * config["eval_epochs"]
    print(f"training; one line here and one row in {config['out']}/log.csv every {every} steps", flush=True)
    steps, bn_left = config["steps"], (1 - config["bn_momentum"]) ** config["steps"]
    weights_left = (config["ema"] or 0) ** steps
    if config["ema"] and max(bn_left, weights_left) > 0.05:     # we chose 5 %: the tested model suffers
        print(f"note: {steps} steps are few for this preset: {bn_left:.0%} of the initial BN statistics and "
              f"{weights_left:.0%} of the initial weights remain in the tested model, so expect a high error")


@contextmanager
def show(run, config, sizes=(1, 1)):
    """Show a bar on a terminal until the block ends. Yields what is shown, for the functions below.

    run: the changing numbers of the run (step, row_step, terms), see training.start
    sizes: the images of an evaluation during the run, and of the last one
    """
    now = time.perf_counter()
    with tqdm(desc=stage_of(config) or None, total=config["steps"], initial=run["step"], miniters=1,
              bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}", disable=distributed.hide_bar()) as bar:
        yield SimpleNamespace(
            bar=bar, run=run, config=config, sizes=sizes, losses={}, announced=None, advised=False,
            # Times of the next read, the last line, the last step or batch, and the start of an evaluation.
            read_at=now + FIRST_READ, line_at=now, tick_at=now, evaluation_at=None,
            # Only this session is timed, without its first step, which takes longer: first is when it ended,
            # and its number.
            first=None, seconds_per_step=None, evaluations=0, seconds_of_evaluations=0.0)


def stage_of(config):
    """The stage of fine_tune; no other run has stages, nor has one with the first stage of an earlier run."""
    if config.get("base") != "fine_tune" or config["pretrained"]:
        return ""
    return STAGES[0] if config["method"] == "rotation" else STAGES[1]


def count_through(items, words, total):
    """Yield the items and show how many are done: a bar on a terminal, elsewhere a line every half minute."""
    line_at, hidden = time.perf_counter(), distributed.hide_bar()
    with tqdm(items, words, total, disable=hidden, leave=False) as bar:
        for done, item in enumerate(bar, start=1):
            yield item
            if bar.disable and not hidden and time.perf_counter() > line_at + LINE_EVERY:
                line_at = time.perf_counter()
                print(f"{words}: {done:,} of {total:,}", flush=True)


# ---------------------------------------------------------------- steps


def after_step(shown):
    """Count a step. From time to time, read the losses and estimate the time left."""
    if distributed.rank():
        return
    now = time.perf_counter()
    if shown.first is None:
        shown.first = now, shown.run["step"]
        if now < shown.read_at:
            shown.read_at = now + FIRST_READ
    if now >= shown.read_at:
        shown.losses = read_losses(shown.run)
        now = time.perf_counter()                               # now the device has finished its steps
        shown.read_at = now + READ_EVERY
        time_steps(shown, now)
        announce(shown, now)
    set_text_of_bar(shown, now)
    shown.bar.update()
    print_line_if_due(shown, now)


def read_losses(run):
    """The mean of each loss term since the last row of the log; under torchrun, on the share of this process.

    One read for all terms, because a GPU waits at each read.
    """
    steps_of_row = run["step"] - run["row_step"]
    sums = torch.stack(list(run["terms"].values())).tolist()
    return {name: value / steps_of_row for name, value in zip(run["terms"], sums)}


def time_steps(shown, now):
    """Seconds per step since the first step of this session; call it when the device has finished them."""
    first_at, first_step = shown.first
    steps = shown.run["step"] - first_step
    if steps:
        shown.seconds_per_step = (now - first_at - shown.seconds_of_evaluations) / steps


# ---------------------------------------------------------------- evaluations


def start_evaluation(shown):
    """Returns a function that iterates over the batches of the evaluation and shows how far it is.

    Call it when the device has finished the steps.
    """
    if distributed.rank():
        return unwatched
    shown.evaluation_at = time.perf_counter()
    time_steps(shown, shown.evaluation_at)
    return partial(watch, shown)


def unwatched(words, batches, images):
    return batches


def watch(shown, words, batches, images):
    """Yield the batches (x, indices) of a set of images, and show how many of the images are done.

    words: which images; images: their number. The bar disappears at the end of the set.
    """
    delay = max(0, BAR_AFTER - (time.perf_counter() - shown.evaluation_at))
    done = 0
    with tqdm(desc=f"evaluating, {words}", total=images, delay=delay, miniters=1, leave=False,
              disable=shown.bar.disable, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}") as bar:
        for x, i in batches:
            yield x, i
            done += len(i)
            bar.update(len(i))
            print_line_if_due(shown, time.perf_counter(), f"evaluating, {words} {done / images:.0%}")


def after_evaluation(shown, row):
    """Print the line of an evaluation; row: its row of log.csv."""
    if distributed.rank():
        return
    now = time.perf_counter()
    shown.evaluations += 1
    shown.seconds_of_evaluations += now - shown.evaluation_at
    shown.evaluation_at = None
    shown.losses = {k.removeprefix("loss_"): float(v) for k, v in row.items() if k.startswith("loss_")}
    set_text_of_bar(shown, now)
    print_line(shown, now, *scores_text(row))
    announce(shown, now)


def scores_text(row):
    """The scores in a row of the log that are measured, in words, and the speed."""
    cells = []
    for name, words in dict(test_error="test error", test_top5_error="top-5",
                            unlabeled_error="unlabelled error",
                            rotation_accuracy="rotation accuracy").items():
        if row.get(name):
            cells.append(f"{words} {float(row[name]):.2f} %")
    return [*cells, f"{float(row['images_per_second']):,.0f} images/s"]


# ---------------------------------------------------------------- the time left


def evaluations_left(run, config):
    """The number of evaluations after the last row of the log: every so many steps, and at the end."""
    every, steps, row_step = config["epoch"] * config["eval_epochs"], config["steps"], run["row_step"]
    at_the_end = steps % every > 0 and row_step < steps
    return steps // every - row_step // every + at_the_end


def time_left(shown, now):
    """Seconds until the end of this run or stage; None if no step was timed. Evaluations count once timed."""
    if shown.seconds_per_step is None:
        return None
    left = shown.seconds_per_step * (shown.config["steps"] - shown.run["step"])
    if shown.evaluations:
        each = shown.seconds_of_evaluations / shown.evaluations
        times = [each] * evaluations_left(shown.run, shown.config)
        if times:                                               # the last one may measure more images
            times[-1] *= shown.sizes[1] / shown.sizes[0]
        left += sum(times)
        if shown.evaluation_at is not None:                     # one of them is under way
            left -= min(now - shown.evaluation_at, times[0])
    return left


def time_left_text(shown, now):
    """A list with the time left in words; empty if it is not known, and after the last evaluation."""
    seconds = time_left(shown, now)
    if seconds is None or not evaluations_left(shown.run, shown.config):
        return []
    text = f"{duration(seconds)} left"
    text += "" if shown.evaluations else " plus evaluations"    # none of them was timed yet
    text += " in this stage" if stage_of(shown.config) == STAGES[0] else ""
    return [text]


def duration(seconds):
    """'42 seconds', '5.0 minutes', '12.3 hours' or '1,234 hours'."""
    if seconds < 59.5:
        return f"{seconds:.0f} seconds"
    if seconds < 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:,.0f} hours" if seconds > 360_000 else f"{seconds / 3600:.1f} hours"


def counted(n, word):
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def announce(shown, now):
    """Print how long the run will take, as soon as this is known, and again when an evaluation was timed."""
    run, config = shown.run, shown.config
    steps, evaluations = config["steps"] - run["step"], evaluations_left(run, config)
    known = "nothing" if shown.seconds_per_step is None else "all" if shown.evaluations else "steps"
    if known in ("nothing", shown.announced) or not steps:
        return
    if now - shown.first[0] < FIRST_READ:                       # too few steps for an estimate
        return
    shown.announced, seconds = known, time_left(shown, now)
    text = f"about {duration(seconds)} left for {counted(steps, 'step')}"
    evaluations = counted(evaluations, "evaluation")
    text += f" and {evaluations}" if known == "all" else f", plus {evaluations}, which take an unknown time"
    stage = stage_of(config)
    text = f"{stage}: {text}" if stage else text
    first_stage = stage == STAGES[0]
    say(shown, f"{text}; stage 2 takes additional time, but not more than stage 1" if first_stage else text)
    if seconds * (2 if first_stage else 1) > LONG and config["device"] == "cpu" and not shown.advised:
        shown.advised = True
        say(shown, how_to_shorten(config))


def how_to_shorten(config):
    fast = ["--recipe fast"] if config.get("recipe") == "paper" and config["dataset"] != "imagenet" else []
    bf16 = ["--precision bf16"] if config["precision"] != "bf16" and devices.has_bf16() else []
    return ("to make it shorter: " + ", ".join([*fast, *bf16, "fewer --steps (or --minutes)",
                                                "a smaller --arch or --image_size"]) + ", or a GPU")


# ---------------------------------------------------------------- the bar and the lines


def losses_text(shown):
    return [f"{name} {value:.3g}" for name, value in shown.losses.items()]


def set_text_of_bar(shown, now):
    """The time left comes first, because tqdm cuts off what does not fit into the terminal."""
    shown.bar.set_postfix_str(", ".join([*time_left_text(shown, now), *losses_text(shown)]), refresh=False)


def print_line_if_due(shown, now, *cells):
    """Without a terminal, print a line if the next step or batch would end too late for the next line."""
    next_tick = now + (now - shown.tick_at)
    shown.tick_at = now
    if shown.bar.disable and next_tick > shown.line_at + LINE_EVERY:
        print_line(shown, now, *cells)


def print_line(shown, now, *cells):
    """Print stage, step, the given cells and the time left; the losses as well if no bar shows them."""
    stage, losses = stage_of(shown.config), ", ".join(losses_text(shown)) if shown.bar.disable else ""
    cells = [stage, f"step {shown.run['step']}/{shown.config['steps']}", *cells, losses,
             *time_left_text(shown, now)]
    say(shown, "   ".join(cell for cell in cells if cell))
    shown.line_at = now


def say(shown, text):
    """Print a line above the bar, at once even if the output is a file or a pipe."""
    shown.bar.write(text)
    sys.stdout.flush()

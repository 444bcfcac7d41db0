"""Optimisers, schedules, averaged weights and the training loop, `fit`.

A script gives `fit` a network and an objective. All objectives have the same signature,

    objective(model, x_l, y_l, x_u, *, augment, gen, step, ema, **constants) -> {name: loss term}

x_l and x_u are raw uint8 images (N, 3, H, W), y_l the labels (N,). augment(x) returns a new random view of a
batch, gen is the random generator of the step, and ema is the averaged model, the teacher in some methods.
"""
import copy
import math
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

import augmentation
import cli
import contact_sheet
import data
import devices
import distributed
import losses
import metrics
import models
import progress
import run_folder
import settings

# ---------------------------------------------------------------- the loop


def fit(net, objective, loaded, config, *, p_z=losses.log_p_z, optimizer=None, schedule=None, average=None,
        refresh_bn=None, unlabeled):
    """Train up to config["steps"], from the run's checkpoint if there is one. Returns the final row.

    loaded                              images, labels, split and classes, from run_folder.load_data
    p_z(class_logits, rot_logits)       log p(z|x), for the logged rotation accuracy
    optimizer(net, lr, weight_decay)    makes a torch optimiser (default: config["optimizer"])
    schedule(fraction)                  learning rate relative to config["lr"] after that fraction of the run
                                        (default: schedule_of the config)
    average(averages, weights, step)    updates the averaged weights (default: average_of the config)
    refresh_bn(ema, net, batches)       sets ema's BN statistics before an evaluation (default: copy)
    unlabeled                           unlabelled images per step, over all processes
    """
    steps = config["steps"]
    distributed.wait_for_all()                                  # until every process has checked the folder
    with run_folder.hold(config["out"]):
        state = start(net, objective, loaded, config, p_z=p_z, optimizer=optimizer, schedule=schedule,
                      average=average, refresh_bn=refresh_bn, unlabeled=unlabeled)
        sizes = evaluation_sizes(state, config)
        with cli.stop_signals() as stop, progress.show(state.run, config, sizes) as shown:
            for step in range(state.run["step"], steps):
                take_step(state, config, step)
                state.run["step"] = step + 1
                progress.after_step(shown)
                if step == 0:
                    contact_sheet.write(loaded, config)

                stopped, due = distributed.agree(stop[0] if stop else 0, save_is_due(state, config))
                if (step + 1) % (config["epoch"] * config["eval_epochs"]) == 0 or step + 1 == steps:
                    log_row(state, config, shown)
                    save(state, config)
                elif due or stopped:
                    save(state, config)
                if stopped and step + 1 < steps:
                    raise cli.Stopped(int(stopped), how_to_continue(state, config))
            shown.bar.close()
            row = finish(state, config)
            stopped, = distributed.agree(stop[0] if stop else 0)
            if stopped:                                         # finished, but another stage may follow
                raise cli.Stopped(int(stopped))
        distributed.wait_for_all()                              # until the first process has written
    return row


def take_step(state, config, step):
    """One training step: the batch, in one or several parts, the optimiser and the averaged weights."""
    parts, rank, world = config["accumulate"], distributed.rank(), distributed.world()
    for group in state.optimizer.param_groups:
        group["lr"] = config["lr"] * state.schedule(step / config["steps"])
    state.optimizer.zero_grad()
    for part in range(parts):
        x_l, y_l, x_u = next(state.batches)
        state.gen.manual_seed(distributed.seed_of(config["seed"], "training", step))
        share = distributed.share_of_batch(rank, world, part, parts)
        with share, distributed.sync_gradients(state.model, when=part == parts - 1):
            with state.autocast():
                terms = state.objective(state.model, x_l, y_l, x_u, augment=state.augment, gen=state.gen,
                                        step=step, ema=state.ema)
            (sum(terms.values()) / parts).backward()
        add_losses(state, terms, step, parts)
    state.optimizer.step()
    state.average(state.averages, state.weights, step)
    distributed.average_bn(state.net)


def start(net, objective, loaded, config, **loop):
    """Returns the state of a run as its checkpoint left it, and writes what belongs to the start of a run."""
    images, _, split, classes = loaded
    if os.path.exists(Path(config["out"], "config.json")):      # of this run, or of one started meanwhile
        run_folder.refuse_other_flags(config)
    resolved = resolved_values(net, images, split, classes)
    progress.print_config(config, resolved)
    state = make_state(net, objective, loaded, config, **loop)
    resume(state, config, split, resolved)
    run_folder.write_split_csv(Path(config["out"]), *loaded)
    make_ready(state, config)
    return state


def make_state(net, objective, loaded, config, *, p_z=losses.log_p_z, optimizer=None, schedule=None,
               average=None, refresh_bn=None, unlabeled):
    """Returns everything that changes during a run, on the device, before the first step."""
    images, labels, split, classes = loaded
    device = torch.device(config["device"])
    in_memory = isinstance(images, torch.Tensor)
    images, labels = images.to(device) if in_memory else images, labels.to(device)
    index = {part: torch.as_tensor(i, device=device if in_memory else "cpu") for part, i in split.items()}
    index |= metrics.samples(labels, index, config["seed"], config["quick_eval"])

    net = net.to(device, memory_format=torch.channels_last).train()
    if hasattr(net.backbone, "patch_weight"):                   # other networks read no images here
        x, _ = next(iter(data.test_batches(images, index["sample"], WHITEN_IMAGES, device)))
        models.whiten(net, augmentation.scale(x))
    gen = torch.Generator(device)
    augment = partial(augmentation.flip_and_crop, flip=config["flip"], gen=gen)
    augment = augment if config["crop"] == "pad" else unchanged         # "resized" augments as it reads files
    devices.warn_of_memory(net, objective, images.shape[-1], config, unlabeled=unlabeled, augment=augment,
                           gen=gen)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) if config["sync_bn"] else net
    ema = copy.deepcopy(net).requires_grad_(False)
    make_optimizer = optimizer or dict(adam=partial(make_adam, beta2=config["beta2"]),
                                       sgd=make_sgd)[config["optimizer"]]
    return SimpleNamespace(
        net=net, ema=ema, weights=list(net.parameters()), averages=list(ema.parameters()), gen=gen,
        objective=objective, augment=augment, autocast=devices.autocast(device, config["precision"]),
        optimizer=make_optimizer(net, config["lr"], config["weight_decay"]),
        schedule=schedule or schedule_of(config), average=average or average_of(config),
        refresh_bn=refresh_bn or copy_bn, images=images, labels=labels, index=index, classes=classes, p_z=p_z,
        unlabeled=unlabeled, per_step=config["batch"] + unlabeled,
        # terms: the losses, summed since the row at row_step.
        # bad: the first step at which a term was not finite, or 0.
        run=dict(step=0, row_step=0, rows=0, seconds=0.0, terms={}, bad={}))


def make_ready(state, config):
    """The model to call and the batches, from the step of the state on."""
    if config["device"] == "cpu":
        devices.keep_freed_memory()
    if config["compile"]:
        state.net.compile()
    state.model = distributed.parallel(state.net)
    state.batches = data.training_batches(
        state.images, state.labels, state.index, config["batch"], state.unlabeled,
        range(state.run["step"], config["steps"]), config["seed"], distributed.rank(), distributed.world(),
        config["accumulate"])
    state.tick = state.saved_at = time.perf_counter()           # times of the last row and checkpoint
    state.tick_step = state.run["step"]


def resume(state, config, split, resolved):
    """Load the checkpoint if there is one, cut the logs back to its step, write config.json and split.npz."""
    out = Path(config["out"])

    def load(saved):
        if saved["whose"] != identity(config):
            raise ValueError(f"it belongs to the run {saved['whose']}")
        for name in "net", "ema", "optimizer":
            getattr(state, name).load_state_dict(saved[name])
        state.run.update(saved["run"])

    if run_folder.load_checkpoint(out, state.labels.device, load):
        print(f"continuing after step {state.run['step']} of {config['steps']}")
    step, expected = state.run["step"], state.run["rows"]
    if len(run_folder.read_log(out / "log.csv", step)) != expected:
        raise cli.Refused(f"--out {out}: log.csv is missing rows: the checkpoint at step {step} "
                          f"expects {expected}; nothing was changed")
    distributed.wait_for_all()
    run_folder.write_config(config, split, resolved)
    if distributed.rank() == 0:
        Path(out, "model.pt").unlink(missing_ok=True)           # it marks a finished run
    state.rows = run_folder.keep_rows(out / "log.csv", step)
    run_folder.keep_rows(out / "diversity.csv", step)


def resolved_values(net, images, split, classes):
    """The values that follow from the data and the network, for config.json."""
    return dict(num_classes=len(classes), image_size=images.shape[-1],
                images={k: len(i) for k, i in split.items()},
                rotation_heads=net.rotation.out_features // 4 if net.rotation else 0,
                parameters=sum(p.numel() for p in net.parameters()))


def identity(config):
    """What tells the checkpoints of different runs apart."""
    return {name: config[name] for name in ("method", "dataset", "seed", "data")}


def unchanged(x):
    return x


def add_losses(state, terms, step, parts):
    """Add the loss terms of a part to the sums of the next row, without waiting for the device."""
    sums, bad = state.run["terms"], state.run["bad"]
    for name, term in terms.items():
        term = term.detach()
        sums[name] = sums.get(name, 0) + term.double() / parts
        first = bad.get(name, torch.zeros((), device=term.device))
        bad[name] = torch.where((first == 0) & ~term.isfinite(), step + 1, first)


def log_row(state, config, shown):
    """Evaluate, and append one row to log.csv and one matrix to diversity.csv."""
    run, step, device = state.run, state.run["step"], state.labels.device
    world, steps_of_row = distributed.world(), step - state.run["row_step"]
    sums = torch.stack([distributed.total(v) for v in run["terms"].values()]).tolist()
    means = {f"loss_{k}": v / world / steps_of_row for k, v in zip(run["terms"], sums)}
    passed = time.perf_counter() - state.tick                   # reading the sums waited for the device
    check_finite(state, config)
    watch = progress.start_evaluation(shown)
    sample, limit = state.index["sample"], metrics.eval_batch(state.images)
    size = math.ceil(len(sample) / math.ceil(len(sample) / limit))              # batches of nearly equal size
    batches = watch("BN statistics", data.test_batches(state.images, sample, size, device), len(sample))
    state.refresh_bn(state.ema, state.net, (augmentation.scale(state.augment(x)) for x, _ in batches))
    distributed.average_bn(state.ema)
    quick = config["quick_eval"] and step < config["steps"]
    scores, matrix = measure_state(state, config, state.index, quick, watch)
    row = dict(step=step, epoch=step / config["epoch"], seconds=run["seconds"] + passed,
               images_per_second=state.per_step * (step - state.tick_step) / passed,
               lr=state.optimizer.param_groups[0]["lr"], **means, **scores)
    state.rows.append({k: "" if v is None else v if isinstance(v, int) else f"{v:.7g}"
                       for k, v in row.items()})
    run_folder.append_rows(Path(config["out"], "log.csv"), state.rows[-1:])
    rows_of_matrix = metrics.diversity_rows(step, matrix, state.classes)
    run_folder.append_rows(Path(config["out"], "diversity.csv"), rows_of_matrix)
    run.update(row_step=step, rows=len(state.rows), seconds=run["seconds"] + passed, terms={})
    state.tick, state.tick_step = time.perf_counter(), step
    progress.after_evaluation(shown, state.rows[-1])


def measure_state(state, config, index, quick, watch):
    """metrics.measure. A quick evaluation has the precision of the steps, all others are in float32."""
    with devices.autocast(config["device"], config["precision"] if quick else "fp32")():
        return metrics.measure(state.net, state.ema, state.images, state.labels, index, len(state.classes),
                               state.p_z, quick, watch)


def evaluation_sizes(state, config):
    """The images of an evaluation during the run, and of the last one."""
    has_heads = state.net.rotation is not None
    return [metrics.images_measured(state.index, quick, has_heads) for quick in (config["quick_eval"], False)]


def save_is_due(state, config):
    return time.perf_counter() - state.saved_at > 60 * config["save_minutes"]


def save(state, config):
    """Write a checkpoint. Everything in it is finite: NaN or infinity ends the run here at the latest."""
    check_finite(state, config)
    seconds = state.run["seconds"] + time.perf_counter() - state.tick
    terms = {k: distributed.total(v) / distributed.world() for k, v in state.run["terms"].items()}
    run_folder.save_checkpoint(Path(config["out"]), dict(
        whose=identity(config), net=state.net.state_dict(), ema=state.ema.state_dict(),
        optimizer=state.optimizer.state_dict(), run=state.run | dict(seconds=seconds, terms=terms)))
    distributed.wait_for_all()
    state.saved_at = time.perf_counter()


def check_finite(state, config):
    """Stop the run if a loss term or a weight is not finite, and name the first such step."""
    names = sorted(state.run["bad"])
    broken = torch.stack([~w.isfinite().all() for w in state.weights]).any()
    # Read all values at once, because a GPU waits for the CPU at each read.
    *firsts, broken = torch.stack([*(state.run["bad"][name] for name in names), broken.float()]).tolist()
    firsts = distributed.agree(*(-first or -math.inf for first in firsts)) if names else []
    bad = {f"loss_{name}": int(-first) for name, first in zip(names, firsts) if first > -math.inf}
    if broken:
        bad = bad or {"a weight": state.run["step"]}
    if bad:
        name, step = min(bad.items(), key=lambda item: item[1])
        raise cli.Refused(f"{name} is not finite at step {step}; the last checkpoint is in {config['out']}; "
                          "a smaller --lr may help")


def how_to_continue(state, config):
    if distributed.rank():
        return ""
    return f"stopped after step {state.run['step']}; to continue: {settings.command_to_continue(config)}"


def finish(state, config):
    """Write curve.png and model.pt, print the result and return the final row."""
    import plots  # matplotlib is only needed here

    out = Path(config["out"])
    info = {name: config[name] for name in ("method", "dataset", "seed", "arch", "crop")}
    info |= dict(image_size=state.images.shape[-1], scaling="x * 2 / 255 - 1", classes=state.classes,
                 levels=config.get("levels", {}))               # black and white of images with over 8 bits
    saved = info | dict(state=models.classifier_state(state.ema))
    run_folder.write_whole(out / "curve.png", lambda tmp: plots.plot_curve(state.rows, tmp, out.name))
    run_folder.write_whole(out / "model.pt", lambda tmp: run_folder.save_tensors(saved, tmp))
    return run_folder.print_result(config, state.rows)


# ---------------------------------------------------------------- optimisers, schedules, averages

WHITEN_IMAGES = 1000                    # for FastNet's first layer; we chose this number: 500,000 patches


def kernels_decay(net, weight_decay):
    """Weight decay on conv and dense kernels only, not on biases or BN. MixMatch, S4L, FixMatch."""
    return [dict(params=[p for p in net.parameters() if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in net.parameters() if p.ndim <= 1], weight_decay=0.0)]


def make_adam(net, lr, weight_decay, beta2=0.999):
    """Adam with decoupled weight decay. MixMatch."""
    return torch.optim.AdamW(kernels_decay(net, weight_decay), lr=lr, betas=(0.9, beta2), fused=True)


def make_sgd(net, lr, weight_decay, nesterov=False):
    """SGD with momentum 0.9 and L2. S4L; FixMatch with Nesterov momentum."""
    return torch.optim.SGD(kernels_decay(net, weight_decay), lr=lr, momentum=0.9, nesterov=nesterov)


def steps_down(fraction, warmup, decay_at):
    """Linear warm-up from 0, then division by 10 at each fraction of the run in `decay_at`. S4L."""
    return min(1.0, fraction / warmup if warmup else 1.0) * 0.1 ** sum(fraction >= at for at in decay_at)


def triangle(fraction, warmup):
    """From 0.2 up to 1 over the first part of the run, then linearly to zero at its end. airbench."""
    if fraction < warmup:
        return 0.2 + 0.8 * fraction / warmup
    return (1 - fraction) / (1 - warmup)


def schedule_of(config):
    if config["schedule"] == "triangle":
        return partial(triangle, warmup=config["warmup"])
    return partial(steps_down, warmup=config["warmup"], decay_at=config["decay_at"])


def ramp_up(step, start, end):
    """The weight of a term as a fraction of its final value: 0 until step `start`, 1 from step `end` on."""
    return 1.0 if step >= end else max(0.0, (step - start) / (end - start))


def constant(fraction):
    return 1.0


def cosine_7_16(fraction):
    """FixMatch: cos(7 pi t / 16 T)."""
    return math.cos(7 * math.pi * fraction / 16)


def average_of(config):
    if config["ema_horizon"]:
        return partial(warm_ema, horizon=config["ema_horizon"] * config["steps"])
    return get_ema_multi_avg_fn(config["ema"] or 0.0)           # 0: the weights themselves


def warm_ema(averages, weights, step, horizon):
    """EMA over about `horizon` steps. It grows from few steps, so that the initial weights leave it soon."""
    decay = min(1 - 1 / max(1.0, horizon), (1 + step) / (10 + step))            # TensorFlow's num_updates
    torch._foreach_lerp_(averages, weights, 1 - decay)


# fast-SWA: epochs as fractions of its run of 480.
SWA_START, SWA_CYCLE, SWA_EVERY, SWA_RAMPDOWN = 150 / 480, 30 / 480, 3 / 480, 210 / 480


def cyclic(fraction):
    """fast-SWA (Athiwaratkun et al. 2019): cosine ramp-down until averaging starts, then cycles."""
    first_end = SWA_START + SWA_CYCLE                           # the first cycle belongs to the ramp-down
    if fraction >= first_end:
        fraction = SWA_START + (fraction - first_end) % SWA_CYCLE
    return 0.5 * (1 + math.cos(math.pi * fraction / SWA_RAMPDOWN))


def fast_swa(averages, weights, step, steps):
    """Average the weights every SWA_EVERY of the run from SWA_START on; until then, copy the weights."""
    start, every = round(SWA_START * steps), max(1, round(SWA_EVERY * steps))
    n = max(0, step + 1 - start)                                # steps since the start, including this one
    if n % every == 0:
        get_swa_multi_avg_fn()(averages, weights, n // every)   # the mean of n // every + 1 models


def recompute_bn(ema, net, batches):
    """fast-SWA: recompute the statistics for the averaged weights, on augmented unlabelled images."""
    models.average_bn_over(batches, ema)


def copy_bn(ema, net, batches):
    """The averaged model uses the BN statistics of the live model. MixMatch."""
    for averaged, live in zip(ema.buffers(), net.buffers()):
        averaged.copy_(live)

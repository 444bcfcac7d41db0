"""Compare training steps with the bare network, the matrix product and PIL: ratios, measured side by side.

    python benchmark.py                                         WRN-28-2, 64 + 64 images; writes benchmark.csv
    python benchmark.py --quick                                 16 + 16 images, two minutes on two idle cores
    python benchmark.py scaling                                 time and memory against batch, classes, image
                                                                size, width, processes; writes scaling.png
    python benchmark.py --folder my_images/ --image_size 64     batches from memory and from disk
    python benchmark.py --calculate                             estimates for ImageNet on A100 and H100 GPUs
"""
import cli

FLAGS = {
    "parts": (("ratios", "scaling"), cli.WORDS, "ratios: the table; scaling: the figure (default: ratios)"),
    "arch": (str, "wrn-28-2", "wrn-<depth>-<width>, fast-<width>-<width>-<width> or resnet50v2"),
    "classes": (int, 10, "number of classes and of rotation heads"),
    "image_size": (int, 32, "size in pixels"),
    "batch": (int, None, "labelled images per step, plus as many unlabelled ones (default: 64; 16 with "
                         "--quick and for scaling)"),
    "repeats": (int, None, "measurements of each function (default: 7; 3 with --quick and for scaling)"),
    "quick": (bool, False, "fewer images, repetitions and rows"),
    "busy": (bool, False, "for a machine that does other work: one thread, and CPU time instead of the time "
                          "on the clock"),
    "device": cli.RUN_FLAGS["device"],
    "out": (str, ".", "folder for benchmark.csv, scaling.csv and scaling.png"),
    "folder": (str, None, "folder of images (train/<class>/*): measure batches from memory and from disk"),
    "calculate": (bool, False, "calculate images per second, memory and traffic for ImageNet on GPUs; "
                               "measure nothing"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import augmentation
import data
import devices
import estimates
import losses
import metrics
import models
import run_folder
import timing

AT_ONCE = 8                             # batches per measurement; our choice, as workers deliver in bursts
HERE = Path(__file__).parent


@cli.strict(FLAGS)
def measure_speed(parts, arch, classes, image_size, batch, repeats, quick, busy, device, out, folder,
                  calculate):
    """Measure and print the requested parts, and write their tables. Returns the rows."""
    if calculate:
        return estimates.calculate_imagenet()
    models.check_arch(arch)
    small = quick or "scaling" in parts
    batch = (16 if small else 64) if batch is None else batch
    repeats = (3 if small else 7) if repeats is None else repeats
    limits = dict(classes=(classes, 2), image_size=(image_size, 8), batch=(batch, 1), repeats=(repeats, 1))
    for name, (value, least) in limits.items():
        if value < least:
            raise cli.Refused(f"--{name} {value}: must be {least} or more")
    if not os.path.isdir(out):
        raise cli.Refused(f"--out {out}: no such folder; create it, or omit the flag")
    if "scaling" in parts and not arch.startswith("wrn"):
        raise cli.Refused(f"--arch {arch}: scaling varies the width of wrn-<depth>-<width>")
    at = SimpleNamespace(arch=arch, classes=classes, size=image_size, batch=batch, repeats=repeats,
                         device=devices.select(device), quick=quick, busy=busy)
    if busy and at.device != "cpu":
        raise cli.Refused("--busy: CPU time says nothing about a GPU; omit the flag")
    if busy:
        torch.set_num_threads(1)
    print(f"{arch}, {image_size} pixels, {batch} + {batch} images per step, {at.device}, "
          f"{torch.get_num_threads()} threads{', CPU time' if busy else ''}, torch {torch.__version__}")
    rows = []
    if folder:
        return measure_folder(folder, at)
    if "ratios" in parts or not parts:
        rows += measure_ratios(at)
        write_table(Path(out, "benchmark.csv"), rows)
    if "scaling" in parts:
        rows += measure_scaling(at, Path(out))
    return rows


def write_table(path, rows):
    run_folder.write_whole(path, lambda tmp: run_folder.write_rows(tmp, rows, "w"))


# ---------------------------------------------------------------- ratios


def measure_ratios(at):
    """Measure and print all rows of the table."""
    print(f"\n| {'measurement':<74} | {'ratio':>6} | of medians | target  | met |\n"
          f"|{'-' * 76}|-------:|-----------:|---------|-----|", flush=True)
    rows = []
    for measure in (step_rows, rate_rows, baseline_rows, augmentation_rows, evaluation_rows, loss_rows,
                    head_rows, process_rows, import_rows):
        for row in measure(at):
            print(f"| {row['measurement']:<74} | {row['ratio']:>6} | {row['ratio_of_medians']:>10} | "
                  f"{row['target']:<7} | {row['met']:<3} |", flush=True)
            rows.append(row)
    return rows


def compare(name, at, *functions, **more):
    """The row of two functions that are measured in turn: ours and the reference."""
    return make_row(name, *timing.in_turn(functions, at), **more)


def make_row(name, ours, reference, target="", faster=False, factor=1.0, unit="ms"):
    """A row of the table from two lists of seconds (or bytes).

    The ratio is ours / reference, or with `faster` the reverse: how many times as fast we are. `factor`
    multiplies it. The target is "", or a sign and a number such as "<= 1.05".
    """
    (ours, ours_median), (other, other_median) = map(timing.best_and_median, (ours, reference))
    ratios = [factor * (b / a if faster else a / b) for a, b in ((ours, other), (ours_median, other_median))]
    met = ""
    if target:
        sign, number = target.split()
        met = "yes" if (ratios[0] <= float(number) if sign == "<=" else ratios[0] >= float(number)) else "no"
    scale = dict(ms=1e3, MiB=2 ** -20)[unit]
    return dict(measurement=name, ratio=f"{ratios[0]:.2f}", ratio_of_medians=f"{ratios[1]:.2f}",
                target=target, met=met, ours=f"{scale * ours:.4g}", reference=f"{scale * other:.4g}",
                unit=unit)


def step_rows(at):
    """Steps of CRAE and CRAE+ against passes of the bare network on as many ready images."""
    copies = 8 * at.batch                                       # four rotations of 2 * batch images
    bare = {}
    for precision in "fp32", "bf16":
        step, state, config = timing.step_of("crae", at, precision=precision)
        bare[precision] = timing.bare_passes(state.net, at.size, state.autocast, trained=[copies])
        yield compare(f"CRAE step / bare network, {precision}", at, step, bare[precision], target="<= 1.05")
        finish_step = timing.after_backward(state, config)
        yield compare(f"optimiser, EMA and bookkeeping / CRAE step, {precision}", at, finish_step, step,
                      target="<= 0.02")
        twice = timing.bare_passes(state.net, at.size, state.autocast, trained=[copies, copies])
        step, *_ = timing.step_of("crae_plus", at, precision=precision)
        yield compare(f"CRAE+ step / two passes of the bare network, {precision}", at, step, twice,
                      target="<= 1.05")
    yield compare("bare network, bf16 / fp32", at, bare["bf16"], bare["fp32"])
    if not at.quick:
        step, state, _ = timing.step_of("crae", at, compile=True)
        compiled = timing.bare_passes(state.net, at.size, state.autocast, trained=[copies])
        yield compare("CRAE step / bare network, fp32, both compiled", at, step, compiled, target="<= 1.05")


def rate_rows(at):
    """FLOP per second of the bare network against a matrix product, for two networks."""
    fast = SimpleNamespace(**vars(at) | dict(arch="fast-32-128-128", size=24))  # presets.fast
    for which, images in (at, 8 * at.batch), (fast, 320):       # the fast recipe: 128 + 192 copies per step
        for precision in "fp32", "bf16":
            _, state, config = timing.step_of("crae", which, precision=precision)
            run = timing.bare_passes(state.net, which.size, state.autocast, trained=[images])
            multiply, product_flops = matrix_product(config["device"], precision)
            target = ">= 0.85" if which is fast and precision == "bf16" else ""
            yield compare(f"FLOP/s of {which.arch} at {which.size} px / matrix product, {precision}", at, run,
                          multiply, faster=True, factor=timing.flops_of(run) / product_flops, target=target)


def matrix_product(device, precision):
    """A function that multiplies two matrices, and its FLOPs. 2048: large enough for the best rate."""
    n, kind = 2048, torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.rand(n, n, device=device).to(kind)
    return lambda: a @ a, 2 * n ** 3


def baseline_rows(at):
    """MixMatch, FixMatch and VAT against the passes of their networks."""
    for method, of_method in passes_of_baselines(at.batch).items():
        step, state, _ = timing.step_of(method, at)
        bare = timing.bare_passes(state.net, at.size, state.autocast, **of_method)
        yield compare(f"{method} step / its passes of the bare network, fp32", at, step, bare,
                      target="<= 1.05")


def passes_of_baselines(n):
    """The arguments of timing.bare_passes, for n labelled images."""
    return dict(mixmatch=dict(forward=[n, n], trained=[n, n, n]), fixmatch=dict(trained=[15 * n]),
                vat=dict(forward=[n], into_images=[n], trained=[n, n, n]))


def augmentation_rows(at):
    """Weak and strong augmentation against PIL, image by image."""
    n, gen = 7 * 64, torch.Generator(at.device).manual_seed(0)  # FixMatch's unlabelled images per step
    pil, images = timing.pil_images(n, at.size), timing.random_data(2, at.size)[0][:n].to(at.device)

    def rotations():
        weak = augmentation.flip_and_crop(images, flip=True, gen=gen)
        return augmentation.scale(augmentation.rotate4(weak)[0])

    pairs = {"augmentation and four rotations": (rotations, partial(timing.pil_rotations, pil), ">= 39"),
             "strong augmentation": (lambda: augmentation.strong_augment(images, gen),
                                     partial(timing.pil_strong, pil), ">= 5")}
    for name, (ours, theirs, target) in pairs.items():
        row = compare("", at, ours, theirs, target=target, faster=True)
        name += f", times as fast as PIL ({1e3 * float(row['ours']) / n:.0f} us per image)"
        yield row | dict(measurement=name)


def evaluation_rows(at):
    """The test of a model against its bare forward pass at the best batch size."""
    _, state, _ = timing.step_of("crae", at)
    net, index = state.net.eval(), state.index["test"][:1024]
    x = timing.ready_images(len(index), at.size, at.device)

    @torch.inference_mode()
    def forward(size):
        for part in x.split(size):
            models.classify(net, part)

    @torch.inference_mode()
    def evaluate():
        metrics.error_rates(net, state.images, state.labels, index)

    sizes = (64, 256, 1024) if at.quick else (32, 64, 128, 256, 512, 1024)
    ours, *others = timing.in_turn([evaluate, *(partial(forward, size) for size in sizes)], at)
    best = min(range(len(sizes)), key=lambda k: min(others[k]))
    yield make_row(f"evaluation / bare forward pass with {sizes[best]} images at a time, fp32", ours,
                   others[best], target="<= 1.05")


def loss_rows(at):
    """The marginal rotation loss against softmax, einsum and log, with 1000 classes and 1024 images."""
    N, C, device = 1024, 1000, at.device
    z = torch.arange(N, device=device) % 4

    def plain(class_logits, rot_logits, z):
        p_z = torch.einsum("nk,nkz->nz", class_logits.softmax(-1), rot_logits.softmax(-1))
        return torch.nn.functional.nll_loss(p_z.log(), z, reduction="none")

    def forward(n, loss):
        class_logits = torch.zeros(n, C, device=device, requires_grad=True)
        rot_logits = torch.zeros(n, C, 4, device=device, requires_grad=True)
        return loss(class_logits, rot_logits, z[:n]).mean()

    both = losses.unlabeled_rotation_loss, plain
    yield compare("marginal rotation loss / softmax-einsum-log, 1000 classes: time", at,
                  *(lambda loss=loss: forward(N, loss).backward() for loss in both), target="<= 1")
    kept = [devices.kept_for_backward(torch.nn.Module(), partial(forward, loss=loss))[1] for loss in both]
    yield make_row("the same: memory kept for the backward pass", *([N * each] for each in kept),
                   target="<= 1", unit="MiB")


def head_rows(at):
    """A step of ResNet50v2 with 1000 rotation heads on 16 features against a step without heads."""
    n, size, C, device = (4, 64, 1000, at.device) if at.quick else (16, 128, 1000, at.device)
    x, y = timing.ready_images(n, size, device), torch.arange(n, device=device)

    def step(net):
        net.zero_grad()
        class_logits, _, rot_logits = net(x)
        loss = losses.class_loss(class_logits, y)
        if rot_logits is not None:
            loss = loss + losses.unlabeled_rotation_loss(class_logits, rot_logits, y % 4).mean()
        loss.backward()

    nets = [models.make_model("resnet50v2", C, heads, rot_dim, aux=False)
            .to(device, memory_format=torch.channels_last) for heads, rot_dim in ((C, 16), (0, None))]
    yield compare(f"ResNet50v2, 1000 rotation heads on 16 features / none, {n} images of {size} px", at,
                  *(partial(step, net) for net in nets))


def process_rows(at):
    """Memory, and what keeping freed memory brings. Each measurement has a process of its own."""
    copies = 8 * at.batch
    things = {"CRAE+ step": "crae_plus"}
    if not at.quick:
        things = {"bare network": [copies], "CRAE step": "crae"} | things
    for name, what in things.items():
        if at.device == "cpu":
            kept, returned = [], []
            for _ in range(2):                                  # in turn: the machine may change
                for keep, times in (True, kept), (False, returned):
                    found, peak = timing.in_process(timing.measure_alone, what, at, keep)
                    times += found
            yield make_row(f"{name}: glibc keeps freed memory / returns it, fp32", kept, returned)
    _, peak = timing.in_process(timing.measure_alone, "crae_plus", at)
    _, bare = timing.in_process(timing.measure_alone, [copies, copies], at)
    yield make_row("memory of CRAE+ / two passes of the bare network, both kept", [peak], [bare],
                   target="<= 1.1", unit="MiB")


FIRST_STEP = """
import os, sys
sys.path.insert(0, sys.argv[1])
import train_crae, training
take_step = training.take_step
training.take_step = lambda *given: (take_step(*given), os._exit(0))
train_crae.train(dataset="digits", out=sys.argv[2])
"""


def import_rows(at):
    """Whole processes against the import of torch."""
    def python(*words, fails=False):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stderr

    imports = partial(python, "-c", "import torch")
    refused = partial(python, str(HERE / "train_crae.py"), "--lables=5", fails=True)
    yield compare("refused flag / import torch", at, refused, imports, target="<= 1")
    both = partial(python, "-c", "import torch, torchvision")

    def first_step():
        with tempfile.TemporaryDirectory() as tmp:
            python("-c", FIRST_STEP, str(HERE), str(Path(tmp, "run")))

    yield compare("first step on digits / import torch, torchvision", at, first_step, both, target="<= 1.5")


# ---------------------------------------------------------------- scaling


def measure_scaling(at, out):
    """Seconds and memory of a CRAE step against batch, classes, image size, width and processes."""
    import plots  # matplotlib is only needed here

    depth = at.arch.split("-")[1]
    here = torch.cuda.device_count() if at.device != "cpu" else devices.cores()
    processes = [n for n in (1, 2, 4, 8) if n <= here and at.batch % n == 0]
    axes = {"labelled images per step": [dict(batch=at.batch * n // 4 or 1) for n in (1, 2, 4, 8)],
            "classes": [dict(classes=n) for n in (10, 100, 1000)],
            "image size": [dict(size=n) for n in (16, 32, 64)],
            "width": [dict(arch=f"wrn-{depth}-{n}") for n in (1, 2, 4)],
            "processes": [dict(processes=n) for n in processes]}
    rows = []
    for axis, points in axes.items():
        for point in points:
            (_, value), = point.items()
            value = float(value.rpartition("-")[2]) if axis == "width" else value
            n, port = point.get("processes", 1), timing.free_port()
            which = SimpleNamespace(**vars(at) | point)
            found = timing.in_processes(timing.measure_alone, [
                ("crae", which, True, (rank, n, port)) for rank in range(n)])
            seconds, memory = min(found[0][0]), sum(peak for _, peak in found)
            rows.append(dict(axis=axis, value=value, seconds=f"{seconds:.4g}", mib=f"{memory / 2 ** 20:.4g}"))
            print(f"{axis:<26} {value:>6g} {seconds:>9.3f} s {memory / 2 ** 20:>9,.0f} MiB", flush=True)
    write_table(out / "scaling.csv", rows)
    run_folder.write_whole(out / "scaling.png", lambda tmp: plots.plot_scaling(rows, tmp))
    return rows


# ---------------------------------------------------------------- batches from a folder


def measure_folder(folder, at):
    """Print microseconds per image of batches from memory and from disk, and of a step. Returns them."""
    ways = {"batches from memory": dict(stream=False), "batches from disk, whole images": dict(stream=True),
            "batches from disk, random crops": dict(stream=True, crop="resized", flip=True)}
    fetch = []
    for reading in ways.values():
        images, labels, sets, _ = data.load(folder, "nowhere", at.size, skip_broken=True, **reading)
        images = images.to(at.device) if isinstance(images, torch.Tensor) else images
        train = torch.as_tensor(sets["train"])
        index = dict(labeled=train, unlabeled=train)
        batches = data.training_batches(images, labels.to(at.device), index, at.batch, at.batch,
                                        range(10 ** 6), seed=0, rank=0, world=1, parts=1)
        fetch.append(lambda batches=batches: [next(batches) for _ in range(AT_ONCE)])
    step, *_ = timing.step_of("crae", at)
    *times, of_step = timing.in_turn([*fetch, step], at)
    result = {way: 1e6 * timing.best_and_median(found)[1] / (2 * at.batch * AT_ONCE)
              for way, found in zip(ways, times)}
    result["step of CRAE"] = 1e6 * timing.best_and_median(of_step)[1] / (2 * at.batch)
    for way, each in result.items():
        print(f"{way:<36} {each:12,.1f} us/image   {each / result['batches from memory']:10,.1f} x")
    return result


if __name__ == "__main__":
    cli.run(measure_speed, ARGUMENTS)

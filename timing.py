"""How to measure: two things in turn, real training steps, the bare network, memory, and PIL as a reference.

A time on a machine that does other work means little. The ratio of two times that were measured in turn means
more, so the benchmark prints ratios: of the best times, which other programs disturb least, and of medians.
"""
import copy
import itertools
import os
import random
import resource
import socket
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2 import functional as TF

import augmentation
import devices
import distributed
import train_baselines
import train_crae
import training

IMAGES = 2048                           # random images to draw batches from; we chose more than a batch has


def in_turn(functions, at):
    """The seconds of each function, a list per function. They run in turn, after one run to warm up.

    at: the arguments of the benchmark. If the machine is busy, CPU time counts, not the time on the clock.
    """
    clock, device = cpu_seconds if at.busy else time.perf_counter, torch.device(at.device)
    for function in functions:
        function()
    times = [[] for _ in functions]
    for _ in range(at.repeats):
        for function, of_function in zip(functions, times):
            devices.synchronize(device)
            began = clock()
            function()
            devices.synchronize(device)
            of_function.append(clock() - began)
    return times


def cpu_seconds():
    """CPU time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def best_and_median(times):
    return min(times), statistics.median(times)


# ---------------------------------------------------------------- steps and the bare network


def random_data(classes, size):
    """Images, labels, split and classes in place of run_folder.load_data."""
    gen = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, size, size, 3), dtype=torch.uint8, generator=gen)
    split = dict(labeled=np.arange(IMAGES // 2), unlabeled=np.arange(IMAGES), validation=np.arange(0),
                 test=np.arange(IMAGES))
    labels = torch.arange(IMAGES) % classes
    return images.permute(0, 3, 1, 2), labels, split, [str(c) for c in range(classes)]


def start_run(method, at, **flags):
    """A run of the training scripts on random images, ready for its first step, and its config.

    at: the arguments of the benchmark. Its `recipe` is the paper's, so networks and batches are given.
    """
    script = train_crae if method.startswith("crae") else train_baselines
    own = dict(plus=method == "crae_plus") if script is train_crae else dict(method=method)
    flags = dict(dataset="cifar10", recipe="paper", arch=at.arch, batch=at.batch, device=at.device,
                 out="benchmark", precision="fp32") | own | flags
    config = script.configure(**flags)
    loaded = random_data(at.classes, at.size)
    net, objective, loop = script.build(config, at.classes)
    state = training.make_state(net, objective, loaded, config, **loop)
    training.make_ready(state, config)
    return state, config


def step_of(method, at, **flags):
    """A function that takes the next training step of a new run, and the run's state and config."""
    state, config = start_run(method, at, **flags)
    numbers = itertools.count()
    return lambda: training.take_step(state, config, next(numbers)), state, config


def after_backward(state, config):
    """A function that does what follows the backward pass of a step: optimiser, EMA, sums of the losses."""
    terms = {name: torch.ones((), device=state.labels.device) for name in ("class", "aux", "a", "b")}

    def finish_step():
        training.add_losses(state, terms, 0, 1)
        state.optimizer.step()
        state.average(state.averages, state.weights, 0)
        distributed.average_bn(state.net)

    return finish_step


def ready_images(n, size, device):
    """Scaled images (n, 3, size, size) in the layout of training."""
    x = torch.rand(n, 3, size, size, device=device) * 2 - 1
    return x.contiguous(memory_format=torch.channels_last)


def bare_passes(net, size, autocast, trained=(), forward=(), into_images=()):
    """A function that only runs the network, on ready images: one pass for each number of images.

    trained: forward and backward, after all passes; forward: without a backward pass; into_images: the
    gradient of the images only, in float32, as VAT needs it.
    """
    device = next(net.parameters()).device
    x = ready_images(max([*trained, *forward, *into_images]), size, device)
    net = copy.deepcopy(net)

    def total(heads):
        return sum(logits.float().sum() for logits in heads if logits is not None)

    def run():
        with torch.no_grad(), autocast():
            for n in forward:
                net(x[:n])
        for n in into_images:
            images = x[:n].detach().requires_grad_()
            torch.autograd.grad(total(net(images)), images)
        net.zero_grad()
        with autocast():
            kept = [net(x[:n]) for n in trained]
        if kept:
            sum(map(total, kept)).backward()

    return run


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# ---------------------------------------------------------------- processes of their own


def in_processes(function, argument_lists):
    """Call a function in new processes, one per list of arguments, at the same time. Returns the results."""
    with ProcessPoolExecutor(len(argument_lists), mp_context=get_context("spawn")) as pool:
        return [job.result() for job in [pool.submit(function, *given) for given in argument_lists]]


def in_process(function, *given):
    return in_processes(function, [given])[0]


def measure_alone(what, at, keep=True, place=(0, 1, 0)):
    """Seconds per step (a list) and peak memory in bytes of a training step, or of bare passes.

    what: a method, or a list of the numbers of images of the bare passes, which are all kept until the
    backward pass. keep: whether glibc keeps freed memory. place: rank, processes and their port.
    """
    rank, world, port = place
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port),
                          LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    torch.set_num_threads(1 if at.busy else max(1, devices.cores() // world))
    if not keep:
        devices.keep_freed_memory = lambda: None                # this process measures nothing else
    bare = not isinstance(what, str)
    function, state, config = step_of("crae" if bare else what, at)
    if bare:
        function = bare_passes(state.net, at.size, state.autocast, trained=what)
    before, device = memory_now(), torch.device(config["device"])
    times, = in_turn([function], at)
    result = times, peak_memory(device) - before
    distributed.leave()
    return result


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def memory_now():
    """Bytes of this process; 0 where only the peak is known."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:                                             # not Linux
        return 0


def peak_memory(device):
    """Bytes on the GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return memory_now() + torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)     # macOS counts bytes, Linux KiB


# ---------------------------------------------------------------- the plain alternative: PIL, image by image


GREY = (augmentation.GREY,) * 3


def pil_images(n, size):
    return [Image.fromarray(image) for image in
            np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8)]


def pil_weak(image):
    """Pad by reflection, crop and flip, as DataLoader workers do."""
    S = image.width
    i, j = random.randint(0, S // 4), random.randint(0, S // 4)
    image = ImageOps.mirror(image) if random.random() < 0.5 else image
    return TF.crop(TF.pad(image, S // 8, padding_mode="reflect"), i, j, S, S)


def pil_rotations(images):
    """Weak augmentation, four rotations and scaling. (4N, 3, S, S)"""
    copies = (weak.rotate(90 * k) for weak in map(pil_weak, images) for k in range(4))
    return torch.stack([TF.to_dtype(TF.to_image(copy), torch.float32, scale=True) * 2 - 1 for copy in copies])


def pil_strong(images):
    """Two operations of FixMatch's table and Cutout per image. (N, 3, S, S) uint8"""
    return torch.stack([TF.to_image(pil_cutout(pil_operation(pil_operation(image)))) for image in images])


def pil_operation(image):
    op, u, S = random.randrange(augmentation.OPERATIONS), random.random(), image.width
    keep, signed = 0.05 + 0.9 * u, 2 * u - 1
    if op in (2, 3, 4):
        enhance = (ImageEnhance.Brightness, ImageEnhance.Color, ImageEnhance.Contrast)[op - 2]
        return enhance(image).enhance(keep)
    if op == 5:
        return Image.blend(image.filter(ImageFilter.SMOOTH), image, keep)
    if op > augmentation.ROTATE:
        shear_x, shear_y, shift_x, shift_y = (0.3 * signed if op == k else 0 for k in range(10, 14))
        matrix = 1, shear_x, S * shift_x, shear_y, 1, S * shift_y
        return image.transform((S, S), Image.AFFINE, matrix, Image.BILINEAR, fillcolor=GREY)
    others = {0: ImageOps.autocontrast, 1: ImageOps.equalize,
              6: lambda image: ImageOps.posterize(image, 4 + int(5 * u)),
              7: lambda image: ImageOps.solarize(image, 256 * u),
              augmentation.ROTATE: lambda image: image.rotate(30 * signed, Image.BILINEAR,
                                                               fillcolor=GREY)}
    return others.get(op, lambda image: image)(image)


def pil_cutout(image):
    S = image.width
    row, col, half = S * random.random(), S * random.random(), S * random.random() / 4
    box = [round(v) for v in (max(0, col - half), max(0, row - half), min(S, col + half), min(S, row + half))]
    image = image.copy()
    image.paste(GREY, box)
    return image

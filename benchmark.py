"""Measure the speed of a CRAE+ step and of its parts, in microseconds per image, and its memory.

    python benchmark.py                                         WRN-28-2 at 32 pixels, 64 + 64 images per step
    python benchmark.py --arch wrn-10-1 --batch 16
    python benchmark.py --folder my_images/ --image_size 64     also batches from memory and from disk
    python benchmark.py --calculate                             estimates for ImageNet on A100 and H100 GPUs
"""
import cli

FLAGS = {
    "arch": (str, "wrn-28-2", "wrn-<depth>-<width> or resnet50v2"),
    "classes": (int, 10, "number of classes and of rotation heads"),
    "image_size": (int, 32, "size in pixels"),
    "batch": (int, 64, "labelled images per step, plus as many unlabelled ones"),
    "repeats": (int, 5, "measurements of each part; the median is shown"),
    "device": cli.RUN_FLAGS["device"],
    "folder": (str, None, "folder of images (train/<class>/*): also measure batches from memory and disk"),
    "calculate": (bool, False, "calculate images per second, memory and traffic for ImageNet on GPUs; "
                               "measure nothing"),
}

if __name__ == "__main__":
    ARGUMENTS = cli.parse(FLAGS, __doc__)   # before torch is imported: a mistyped flag is reported at once

import resource
import statistics
import sys
import time
from functools import partial

import torch
from PIL import Image, ImageOps
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2 import functional as TF

import augmentation
import data
import devices
import models
import train_crae
import training

AT_ONCE = 8                             # batches per measurement; our choice, as workers deliver in bursts
BATCHED = "augmentation and rotation, batched"                  # all parts are compared with this one


@cli.strict(FLAGS)
def measure_speed(arch, classes, image_size, batch, repeats, device, folder, calculate):
    """Measure every part and print one line each. Returns {part: microseconds per image} and the memory."""
    if calculate:
        return calculate_imagenet()
    models.check_arch(arch)
    limits = dict(classes=(classes, 2), image_size=(image_size, 8), batch=(batch, 1), repeats=(repeats, 1))
    for name, (value, least) in limits.items():
        if value < least:
            raise cli.Refused(f"--{name} {value}: must be {least} or more")
    device = torch.device(devices.select(device))
    parts = training_parts(arch, classes, image_size, batch, device)
    print(f"{arch}, {image_size} pixels, {batch} + {batch} images per step, {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    if folder:
        parts |= folder_parts(folder, image_size, batch, device)
    result = {}
    for name, part in parts.items():
        images = 2 * batch * (AT_ONCE if name.startswith("batches") else 1)
        result[name] = 1e6 * median_seconds(part, repeats, device) / images
        print(f"{name:<36} {result[name]:12,.1f} us/image   {result[name] / result[BATCHED]:10,.1f} x")
    result["peak memory"] = peak_memory(device)
    print(f"{'peak memory':<36} {result['peak memory']:12,.1f} GiB")
    return result


# ---------------------------------------------------------------- measurements


def training_parts(arch, classes, image_size, batch, device):
    """{name: function} for the parts of a step and for whole steps, on random images."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2 * batch, image_size, image_size, 3), dtype=torch.uint8)
    pil_images = [Image.fromarray(image.numpy()) for image in images]
    images, labels = images.permute(0, 3, 1, 2).to(device), torch.randint(classes, (batch,), device=device)
    net = models.make_model(arch, classes, classes).to(device, memory_format=torch.channels_last)
    optimizer = training.make_adam(net, 0.002, 0.02)
    gen = torch.Generator(device).manual_seed(0)
    augment = partial(augmentation.flip_and_crop, flip=True, gen=gen)
    autocast = devices.autocast(device, devices.default_precision(device, "fp32"))

    def step(objective):
        x_l, x_u = images[:batch], images[batch:]
        with autocast():
            terms = objective(net, x_l, labels, x_u, augment=augment, gen=gen, step=0, ema=net)
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.step()

    common = dict(select="marginal", eta=1.0, aux="upright")
    crae = partial(train_crae.crae, **common)
    crae_plus = partial(train_crae.crae_plus, **common, eta2=1.0, temperature=0.5)
    rotated = augmentation.scale(augmentation.rotate4(images)[0])               # (8 batch, 3, S, S)
    return {
        BATCHED: lambda: augmentation.scale(augmentation.rotate4(augment(images))[0]),
        "augmentation and rotation, PIL loop": lambda: augment_one_by_one(pil_images),
        "mixing": lambda: augmentation.mix(rotated, [batch] * 8, gen),
        "step of CRAE": lambda: step(crae),
        "step of CRAE+": lambda: step(crae_plus),
    }


def augment_one_by_one(images):
    """The plain alternative: pad, crop, flip and rotate PIL images in a loop, as DataLoader workers do."""
    out = []
    for image in images:
        S = image.width
        i, j = torch.randint(0, S // 4 + 1, (2,)).tolist()
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        image = TF.crop(TF.pad(image, S // 8, padding_mode="reflect"), i, j, S, S)
        for k in range(4):
            x = TF.to_dtype(TF.to_image(image.rotate(90 * k)), torch.float32, scale=True)       # in [0, 1]
            out.append(x * 2 - 1)
    return torch.stack(out)


def folder_parts(folder, image_size, batch, device):
    """{name: function that fetches AT_ONCE batches}, from memory and from disk."""
    ways = {"batches from memory": dict(stream=False), "batches from disk, whole images": dict(stream=True),
            "batches from disk, random crops": dict(stream=True, crop="resized", flip=True)}
    parts = {}
    for name, reading in ways.items():
        images, labels, sets, _ = data.load(folder, "nowhere", image_size, skip_broken=True, **reading)
        images = images.to(device) if isinstance(images, torch.Tensor) else images
        train = torch.as_tensor(sets["train"])
        index = dict(labeled=train, unlabeled=train)
        batches = data.training_batches(images, labels.to(device), index, batch, batch, range(10 ** 6),
                                        seed=0, rank=0, world=1, parts=1)
        parts[name] = lambda batches=batches: [next(batches) for _ in range(AT_ONCE)]
    return parts


def median_seconds(part, repeats, device):
    part()                                      # warm up
    times = []
    for _ in range(repeats):
        devices.synchronize(device)
        start = time.perf_counter()
        part()
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_memory(device):
    """GiB on the GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2 ** 30 if sys.platform == "darwin" else 2 ** 20)    # macOS counts bytes, Linux KiB


# ---------------------------------------------------------------- calculation

# NVIDIA's data sheets: dense bfloat16 FLOP/s, memory, and bytes per second that a GPU sends inside a DGX and
# between two of them.
GPUS = {"A100 80 GB": (312e12, 80e9, 300e9, 25e9), "H100 80 GB": (989e12, 80e9, 450e9, 50e9)}
SHARE_OF_PEAK = 0.2                             # our assumption; such convolutional networks reach 0.1 to 0.3
# The paper's step on ImageNet: 256 + 256 images in four rotations, and features reduced to 16.
COPIES, CLASSES, SIZE, ROT_DIM = 8 * 256, 1000, 224, 16


def calculate_imagenet():
    """Print the cost of a step of CRAE on ImageNet, from FLOPs and parameters. Returns images per second."""
    cost = imagenet_cost()
    for dim in 0, ROT_DIM:
        print_head_cost(dim)
    print(f"one copy of an image: {cost['flops'] / 1e9:.1f} GFLOP forward and backward, "
          f"{cost['per_copy'] / 2 ** 20:.0f} MiB kept for the backward pass; "
          f"{cost['parameters']:,} parameters")
    print(f"CRAE+ needs two passes, and sends {COPIES * 3 * SIZE ** 2 / 1e6:.0f} MB of images to every GPU "
          f"per step\n\nCALCULATED, at {SHARE_OF_PEAK:.0%} of the peak:")
    return {(gpu, n): print_gpu_estimate(gpu, n, cost) for gpu in GPUS for n in (1, 8, 64)}


def imagenet_cost():
    """ResNet50v2: FLOPs and bytes per copy of an image, parameters, and bytes for any batch (`state`)."""
    torch.manual_seed(0)
    net = models.make_model("resnet50v2", CLASSES, CLASSES, rot_dim=ROT_DIM)
    with FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, 3, SIZE, SIZE))
    parameters = sum(p.numel() for p in net.parameters())

    def forward(n):
        return net.train()(torch.zeros(n, 3, SIZE, SIZE))

    with torch.autocast("cpu", torch.bfloat16):
        fixed, per_copy = devices.kept_for_backward(net, forward)
    # The backward pass takes twice the FLOPs of the forward pass. State: weights, average, gradients and
    # momentum in float32, and the weights in bfloat16.
    return dict(flops=3 * counter.get_total_flops(), parameters=parameters, per_copy=per_copy,
                state=4 * 4 * parameters + fixed)


def print_head_cost(dim):
    net = models.make_model("resnet50v2", CLASSES, CLASSES, dim)
    heads = sum(p.numel() for name, p in net.named_parameters() if name.startswith(("reduce", "rotation")))
    reduction = f"features reduced to {dim}" if dim else "no reduction"
    print(f"{CLASSES} rotation heads, {reduction}: {heads:,} parameters, "
          f"{3 * 4 * heads / 2 ** 20:.1f} MiB with gradients and momentum; "
          f"logits of a step {COPIES * 4 * CLASSES * 4 / 2 ** 20:.1f} MiB")


def print_gpu_estimate(gpu, n, cost):
    """Print the time and memory of a step on n GPUs. Returns images per second."""
    peak, memory, inside, between = GPUS[gpu]
    copies = COPIES / n                                         # per GPU
    seconds = copies * cost["flops"] / (SHARE_OF_PEAK * peak)
    traffic = 2 * (n - 1) / n * 4 * cost["parameters"]          # ring all-reduce of float32 gradients
    wait = traffic / (inside if n <= 8 else between)
    needed = cost["state"] + copies * cost["per_copy"]
    parts = 1
    while cost["state"] + copies / parts * cost["per_copy"] >= 0.9 * memory:
        parts *= 2
    rate = COPIES / 4 / (seconds + wait)
    print(f"{n:>3} x {gpu}: {1000 * seconds:7.1f} ms computing + {1000 * wait:4.1f} ms sending "
          f"{traffic / 1e6:5.1f} MB per GPU (not overlapped), {rate:8,.0f} images/s, "
          f"{needed / 1e9:6.1f} GB per GPU"
          + (f": --accumulate {parts}" if parts > 1 else ""))
    return rate


if __name__ == "__main__":
    cli.run(measure_speed, ARGUMENTS)

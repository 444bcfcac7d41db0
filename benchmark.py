"""Speed of a CRAE+ step and of its parts, in microseconds an image, and its memory, all measured in one run.

    python benchmark.py                                         WRN-28-2 at 32 pixels, 64 + 64 images a step
    python benchmark.py --arch wrn-10-1 --batch 16
    python benchmark.py --folder my_pictures/ --image_size 64   and of batches from memory and from disk
    python benchmark.py --calculate                             nothing measured: ImageNet on A100 and H100 GPUs
"""
import resource
import statistics
import sys
import time
from functools import partial

import torch
from PIL import Image, ImageOps
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2 import functional as TF

import data
import training
from models import check_arch, make_model
from train_crae import crae, crae_plus


def one_by_one(pictures):
    """The plain alternative: pad, crop, flip and rotate PIL images in a loop, as a DataLoader's worker does."""
    out = []
    for picture in pictures:
        S = picture.width
        i, j = torch.randint(0, S // 4 + 1, (2,)).tolist()
        if torch.rand(()) < 0.5:
            picture = ImageOps.mirror(picture)
        picture = TF.crop(TF.pad(picture, S // 8, padding_mode="reflect"), i, j, S, S)
        out += [TF.to_dtype(TF.to_image(picture.rotate(90 * k)), torch.float32, scale=True) * 2 - 1 for k in range(4)]
    return torch.stack(out)


# NVIDIA's data sheets: dense bfloat16 FLOP/s, memory, and what a GPU sends a second inside a DGX and between DGX's.
GPUS = {"A100 80 GB": (312e12, 80e9, 300e9, 25e9), "H100 80 GB": (989e12, 80e9, 450e9, 50e9)}
SHARE_OF_PEAK = 0.2                                             # ours: an assumption; convolutional networks of this kind reach 0.1 to 0.3


def calculate_imagenet():
    """A step of CRAE on ImageNet as in the paper, 256 + 256 images in four rotations, ResNet50v2, from FLOPs and parameters."""
    copies, classes = 8 * 256, 1000
    torch.manual_seed(0)
    net = make_model("resnet50v2", classes, classes, rot_dim=16)
    with FlopCounterMode(display=False) as counter:
        net.eval()(torch.zeros(1, 3, 224, 224))
    flops = 3 * counter.get_total_flops()                       # forward, and twice that backward
    parameters = sum(p.numel() for p in net.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        fixed, kept = training.kept_for_backward(net, lambda n: net.train()(torch.zeros(n, 3, 224, 224)))
    for dim in 0, 16:
        heads = [p.numel() for name, p in make_model("resnet50v2", classes, classes, dim).named_parameters() if name.startswith(("reduce", "rotation"))]
        print(f"{classes} rotation heads, {f'features reduced to {dim}' if dim else 'no reduction'}: {sum(heads):,} parameters, "
              f"{3 * 4 * sum(heads) / 2 ** 20:.1f} MiB with gradients and momentum; logits of a step {copies * 4 * classes * 4 / 2 ** 20:.1f} MiB")
    print(f"a copy of an image: {flops / 1e9:.1f} GFLOP forward and backward, {kept / 2 ** 20:.0f} MiB kept for the gradients; "
          f"{parameters:,} parameters\nCRAE+ takes two passes, and sends {copies * 3 * 224 ** 2 / 1e6:.0f} MB of pictures to every GPU in a step"
          f"\n\nCALCULATED, at {SHARE_OF_PEAK:.0%} of the peak:")
    result = {}
    for gpu, (peak, memory, inside, between) in GPUS.items():
        for n in 1, 8, 64:
            seconds = copies / n * flops / (SHARE_OF_PEAK * peak)
            traffic = 2 * (n - 1) / n * 4 * parameters          # a ring's all-reduce of float32 gradients, sent by each GPU
            wait = traffic / (inside if n <= 8 else between)
            state = 4 * 4 * parameters + fixed                  # weights, average, gradients, momentum; bfloat16 weights
            need = state + copies / n * kept
            parts = next(k for k in (2 ** i for i in range(12)) if state + copies / n / k * kept < 0.9 * memory)
            result[gpu, n] = 512 / (seconds + wait)
            print(f"{n:>3} x {gpu}: {1000 * seconds:7.1f} ms computing + {1000 * wait:4.1f} ms sending {traffic / 1e6:5.1f} MB a GPU (not overlapped), "
                  f"{512 / (seconds + wait):8,.0f} images/s, {need / 1e9:6.1f} GB a GPU" + (f": --accumulate {parts}" if parts > 1 else ""))
    return result


AT_ONCE = 8                                                     # ours: batches in one measurement, since workers deliver them in bursts


def from_folder(folder, image_size, batch, device):
    """A function that fetches AT_ONCE batches, for pictures in memory and for pictures on disk."""
    parts = {}
    for name, reading in {"batches from memory": dict(stream=False), "batches from disk, whole pictures": dict(stream=True),
                          "batches from disk, random pieces": dict(stream=True, crop="resized", flip=True)}.items():
        images, labels, index, _ = data.load(folder, "nowhere", image_size, skip_broken=True, **reading)
        images = images.to(device) if isinstance(images, torch.Tensor) else images
        index = dict(labeled=torch.as_tensor(index["train"]), unlabeled=torch.as_tensor(index["train"]))
        batches = data.training_batches(images, labels.to(device), index, batch, 1, range(10 ** 6), 0, 0, 1, 1)
        parts[name] = lambda batches=batches: [next(batches) for _ in range(AT_ONCE)]
    return parts


def benchmark(arch: str = "wrn-28-2", classes: int = 10, image_size: int = 32, batch: int = 64, repeats: int = 5,
              device: str | None = None, folder: str | None = None, calculate: bool = False) -> dict:
    """Flags:

    --arch          wrn-<depth>-<width> or resnet50v2
    --classes       number of classes, and of rotation heads
    --image_size    pixels
    --batch         labelled images in a step, and as many unlabelled ones
    --repeats       each part is measured so often, and the median is shown
    --device        cpu, cuda, cuda:1; without it cuda where there is one
    --folder        a folder of pictures (train/<class>/*): also measure its batches from memory and from disk
    --calculate     measure nothing, but calculate ImageNet's images per second, memory and traffic for GPUs
    --help          this text
    """
    if calculate:
        return calculate_imagenet()
    check_arch(arch)
    for name, value, least in ("classes", classes, 2), ("image_size", image_size, 8), ("batch", batch, 1), (
            "repeats", repeats, 1):
        if value < least:
            sys.exit(f"--{name} {value}: must be {least} or more")
    device = torch.device(training.check_device(device))
    torch.manual_seed(0)
    images = torch.randint(0, 256, (2 * batch, image_size, image_size, 3), dtype=torch.uint8)
    pictures = [Image.fromarray(image.numpy()) for image in images]
    images, labels = images.permute(0, 3, 1, 2).to(device), torch.randint(classes, (batch,), device=device)
    net = make_model(arch, classes, classes).to(device, memory_format=torch.channels_last)
    optimizer = training.make_optimizer(net, 0.002, 0.02)
    gen = torch.Generator(device).manual_seed(0)
    augment = partial(data.augment, flip=True, gen=gen)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def step(objective):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            terms = objective(net, images[:batch], labels, images[batch:], augment, gen)
        optimizer.zero_grad()
        sum(terms.values()).backward()
        optimizer.step()

    parts = {
        "augmentation and rotation, batched": lambda: data.scale(data.rotate4(augment(images))[0]),
        "augmentation and rotation, PIL loop": lambda: one_by_one(pictures),
        "mixing": partial(data.mix, data.scale(data.rotate4(images)[0]), gen),
        "step of CRAE": lambda: step(partial(crae, select="marginal", eta=1.0)),
        "step of CRAE+": lambda: step(partial(crae_plus, select="marginal", eta=1.0, eta2=1.0, temperature=0.5)),
    }
    print(f"{arch}, {image_size} pixels, {batch} + {batch} images a step, {device}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}")
    if folder:
        parts |= from_folder(folder, image_size, batch, device)
    result = {}
    for name, part in parts.items():
        part()                                                  # warm-up
        times = []
        for _ in range(repeats):
            wait()
            start = time.perf_counter()
            part()
            wait()
            times.append(time.perf_counter() - start)
        result[name] = 1e6 * statistics.median(times) / (2 * batch * (AT_ONCE if name.startswith("batches") else 1))
        ratio = result[name] / result["augmentation and rotation, batched"]
        print(f"{name:<36} {result[name]:12,.1f} us/image   {ratio:10,.1f} x")
    if device.type == "cuda":
        result["peak memory"] = torch.cuda.max_memory_allocated(device) / 2 ** 30
    else:                                                       # of the whole process; macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result["peak memory"] = peak / (2 ** 30 if sys.platform == "darwin" else 2 ** 20)
    print(f"{'peak memory':<36} {result['peak memory']:12,.1f} GiB")
    return result


if __name__ == "__main__":
    training.command_line(benchmark)

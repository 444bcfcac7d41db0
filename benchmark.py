"""Speed of a CRAE+ step and of its parts, in microseconds an image, and its memory, all measured in one run.

    python benchmark.py                                         WRN-28-2 at 32 pixels, 64 + 64 images a step
    python benchmark.py --arch wrn-10-1 --batch 16
"""
import resource
import statistics
import sys
import time
from functools import partial

import torch
from PIL import Image, ImageOps
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


def benchmark(arch: str = "wrn-28-2", classes: int = 10, image_size: int = 32, batch: int = 64, repeats: int = 5,
              device: str | None = None) -> dict:
    """Flags:

    --arch          wrn-<depth>-<width> or resnet50v2
    --classes       number of classes, and of rotation heads
    --image_size    pixels
    --batch         labelled images in a step, and as many unlabelled ones
    --repeats       each part is measured so often, and the median is shown
    --device        cpu, cuda, cuda:1; without it cuda where there is one
    --help          this text
    """
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
        result[name] = 1e6 * statistics.median(times) / (2 * batch)
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

"""data.png in the run folder: images of each class as the network sees them, and what training makes of them.

It shows wrong labels, wrong crops, images that are black or not upright, and classes with few images, at the
start of a run. It has its own random generator, so it does not change the training.
"""
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms.v2 import functional as TF

import augmentation
import cli
import distributed
import inventory
import run_folder

# Our choices: a sheet of this width fits on a laptop's screen, and large images are shown smaller.
COLUMNS, LARGEST = 10, 88


@distributed.first_process_only
def write(loaded, config):
    """Write data.png. loaded: images, labels, split and classes, on the CPU."""
    import sheets  # matplotlib is only needed here

    images, labels, split, classes = loaded
    gen = torch.Generator().manual_seed(distributed.seed_of(config["seed"], "sheet", 0))
    shown, chosen = choose(labels, split["labeled"], len(classes), gen)         # (K,), (2, K, n)
    groups, cells = draw_cells(images, chosen, config, gen)
    counts = inventory.count_images(labels, split, len(classes))
    kind = "labelled images" if shown[-1] >= 0 else "images"
    title = f"{Path(config['dataset']).name}: {kind} at {images.shape[-1]} pixels"
    run_folder.write_whole(Path(config["out"], "data.png"), lambda tmp: sheets.plot_contact_sheet(
        cells, groups, shown, classes, counts, title, tmp))


def choose(labels, labeled, num_classes, gen):
    """The classes to show (K,) and two rows of n labelled images of each, -1 where there are none: (2, K, n).

    With few classes, n is larger. The first stage of fine_tune has no labels: its images are one class, -1.
    """
    y = np.asarray(labels)[labeled]
    found = np.unique(y)
    if len(found) > COLUMNS:
        order = torch.randperm(len(found), generator=gen)[:COLUMNS].numpy()
        found = found[np.sort(order)]
    n = max(1, COLUMNS // len(found))
    chosen = np.full((len(found), 2 * n), -1)
    for k, c in enumerate(found):
        own = labeled[y == c]
        own = own[torch.randperm(len(own), generator=gen)[:2 * n].numpy()]
        chosen[k, :len(own)] = own
    return found, chosen.reshape(len(found), 2, n).transpose(1, 0, 2)[::-1]     # the first n images below


def draw_cells(images, chosen, config, gen):
    """The captions (see sheets.plot_contact_sheet) and images of all rows, (R, K, n, S, S, 3).

    As loaded (one or two rows), then the last of these rows augmented, at 90, 180 and 270 degrees, and mixed.
    """
    place = chosen[1].ravel()                                   # (K * n,): the row that is augmented
    there = torch.as_tensor(place >= 0)
    first, second = (read(images, row.ravel()) for row in chosen)
    if isinstance(images, torch.Tensor):
        augmented = augmentation.flip_and_crop(second, config["flip"], gen)
    else:                                                       # --crop resized augments as it reads files
        seeds = torch.randint(2 ** 31, (len(place),), generator=gen).tolist()
        augmented = read(images, place, seeds)
        if config["crop"] == "pad":
            augmented = augmentation.flip_and_crop(augmented, config["flip"], gen)
    rotated = augmentation.rotate4(augmented)[0].unflatten(0, (4, -1))          # (4, K * n, 3, S, S)
    # As augmentation.mix, except that the other image is the next one on the left, where a reader finds it.
    x = augmentation.scale(augmented[there])
    share = 0.5 + 0.5 * torch.rand(len(x), generator=gen)
    mixed = augmented.clone()
    mixed[there] = ((augmentation.blend(share, x, x.roll(1, 0)) + 1) * 127.5).round().byte()
    cells = torch.stack([second, *rotated, mixed])              # (6, K * n, 3, S, S)
    cells = torch.where(there[:, None, None, None], cells, 255)
    groups = [["as loaded"], ["augmented", "rotated by 90°", "by 180°", "by 270°"], ["mixed (CRAE+)"]]
    if (chosen[0] >= 0).any():                                  # another row of images
        cells, groups = torch.cat([first[None], cells]), [["as loaded", ""], *groups[1:]]
    if cells.shape[-1] > LARGEST:
        cells = TF.resize(cells.flatten(0, 1), LARGEST, antialias=True).unflatten(0, cells.shape[:2])
    return groups, cells.permute(0, 1, 3, 4, 2).unflatten(1, chosen.shape[1:]).numpy()


def read(images, place, seeds=None):
    """The images at these places, white where a place is -1. (n, 3, S, S)"""
    found = torch.full((len(place), *images.shape[1:]), 255, dtype=torch.uint8)
    for k, i in enumerate(place.tolist()):
        if i >= 0 and isinstance(images, torch.Tensor):
            found[k] = images[i]
        elif i >= 0:
            try:
                found[k] = images[i, seeds[k] if seeds else None].permute(2, 0, 1)
            except OSError as error:                            # the file was readable when the run started
                raise cli.Refused(str(error))
    return found

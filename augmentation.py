"""Batched tensor operations on images: flip and crop, the four rotations, mixing, RandAugment.

    x = flip_and_crop(images[i], flip=True, gen=gen)    # (N, 3, S, S) uint8
    x, z = rotate4(x)                                   # (4N, 3, S, S), (4N,)
    logits = model(scale(x))                            # float32 in [-1, 1]

Images stay on the device, and nothing loops over them. Random numbers are drawn per image, and for the whole
batch even if several processes share it (see distributed.py).
"""
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import functional as TF

import distributed

# ---------------------------------------------------------------- weak augmentation and rotation


def flip_and_crop(x, flip, gen):
    """MixMatch: if `flip`, flip horizontally with probability 1/2; then reflect-pad by an eighth and crop.

    x is (N, 3, S, S) uint8, and so is the result. Every offset from 0 to 2 * pad occurs.
    """
    N, _, S, _ = x.shape
    rows = crop_positions(N, S, gen, x.device)          # (N, S)
    flipped = distributed.rand(N, 1, gen=gen, device=x.device) < 0.5 if flip else None
    cols = crop_positions(N, S, gen, x.device)
    if flip:
        cols = torch.where(flipped, S - 1 - cols, cols)
    first_pixel = torch.arange(N, device=x.device)[:, None, None] * S * S
    pixels = first_pixel + rows[:, :, None] * S + cols[:, None, :]      # (N, S, S)
    flat = x.permute(0, 2, 3, 1).reshape(N * S * S, 3)
    return flat.index_select(0, pixels.flatten()).view(N, S, S, 3).permute(0, 3, 1, 2)


def crop_positions(N, S, gen, device):
    """The source row (or column) of each row of a randomly shifted crop, reflected at the borders. (N, S)"""
    pad = S // 8                                        # MixMatch: 4 pixels for images of 32
    offset = distributed.randint(-pad, pad + 1, N, 1, gen=gen, device=device)
    position = torch.arange(S, device=device) + offset
    return S - 1 - (S - 1 - position.abs()).abs()


def rotate4(x):
    """All images at 0, then at 90, 180 and 270 degrees (4N, 3, S, S), and their rotation labels z (4N,)."""
    x = x.permute(0, 2, 3, 1)                           # channels last in memory, before and after
    z = torch.arange(4, device=x.device).repeat_interleave(len(x))
    return torch.cat([torch.rot90(x, k, (1, 2)) for k in range(4)]).permute(0, 3, 1, 2), z


def scale(x):
    """MixMatch: uint8 to float32 in [-1, 1], without whitening."""
    return x.float().mul_(2 / 255).sub_(1)


def rotate1(x, z):
    """Each image rotated by its own z (N,) times 90 degrees."""
    four, _ = rotate4(x)                                # (4N, 3, S, S)
    return four[z * len(x) + torch.arange(len(x), device=x.device)]


def rotated_batch(x_l, y_l, x_u, augment, gen=None, labeled="four", unlabeled="four"):
    """x (N, 3, S, S), labelled copies first, their classes y (n_l,), and the rotations z (N,) of all copies.

    labeled, unlabeled: the copies of each image, taken from the same crop: "four" rotations, "one" random
    rotation, or "two", the upright image and one random rotation. The paper does not specify them; its recipe
    uses four. The copies at the first rotation come first, so "four" and "two" start with all upright images.
    """
    x_l, z_l = rotated_copies(augment(x_l), labeled, gen)
    x_u, z_u = rotated_copies(augment(x_u), unlabeled, gen)
    return scale(torch.cat([x_l, x_u])), y_l.repeat(COPIES[labeled]), torch.cat([z_l, z_u])


COPIES = dict(four=4, two=2, one=1)


def rotation_sets(B, U, labeled, unlabeled):
    """The sizes of the sets of copies whose rotation is predicted, each with one copy per image.

    Of "two" labelled copies, it is the second, with its uniform rotation; the upright ones would prevail.
    """
    return [B] * dict(four=4, two=1, one=1)[labeled] + [U] * COPIES[unlabeled]


def rotated_copies(x, copies, gen):
    """The copies (n N, 3, S, S) of a batch, n = 4, 2 or 1, and their rotations z (n N,)."""
    if copies == "four":
        return rotate4(x)
    z = distributed.randint(0, 4, len(x), gen=gen, device=x.device)
    turned = rotate1(x, z)
    return (turned, z) if copies == "one" else (torch.cat([x, turned]), torch.cat([torch.zeros_like(z), z]))


# ---------------------------------------------------------------- mixing


def blend(share, a, b):
    """share * a + (1 - share) * b, with one share (N,) per image or distribution."""
    share = share.view(-1, *[1] * (a.ndim - 1))
    return share * a + (1 - share) * b


def mix(x, sizes, gen):
    """Ext. 2: x_mix = alpha x_i + (1 - alpha) x_j. The batch consists of sets of the given (local) sizes.

    Not specified in the paper; we draw alpha ~ U[0.5, 1] per image, and x_j by a permutation of the batch.
    """
    alpha = 0.5 + 0.5 * distributed.rand(len(x), gen=gen, device=x.device, sizes=sizes)
    partner = distributed.randperm(len(x), gen=gen, device=x.device)
    if not distributed.is_split():
        return blend(alpha, x, x[partner])
    pixels = ((x + 1) * 127.5).round().byte()           # undo `scale`: a quarter of the bytes to send
    return blend(alpha, x, scale(distributed.gather_rows(pixels, partner, sizes)))


def mixup_share(n, beta, gen, device, sizes=None):
    """MixMatch: draw lambda ~ Beta(beta, beta) per image; return the larger of lambda and 1 - lambda. (n,)"""
    share = distributed.beta(beta, n, gen=gen, device=device, sizes=sizes)
    return torch.maximum(share, 1 - share)


# ---------------------------------------------------------------- strong augmentation

# FixMatch's table of transformations: eight operations on colour (0 to 7), the identity, and five moves.
IDENTITY, ROTATE, SHEAR_X, SHEAR_Y, SHIFT_X, SHIFT_Y = range(8, 14)
OPERATIONS = 14
GREY = 127                                              # FixMatch's code: the fill value of Cutout


def strong_augment(x, gen):
    """FixMatch's RandAugment: two operations per image, drawn together with their strengths, then Cutout.

    x is (N, 3, S, S) uint8, and so is the result. The operations and their ranges are those of FixMatch's
    table. We always apply both operations (FixMatch's code skips each with probability 1/2), and we fill the
    area that a move uncovers with grey.
    """
    # Fake tensors (devices.step_flops) have no values to select images by.
    apply = apply_to_drawn if x.device.type == "cpu" and type(x) is torch.Tensor else apply_to_all
    for _ in range(2):
        op = distributed.randint(0, OPERATIONS, len(x), 1, 1, 1, gen=gen, device=x.device)
        u = distributed.rand(len(x), 1, 1, 1, gen=gen, device=x.device)
        x = apply(x, op, u)
    return cutout(x, gen).contiguous(memory_format=torch.channels_last)


def apply_to_drawn(x, op, u):
    """Apply each operation to the images that drew it."""
    x = x.clone(memory_format=torch.contiguous_format)  # channel by channel, the operations are faster
    for k, recolour in enumerate(COLOUR_OPS):
        i = (op == k).flatten().nonzero().squeeze(1)
        if len(i):
            x.index_copy_(0, i, recolour(x[i], u[i]))
    i = (op > IDENTITY).flatten().nonzero().squeeze(1)
    if len(i):
        x.index_copy_(0, i, move(x[i], op[i], u[i]))
    return x


def apply_to_all(x, op, u):
    """The same for a GPU: apply each operation to all images and keep the result where it was drawn.

    An index whose length varies between steps would make the GPU wait for the CPU.
    """
    recoloured, moved = [recolour(x, u) for recolour in COLOUR_OPS], move(x, op, u)
    for k, changed in enumerate(recoloured):
        x = torch.where(op == k, changed, x)
    return torch.where(op > IDENTITY, moved, x)


def toward(target, f, u):
    """FixMatch: keep a share of the image, between 0.05 and 0.95, and blend the rest with the target."""
    keep = 0.05 + 0.9 * u
    return (keep * f + (1 - keep) * target).byte()


def autocontrast(x, u):
    return TF.autocontrast(x)


def equalize(x, u):
    return TF.equalize(x)


def brightness(x, u):
    return ((0.05 + 0.9 * u) * x.float()).byte()        # towards black


def colour(x, u):
    f = x.float()
    return toward(TF.rgb_to_grayscale(f), f, u)


def contrast(x, u):
    f = x.float()
    return toward(TF.rgb_to_grayscale(f).mean((1, 2, 3), keepdim=True), f, u)


def sharpness(x, u):
    f = x.float()
    padded = F.pad(f, (1, 1, 1, 1), mode="replicate")
    rows = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
    around = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) / 9     # mean of 3 x 3 pixels
    smooth = (9 * around + 4 * f) / 13                  # PIL's SMOOTH: weight 5 in the middle, 1 around it
    return toward(smooth, f, u)


def posterise(x, u):
    level = 2 ** (4 - (5 * u).floor())                  # FixMatch: 4 to 8 of the 8 bits remain
    return ((x.float() / level).floor() * level).byte()


def solarise(x, u):
    return torch.where(x.float() < 256 * u, x, 255 - x)         # invert pixels above the threshold


# Numbers 0 to 7, each with strength u in [0, 1), (N, 1, 1, 1).
COLOUR_OPS = autocontrast, equalize, brightness, colour, contrast, sharpness, posterise, solarise


def move(x, op, u):
    """Rotate, shear or translate: one affine map per image, bilinear. Other operations do nothing."""
    N, _, S, _ = x.shape
    op, signed = op.view(-1), 2 * u.view(-1) - 1        # strength in [-1, 1)
    angle = torch.where(op == ROTATE, signed * (torch.pi / 6), 0)       # FixMatch: up to 30 degrees
    # FixMatch: shear by up to 0.3; translate by up to 0.3 of the image size.
    shear_x, shear_y, shift_x, shift_y = (
        torch.where(op == k, 0.3 * signed, 0) for k in (SHEAR_X, SHEAR_Y, SHIFT_X, SHIFT_Y))
    rows = [torch.stack([angle.cos(), shear_x - angle.sin(), 2 * shift_x], 1),
            torch.stack([shear_y + angle.sin(), angle.cos(), 2 * shift_y], 1)]
    # No autocast: bfloat16 would round positions to a tenth of a pixel. grid_sample fills with 0: grey.
    with torch.autocast(x.device.type, enabled=False):
        grid = F.affine_grid(torch.stack(rows, 1), (N, 3, S, S), align_corners=False)   # (N, S, S, 2)
        moved = F.grid_sample(x.float().sub_(GREY), grid, align_corners=False)
    return moved.add_(GREY).round_().clamp_(0, 255).byte()


def cutout(x, gen):
    """FixMatch: replace a square anywhere in the image with grey. Its side is up to half the image size."""
    N, _, S, _ = x.shape
    size, row, col = (S * distributed.rand(N, 1, gen=gen, device=x.device) for _ in range(3))   # (N, 1) each
    pixel = torch.arange(S, device=x.device) + 0.5      # the centre of each pixel
    rows = (pixel - row).abs() < size / 4               # (N, S): the side of the square is size / 2
    cols = (pixel - col).abs() < size / 4
    hole = (rows[:, :, None] & cols[:, None, :]).unsqueeze(1).byte()    # (N, 1, S, S)
    return x * (1 - hole) + GREY * hole                 # on CPUs much faster than torch.where

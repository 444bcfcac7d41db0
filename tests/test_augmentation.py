"""Augmentation follows the papers, draws per image, and does not depend on how a batch is split."""
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

import augmentation
import distributed
from helpers import generator, random_images

# ---------------------------------------------------------------- weak augmentation and rotation


def test_rotate4_agrees_with_rot90():
    x = random_images(6)
    copies, z = augmentation.rotate4(x)
    assert copies.shape == (24, 3, 8, 8) and z.tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    for i in range(24):
        assert torch.equal(copies[i], torch.rot90(x[i % 6], int(z[i]), (1, 2)))
    assert copies[6, 0, 0, 0] == x[0, 0, 0, -1]         # 90 degrees anticlockwise: top left was top right


@pytest.mark.parametrize("size", [8, 28, 32])
@pytest.mark.parametrize("flip", [True, False])
def test_flip_and_crop_flips_then_reflect_pads_then_crops_at_every_offset(size, flip):
    pad = size // 8
    x = random_images(1, size).expand(4000, -1, -1, -1)
    out = augmentation.flip_and_crop(x, flip, generator())
    crops = {}
    for flipped in (False, True) if flip else (False,):
        image = x[0].numpy()[:, :, ::-1] if flipped else x[0].numpy()
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        for i in range(2 * pad + 1):
            for j in range(2 * pad + 1):
                crops[padded[:, i:i + size, j:j + size].tobytes()] = flipped, i, j
    seen = [crops[image.contiguous().numpy().tobytes()] for image in out]       # KeyError: not a crop at all
    assert len(set(seen)) == len(crops) == (2 if flip else 1) * (2 * pad + 1) ** 2      # 81 offsets at 32
    assert out.dtype == torch.uint8
    counts = np.unique([s[1] for s in seen], return_counts=True)[1]
    assert counts.min() > 0.6 * 4000 / (2 * pad + 1)    # about equally often
    if flip:
        assert 0.45 < np.mean([s[0] for s in seen]) < 0.55


def test_flip_and_crop_draws_per_image_and_only_from_its_generator():
    x = random_images(1, 32).expand(64, -1, -1, -1)
    a = augmentation.flip_and_crop(x, True, generator(1))
    assert len({image.contiguous().numpy().tobytes() for image in a}) > 30
    assert torch.equal(a, augmentation.flip_and_crop(x, True, generator(1)))
    assert not torch.equal(a, augmentation.flip_and_crop(x, True, generator(2)))


def test_scale_is_that_of_mixmatch():
    x = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([i * 2 / 255 - 1 for i in range(256)])
    torch.testing.assert_close(augmentation.scale(x), expected, atol=1e-6, rtol=0)
    assert x.dtype == torch.uint8 and x[255] == 255     # the images themselves do not change


# ---------------------------------------------------------------- mixing


def test_mix_has_one_alpha_per_image():
    N = 500
    values = torch.arange(N).float()
    mixed = augmentation.mix(values.view(N, 1, 1, 1).expand(N, 3, 2, 2), [N], generator())
    gen = generator()
    alpha = 0.5 + 0.5 * torch.rand(N, 1, 1, 1, generator=gen).flatten()
    partner = torch.randperm(N, generator=gen)
    for i in range(N):
        expected = alpha[i] * values[i] + (1 - alpha[i]) * values[partner[i]]
        torch.testing.assert_close(mixed[i], expected.expand(3, 2, 2))
    recovered = ((mixed[:, 0, 0, 0] - partner) / (values - partner))[values != partner]
    assert 0.5 <= recovered.min() < 0.51 and 0.99 < recovered.max() <= 1 and len(recovered.unique()) > 450


# ---------------------------------------------------------------- sets of unequal sizes in a shared batch


def shares(world, parts):
    """Emulate every part of every process, in the order of the whole batch."""
    for rank in range(world):
        for part in range(parts):
            with distributed.share_of_batch(rank, world, part, parts):
                yield rank, part


def share_out(x, sizes, n):
    """n local batches of a whole batch, whose sets have n times the given sizes."""
    sets = [rows.chunk(n) for rows in x.split([n * size for size in sizes])]
    return [torch.cat(local) for local in zip(*sets)]


SIZES = [2, 3, 1]                                       # local sizes of the sets that make up a batch
SHARES = [(1, 1), (2, 1), (1, 3), (3, 2)]               # numbers of processes and of parts


@pytest.mark.parametrize("world, parts", SHARES)
def test_local_rows_take_the_same_share_of_every_set(world, parts):
    n = world * parts
    whole = torch.arange(n * sum(SIZES))
    expected = share_out(whole, SIZES, n)
    found = [distributed.local_rows(whole, SIZES) for _ in shares(world, parts)]
    assert all(map(torch.equal, found, expected)) and len(found) == n
    assert torch.equal(torch.cat(found).sort().values, whole)   # every row exactly once


def test_local_rows_of_two_processes_by_hand():
    drawn = torch.arange(12)                            # sets of 4, 6 and 2 rows
    found = [distributed.local_rows(drawn, SIZES).tolist() for _ in shares(2, 1)]
    assert found == [[0, 1, 4, 5, 6, 10], [2, 3, 7, 8, 9, 11]]
    assert [distributed.local_rows(drawn).tolist() for _ in shares(2, 1)] == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize("world, parts", SHARES)
@pytest.mark.parametrize("draw", [
    lambda n, gen, sizes: distributed.rand(n, 2, gen=gen, device="cpu", sizes=sizes),
    lambda n, gen, sizes: distributed.randn(n, 2, gen=gen, device="cpu", sizes=sizes),
    lambda n, gen, sizes: distributed.randint(0, 1000, n, 2, gen=gen, device="cpu", sizes=sizes),
    lambda n, gen, sizes: distributed.beta(0.75, n, gen=gen, device="cpu", sizes=sizes),
    lambda n, gen, sizes: augmentation.mixup_share(n, 0.75, gen, "cpu", sizes),
], ids=["rand", "randn", "randint", "beta", "mixup_share"])
def test_shared_draws_are_those_of_a_single_process(draw, world, parts):
    n = world * parts
    single = draw(n * sum(SIZES), generator(3), [n * size for size in SIZES])
    found = [draw(sum(SIZES), generator(3), SIZES) for _ in shares(world, parts)]
    assert len(found) == n and all(map(torch.equal, found, share_out(single, SIZES, n)))


@pytest.mark.parametrize("world", [2, 3])
def test_processes_mix_sets_of_unequal_sizes_as_a_single_process(monkeypatch, world):
    pixels = random_images(world * sum(SIZES))
    whole = augmentation.scale(pixels)
    single = augmentation.mix(whole, [world * size for size in SIZES], generator(3))

    def exchange(gathered, x):                          # what dist.all_gather does in `world` processes
        for place, rows in zip(gathered, share_out(pixels, SIZES, world)):
            place.copy_(rows)
        assert any(torch.equal(x, place) for place in gathered)         # x undoes `scale` exactly

    monkeypatch.setattr(distributed.dist, "all_gather", exchange)
    local = share_out(whole, SIZES, world)
    found = [augmentation.mix(local[rank], SIZES, generator(3)) for rank, _ in shares(world, 1)]
    for mixed, expected in zip(found, share_out(single, SIZES, world)):
        torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=0)
    with distributed.share_of_batch(0, world, 0, 1):    # the test can fail: other sizes, other images
        assert not torch.allclose(augmentation.mix(local[0], [2, 2, 2], generator(3)), found[0], atol=1e-6)


def test_parts_of_a_batch_mix_among_themselves_with_the_alpha_of_a_single_process():
    parts = 3
    whole = augmentation.scale(random_images(parts * sum(SIZES)))
    gen = generator(3)
    alpha = 0.5 + 0.5 * torch.rand(len(whole), generator=gen)
    partner = torch.randperm(sum(SIZES), generator=gen)         # each part mixes its own images
    local, alphas = (share_out(t, SIZES, parts) for t in (whole, alpha))
    for _, part in shares(1, parts):
        x = local[part]
        expected = augmentation.blend(alphas[part], x, x[partner])
        assert torch.equal(augmentation.mix(x, SIZES, generator(3)), expected)


# ---------------------------------------------------------------- strong augmentation


def photos(N=12, size=20):
    """Images that do not use the full range of values, so that autocontrast changes them."""
    return random_images(N, size).float().mul(0.6).add(torch.linspace(10, 90, size)).byte()


def test_colour_operations_agree_with_torchvision_on_single_images():
    x, u = photos(), torch.linspace(0, 0.99, 12).view(-1, 1, 1, 1)
    ops = [recolour(x, u) for recolour in augmentation.COLOUR_OPS]
    for i in range(12):
        keep, image = 0.05 + 0.9 * u[i].item(), x[i]
        expected = [TF.autocontrast(image), TF.equalize(image), TF.adjust_brightness(image, keep),
                    TF.adjust_saturation(image, keep), TF.adjust_contrast(image, keep),
                    TF.adjust_sharpness(image, keep), TF.posterize(image, 4 + int(5 * u[i].item())),
                    TF.solarize(image, 256 * u[i].item())]
        for k, (ours, theirs) in enumerate(zip(ops, expected)):
            difference = (ours[i].int() - theirs.int()).abs()
            if k == 5:
                difference = difference[:, 1:-1, 1:-1]  # torchvision does not blur the border
            assert difference.max() <= 1 and ours.dtype == torch.uint8, k
    assert len(ops) == 8 and all((op != x).any() for op in ops)


def test_plain_versions_of_sharpness_and_cutout_give_the_same_bits():
    x, u = photos(), torch.linspace(0, 0.99, 12).view(-1, 1, 1, 1)
    f, keep = x.float(), 0.05 + 0.9 * u
    around = F.avg_pool2d(F.pad(f, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    plain = (keep * f + (1 - keep) * ((9 * around + 4 * f) / 13)).byte()
    assert torch.equal(augmentation.sharpness(x, u), plain)
    gen = generator()
    size, row, col = (20 * torch.rand(12, 1, generator=gen) for _ in range(3))
    rows, cols = ((torch.arange(20) + 0.5 - centre).abs() < size / 4 for centre in (row, col))
    plain = torch.where((rows[:, :, None] & cols[:, None, :]).unsqueeze(1), 127, x)
    assert torch.equal(augmentation.cutout(x, generator()), plain)


def test_moves_are_rotation_shear_and_translation_of_each_image():
    def same_for_all(value):
        return torch.full((12, 1, 1, 1), value)

    x = photos()
    assert torch.equal(augmentation.move(x, same_for_all(3), torch.rand(12, 1, 1, 1)), x)       # not a move
    third = same_for_all(2 / 3)                         # a third of 0.3 of 20 pixels: two pixels
    moved = augmentation.move(x, same_for_all(12), third)
    assert torch.equal(moved[..., :-2], x[..., 2:]) and (moved[..., -2:] == 127).all()
    moved = augmentation.move(x, same_for_all(13), third)
    assert torch.equal(moved[:, :, :-2], x[:, :, 2:]) and (moved[:, :, -2:] == 127).all()
    bilinear = InterpolationMode.BILINEAR
    for op, shear in (9, None), (10, [0.2, 0.0]), (11, [0.0, 0.2]):
        strength = 20 / 30 if op == 9 else 0.2 / 0.3
        moved = augmentation.move(x, same_for_all(op), same_for_all((strength + 1) / 2)).int()
        if op == 9:
            theirs = [TF.rotate(x, angle, bilinear, fill=127).int() for angle in (20.0, -20.0)]
        else:
            degrees = [math.degrees(math.atan(0.2)) if s else 0.0 for s in shear]
            theirs = [TF.affine(x, 0.0, [0, 0], 1.0, [sign * d for d in degrees], bilinear, fill=127).int()
                      for sign in (1, -1)]
        inner = slice(5, 15)
        assert min((moved - t)[..., inner, inner].abs().max() for t in theirs) <= 2, op


def test_two_operations_are_drawn_per_image_and_all_equally_often(monkeypatch):
    colours = [lambda x, u, k=k: torch.full_like(x, 10 + k) for k in range(8)]
    monkeypatch.setattr(augmentation, "COLOUR_OPS", colours)
    monkeypatch.setattr(augmentation, "move", lambda x, op, u: torch.zeros_like(x) + op.byte() + 10)
    monkeypatch.setattr(augmentation, "cutout", lambda x, gen: x)
    x = augmentation.strong_augment(torch.zeros(20_000, 3, 8, 8, dtype=torch.uint8), generator())
    values, counts = x[:, 0, 0, 0].unique(return_counts=True)
    assert values.tolist() == [0, *range(10, 18), *range(19, 24)]
    p = counts / 20_000
    assert abs(p[0] - 1 / 14 ** 2) < 0.003              # the identity twice
    # The second draw, or the first one followed by the identity.
    assert ((p[1:] - (1 / 14 + 1 / 14 ** 2)).abs() < 0.01).all()


def test_cutout_greys_one_square_of_up_to_half_the_size_anywhere():
    size = 16
    x = torch.zeros(4000, 3, size, size, dtype=torch.uint8)
    grey = augmentation.cutout(x, generator()) == 127   # (N, 3, S, S)
    assert (grey == grey[:, :1]).all()
    rows, cols = grey[:, 0].any(2), grey[:, 0].any(1)   # (N, S)
    assert torch.equal(grey[:, 0], rows[:, :, None] & cols[:, None, :])
    height, width = rows.sum(1), cols.sum(1)
    inside = ~(rows[:, 0] | rows[:, -1] | cols[:, 0] | cols[:, -1])
    assert height.max() == size // 2 and inside.sum() > 500 and ((height - width)[inside].abs() <= 1).all()
    often = grey[:, 0].float().mean(0)
    assert often.min() > 0.02 and len(height.unique()) == size // 2 + 1         # every pixel, every size


@pytest.mark.parametrize("N, size", [(1, 8), (5, 20), (300, 16)])
def test_operations_on_the_images_that_drew_them_are_those_of_the_whole_batch(N, size, monkeypatch):
    """What a CPU computes and what a GPU computes, bit by bit, in both memory layouts."""
    x = photos(N, size)
    for seed in range(5):
        for layout in torch.contiguous_format, torch.channels_last:
            images = x.contiguous(memory_format=layout)
            before, drawn = images.clone(), augmentation.strong_augment(images, generator(seed))
            with monkeypatch.context() as patch:
                patch.setattr(augmentation, "apply_to_drawn", augmentation.apply_to_all)
                assert torch.equal(augmentation.strong_augment(images, generator(seed)), drawn)
            assert torch.equal(images, before)          # the operations leave the batch as it is


def test_strong_augmentation_is_repeatable_and_strong():
    x = photos(64)
    a, b, c = (augmentation.strong_augment(x, generator(s)) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.dtype == torch.uint8 and a.shape == x.shape
    assert a.is_contiguous(memory_format=torch.channels_last)
    assert ((a != x).flatten(1).any(1)).float().mean() > 0.8
    with torch.autocast("cpu", torch.bfloat16):         # as on a GPU
        assert torch.equal(augmentation.strong_augment(x, generator()), a)


def test_strong_augmentation_ends_with_cutout(monkeypatch):
    monkeypatch.setattr(augmentation, "COLOUR_OPS", [lambda x, u: x] * 8)
    monkeypatch.setattr(augmentation, "move", lambda x, op, u: x)
    x = torch.zeros(500, 3, 16, 16, dtype=torch.uint8)
    grey = (augmentation.strong_augment(x, generator()) == 127).flatten(1).any(1)
    assert grey.float().mean() > 0.8                    # a few squares are smaller than a pixel


def test_one_rotation_per_image():
    x, z = random_images(12), torch.arange(12) % 4
    for i, image in enumerate(augmentation.rotate1(x, z)):
        assert torch.equal(image, torch.rot90(x[i], i % 4, (1, 2)))
    x_l, y_l, x_u = x[:5], torch.arange(5), x[5:]
    batch, y, z = augmentation.rotated_batch(x_l, y_l, x_u, lambda x: x, generator(3), "one", "one")
    gen = generator(3)
    expected = [torch.randint(0, 4, (n,), generator=gen) for n in (5, 7)]
    assert torch.equal(y, y_l) and torch.equal(z, torch.cat(expected))
    for i, image in enumerate(batch):
        assert torch.equal(image, augmentation.scale(torch.rot90(x[i], z[i].item(), (1, 2))))

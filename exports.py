"""A trained classifier as a torch.export program, which needs none of this code (evaluate.py export)."""
import json

import torch

import augmentation
import cli
import folders
import run_folder


class Classifier(torch.nn.Module):
    """uint8 images to logits, including the scaling."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.float() * (2 / 255) - 1)[0]


def write_program(net, saved, run):
    """Write model.pt2, read it back and compare it with the model at several batch sizes."""
    size = saved["image_size"]
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (5, 3, size, size), dtype=torch.uint8, generator=gen)
    classifier = Classifier(net.to(memory_format=torch.contiguous_format)).eval()
    program = torch.export.export(classifier, (x,), dynamic_shapes=({0: torch.export.Dim("images", min=1)},))
    path, extra = run / "model.pt2", extra_files(saved)
    run_folder.write_whole(path, lambda tmp: torch.export.save(program, tmp, extra_files=extra))
    loaded = torch.export.load(path).module()   # the file, not the program in memory
    worst = 0.0
    with torch.inference_mode():
        for n in 1, 2, 5, 64:
            x = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=gen)
            worst = max(worst, (loaded(x) - net(augmentation.scale(x))[0]).abs().max().item())
    if not worst < 1e-4:
        path.unlink()
        raise cli.Refused(f"RUN {run}: the exported program differs from the model by {worst:g}; "
                          "it was removed")
    print(f"{path}: takes uint8 images (N, 3, {size}, {size}); "
          f"its logits differ from the model's by at most {worst:.1g}")
    for black, white in (saved.get("levels") or {}).values():   # the program takes 8 bits
        print(f"images with more than 8 bits: first map their grey values from {black:g} to {white:g} to 0 "
              "to 255, as training did (model.json in the file contains these numbers)")
    return dict(path=str(path), difference=worst)


def extra_files(saved):
    """What a user of the program must know: the classes, and how images are resized and cropped."""
    size = saved["image_size"]
    about = dict(classes=saved["classes"], image_size=size,
                 short_side=folders.short_side(size, saved["crop"]), levels=saved.get("levels") or {})
    return {"classes.json": json.dumps(saved["classes"]), "model.json": json.dumps(about)}

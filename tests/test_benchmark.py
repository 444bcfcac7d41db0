"""The benchmark measures every part and batches from disk, and calculates ImageNet's cost correctly."""
import pytest
from PIL import Image

import benchmark
import helpers


@pytest.mark.slow
def test_the_benchmark_measures_every_part(tmp_path):
    done = helpers.run_script("benchmark.py", "--arch=wrn-10-0.25", "--image_size=8", "--batch=2",
                              "--repeats=1", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("us/image") == 5 and "PIL loop" in done.stdout and " GiB" in done.stdout


def test_batches_from_disk_are_measured_as_well_as_those_from_memory(tmp_path):
    for c in "ab":
        (tmp_path / "train" / c).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (9, 9), (40 * i, 0, 0)).save(tmp_path / "train" / c / f"{i}.png")
    result = benchmark.measure_speed(arch="wrn-10-0.25", image_size=8, batch=2, repeats=1, device="cpu",
                                     folder=str(tmp_path))
    assert len([name for name in result if "disk" in name]) == 2 and result["batches from memory"] > 0


def test_the_calculation_for_imagenet(capsys):
    """By hand: 2048 copies of 3 x 8.18 GFLOP on one A100, at a fifth of 312 TFLOP/s.

    Eight GPUs are eight times as fast, apart from the time for sending gradients.
    """
    result = benchmark.calculate_imagenet()
    seconds = 2048 * 3 * 8.182658048e9 / (0.2 * 312e12)
    assert result["A100 80 GB", 1] == pytest.approx(512 / seconds, rel=1e-3)
    sending = 2 * 7 / 8 * 4 * 27_699_120 / 300e9
    assert result["A100 80 GB", 8] == pytest.approx(512 / (seconds / 8 + sending), rel=1e-3)
    text = capsys.readouterr().out
    assert "8,196,000 parameters" in text and "100,768 parameters" in text
    assert "CALCULATED" in text and "--accumulate" in text

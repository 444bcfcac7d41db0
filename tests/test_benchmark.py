import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmark.py"


def test_benchmark_measures_every_part(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--arch=wrn-10-0.25", "--image_size=8", "--batch=2", "--repeats=1",
                           "--device=cpu"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("us/image") == 5 and "PIL loop" in done.stdout and " GiB" in done.stdout

"""The benchmark of the reference layout, on tiny sizes and the CPU: the whole chain by the ordinary command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "eight_gpus.py"


@pytest.mark.long
def test_two_replicas_and_a_rank_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "eight.json"
    command = [sys.executable, str(SCRIPT), "--tiny", "--cpu", "--out", str(out), "--work", str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads(out.read_text())["cases"]["qwen27b, 2+1"]
    assert found["capture_packed"] and found["capture_padding"] == 0 and found["failures"] == 0
    assert found["capture_tokens"] > 5000 and all(rate > 0 for rate in found["capture_tokens_per_s"]["from_start"].values())
    assert found["train_steps"] == 6 and found["train_tokens_per_s"]["all"] > 0
    assert {"capture/capture-0", "train/train-0"} <= found["until_at_work_s"].keys()

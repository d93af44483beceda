"""The ``speculators`` package reads our export and computes what our drafter computes.

Its pins clash with ours (an older transformers), so it lives in an environment of its own, installed from the index.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import tensors_of, tiny_shape

from dflash_offline.attention import BlockLayout
from dflash_offline.drafter import Drafter
from dflash_offline.export import TargetInfo, convert, export_weights, read_drafter
from dflash_offline.target import load_embedding_and_head

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a Python that finds ``speculators`` and its dependencies before ours."""
    site = tmp_path_factory.mktemp("speculators-site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    done = subprocess.run([*command, "-r", str(HERE / "speculators-environment.txt")], capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"speculators cannot be installed from the index: {done.stderr.strip().splitlines()[-1]}")
    return {**os.environ, "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.long
@pytest.mark.parametrize("through", ["written", "converted"])
def test_speculators_computes_the_same_logits(tmp_path: Path, tiny_target: Path, environment: dict[str, str], through: str) -> None:
    shape = tiny_shape(rope_parameters={"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64})
    drafter = Drafter(shape)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).to(torch.bfloat16))
    target = TargetInfo(str(tiny_target), ["LlamaForCausalLM"], 1, 2, 2)
    first = "speculators" if through == "written" else "zlab"
    export_weights(tmp_path / first, form=first, shape=shape, tensors=tensors_of(drafter), target=target)
    if through == "converted":
        convert(tmp_path / "zlab", tmp_path / "speculators", form="speculators", target=target)
    assert read_drafter(tmp_path / "speculators").shape == shape, "the verifier's folder says how many layers the target has"

    ids, taps = torch.randint(3, 500, (120,)), torch.randn(120, 128).to(torch.bfloat16).float()
    anchors = torch.tensor([3, 17, 50, 51, 100])
    save_file({"input_ids": ids, "taps": taps, "anchors": anchors}, tmp_path / "in.safetensors")
    command = [
        sys.executable,
        str(HERE / "speculators_reader.py"),
        *(str(tmp_path / name) for name in ("speculators", "in.safetensors", "out.safetensors")),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "out.safetensors")

    embedding, head = load_embedding_and_head(tiny_target, dtype=torch.float32, device="cpu")
    slots = torch.full((len(anchors), shape.block_size), shape.mask_token_id)
    slots[:, 0] = ids[anchors]
    with torch.inference_mode():
        ours = drafter(taps, embedding[slots], BlockLayout.pack([120], [anchors.numpy()], block_size=shape.block_size)).flatten(0, 1)
    torch.testing.assert_close(theirs["hidden"], ours, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(theirs["logits"], ours @ head.T, atol=2e-4, rtol=1e-4)

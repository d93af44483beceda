"""Run the package ``speculators`` on an exported folder; started by ``test_export_speculators.py`` in its own environment.

Usage: speculators_reader.py FOLDER INPUTS OUTPUTS (both safetensors)
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def main(folder: str, inputs: str, outputs: str) -> None:
    from speculators import SpeculatorModel, SpeculatorModelConfig

    given = load_file(inputs)
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    length = given["input_ids"].shape[0]
    loss_mask = torch.zeros(1, length)
    loss_mask[0, given["anchors"]] = 1  # as many anchors as are asked for: all of them are chosen
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            given["taps"][None],
            given["input_ids"][None],
            loss_mask,
            torch.zeros(1, length, model.hidden_size),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=len(given["anchors"]),
        )
    save_file({"hidden": hidden[0].contiguous(), "logits": logits[0].contiguous()}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])

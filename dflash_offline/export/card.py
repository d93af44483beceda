"""The model card (``README.md``) of an exported folder."""

import json
import math
import re
from typing import Any

from dflash_offline.drafter import DrafterShape
from dflash_offline.export.formats import Format, TargetInfo, tensor_shapes

_OF_THE_FORM = ("## Serve", "## Drafter")  # what a card says of the format it is about


def serve_commands(form: Format, *, target: str, folder: str, block_size: int) -> dict[str, str]:
    """Command lines of the servers that load a format, by server name.

    The two count differently: vLLM's ``num_speculative_tokens`` is the drafted tokens, ``block_size - 1``; SGLang's
    ``speculative-num-draft-tokens`` is the block itself.
    """
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": block_size - 1})
    commands = {"vLLM": f"vllm serve {target} --speculative-config '{speculative}'"}
    if form == "zlab":
        commands["SGLang"] = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {block_size}"
        )
    return commands


def model_card(
    *,
    form: Format,
    shape: DrafterShape,
    target: TargetInfo,
    license_name: str,
    data: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    heldout: dict[str, Any] | None = None,
    datasets: dict[str, dict[str, Any]] | None = None,
) -> str:
    """Markdown with a YAML head.

    Args:
        data: what is known of the training conversations, name -> value.
        settings: of the training, name -> value.
        heldout: last held-out measures, name -> number.
        datasets: results of the draft-and-verify loop by data set, as ``evaluate`` writes them.
    """
    size, slots = sum(math.prod(dims) for dims in tensor_shapes(shape).values()), shape.block_size
    lines = [
        "---",
        f"license: {license_name}",
        f"base_model: {json.dumps(target.name)}",
        "pipeline_tag: text-generation",
        "tags: [dflash, speculative-decoding, draft-model]",
        "---",
        "",
        f"# DFlash drafter for {target.name}",
        "",
        "A block-diffusion drafter ([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)) for speculative decoding: "
        f"{shape.num_layers} layer{'s' * (shape.num_layers > 1)}, {size:,} parameters, blocks of {slots} "
        f"(one known token and {slots - 1} drafted ones). "
        "It uses the target's own embedding and head and does nothing without that exact target.",
        "",
        "## Serve",
        "",
    ]
    for server, command in serve_commands(form, target=target.name, folder="THIS_FOLDER", block_size=slots).items():
        lines += [f"{server}:", "", "```", command, "```", ""]
    lines += ["## Acceptance", ""]
    if datasets:
        lines += ["| data set | acceptance length | 95 % interval | prompts |", "|---|---|---|---|"]
        for name, result in datasets.items():
            if result["acceptance_length"] is not None:
                interval = "-" if result["interval"] is None else "{:.2f} to {:.2f}".format(*result["interval"])
                lines.append(f"| {name} | {result['acceptance_length']:.2f} | {interval} | {result['prompts']} |")
        lines += ["", "Emitted tokens per verify step of the real draft-and-verify loop, greedy, pooled over a data set.", ""]
    else:
        lines += ["Not measured when this folder was written.", ""]
    if heldout:
        lines += ["Held-out conversations: " + ", ".join(f"{name} {_show(value)}" for name, value in heldout.items()) + ".", ""]
    facts = {
        "target": target.name,
        "target layers read (0-based, output of the layer)": list(shape.target_layer_ids),
        "mask token": shape.mask_token_id,
        "format": f"{form}, bfloat16",
    }
    for title, table in (("Drafter", facts), ("Training data", data), ("Training settings", settings)):
        if table:
            lines += [f"## {title}", "", *(f"- {name}: {_show(value)}" for name, value in table.items()), ""]
    return "\n".join(lines)


def converted_card(card: str, *, form: Format, shape: DrafterShape) -> str | None:
    """The card of a folder in the other format -> the card in this one: other serve commands, the rest as it stands.

    Returns:
        None where it is no card that ``model_card`` wrote: what somebody else's says of its own form is not known.
    """
    parts, name = _parts(card), re.search(r'^base_model: (".*")$', card, re.MULTILINE)
    if name is None or not set(_OF_THE_FORM) <= {_heading(part) for part in parts}:
        return None
    try:
        target = TargetInfo(json.loads(name[1]), [])
    except ValueError:
        return None
    made = {_heading(part): part for part in _parts(model_card(form=form, shape=shape, target=target, license_name=""))}
    return "\n\n".join(made[_heading(part)] if _heading(part) in _OF_THE_FORM else part for part in parts) + "\n"


def _parts(card: str) -> list[str]:
    """What is above the first heading of level 2, and each with the text below it."""
    return [part.rstrip("\n") for part in re.split(r"^(?=## )", card, flags=re.MULTILINE)]


def _heading(part: str) -> str:
    return part.split("\n", 1)[0]


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, (list, dict)) else str(value)

"""The precisions that a run file names, in torch."""

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

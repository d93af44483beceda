"""Every path under the root of a run, named once.

::

    ROOT/
      regenerations/REGENERATE_KEY/     answers written by the target itself, part by part; manifest.json
      corpora/CORPUS_KEY/               token ids, loss masks, buckets of every conversation; manifest.json
      captures/CAPTURE_KEY/
        hidden_states.zarr/             the store: one group per committed part, shared by every corpus
        plans/CORPUS_KEY.json           which parts this corpus needs, and the batches of the new ones
        leases/                         who is writing which part
        channel_statistics.safetensors  what int codecs take their scales from; cache/ blocks of an object store
      drafters/TRAIN_KEY/
        checkpoints/  metrics.jsonl  tensorboard/
        drafter/                        final weights; manifest.json
      exports/EXPORT_KEY/zlab/ ...      what servers load; manifest.json
      evaluations/EVALUATE_KEY/         results.json; manifest.json
      reports/REPORT_KEY/               report.md, report.html; manifest.json
      logs/STAGE/                       one log and one progress file per model process; other hosts' in STAGE/HOST/
      logs/hosts/                       what each host tells of itself; beside it first-host, and serving.json of the live page
      inputs/                           standard input as it was piped in; where Hugging Face data sets lie
      cache/                            digests of input files, shapes of drafters; compiled kernels live elsewhere
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Paths of a run. Holds no state and creates nothing."""

    root: Path

    def regeneration(self, regenerate_key: str) -> Path:
        return self.root / "regenerations" / regenerate_key

    def corpus(self, corpus_key: str) -> Path:
        return self.root / "corpora" / corpus_key

    def capture(self, capture_key: str) -> Path:
        return self.root / "captures" / capture_key

    def store(self, capture_key: str) -> Path:
        return self.capture(capture_key) / "hidden_states.zarr"

    def plan(self, capture_key: str, corpus_key: str) -> Path:
        return self.capture(capture_key) / "plans" / f"{corpus_key}.json"

    def leases(self, capture_key: str) -> Path:
        return self.capture(capture_key) / "leases"

    def drafter(self, train_key: str) -> Path:
        return self.root / "drafters" / train_key

    def metrics(self, train_key: str) -> Path:
        return self.drafter(train_key) / "metrics.jsonl"

    def export(self, export_key: str) -> Path:
        return self.root / "exports" / export_key

    def evaluation(self, evaluate_key: str) -> Path:
        return self.root / "evaluations" / evaluate_key

    def report(self, report_key: str) -> Path:
        return self.root / "reports" / report_key

    @property
    def all_logs(self) -> Path:
        return self.root / "logs"

    def logs(self, stage: str) -> Path:
        return self.all_logs / stage

    @staticmethod
    def partial_training(drafter: str | None) -> str:
        """What names of processes, logs and lock of ``train --partial`` begin with; of full training: ``train``, ``train-DRAFTER``."""
        return f"train-partial-{drafter}" if drafter else "train-partial"

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

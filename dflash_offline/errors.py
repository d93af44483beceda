"""Every error a user can cause, and mend.

The command line and the Luigi tasks print these as one line, without a traceback. The text says where, what, and
what is allowed or what to do next: ``run.toml: [train]: unknown key 'lrr'; did you mean 'lr'?``

::

    DFlashError
     x ConfigError            the run file
     x CorpusError            conversation files, chat template, loss mask
     x TargetError            the target model's folder, shape or weights
     x RegenerateError        answers written anew: prompts, servers, the target as writer
     x StoreError             the hidden-state store
       + StoreIdentityError   it holds another target, tokenizer, template, layer set, dtype or codec
       + StoreDamagedError    bytes are missing, extra or changed
       + StoreFullError       the disk is full
       + StoreBusyError       another process writes the same part
     x TrainError             drafter training
       + CheckpointError      a checkpoint that cannot be read or does not fit
     x ExportError            the exported folder
     x EvaluateError          the draft-and-verify loop
     x ProcessError           a model process failed

A broken invariant of our own is an ``assert`` and does show a traceback.
"""


class DFlashError(Exception):
    """Base of everything a user can mend. ``str(error)`` is one line, fit to print."""


class ConfigError(DFlashError):
    """The run file is missing, malformed, or asks for something that is not allowed."""


class CorpusError(DFlashError):
    """A conversation file, the chat template or the loss mask made from it cannot be used."""


class TargetError(DFlashError):
    """The target model cannot be found, loaded or tapped."""


class RegenerateError(DFlashError):
    """Answers cannot be written anew: no prompt is usable, or whoever should answer does not."""


class StoreError(DFlashError):
    """The hidden-state store cannot be read or written."""


class StoreIdentityError(StoreError):
    """The store belongs to another target, tokenizer, template, layer set, dtype or codec."""


class StoreDamagedError(StoreError):
    """Files of the store are missing, extra, or differ from their manifests."""


class StoreFullError(StoreError):
    """The disk ran out of space; what was committed before is intact."""


class StoreBusyError(StoreError):
    """Another process is writing the same part."""


class TrainError(DFlashError):
    """Drafter training cannot start or had to stop."""


class CheckpointError(TrainError):
    """A checkpoint cannot be read, or belongs to another run."""


class ExportError(DFlashError):
    """The drafter cannot be written in, or read from, an export format."""


class EvaluateError(DFlashError):
    """The draft-and-verify loop cannot run, or its output was not the target's own."""


class ProcessError(DFlashError):
    """A model process failed; the text names the cause and its log."""

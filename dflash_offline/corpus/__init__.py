"""Conversations -> token ids and loss masks, in the shape the target sees them.

In reading order:

- ``reading``    files of any format -> blocks of raw rows; ``unpacking`` gzip, bz2, xz, zstd; ``tables`` Parquet, Arrow;
  ``values`` JSON that is not one row a line
- ``schema``     one row of any known shape -> ``Conversation``
- ``template``   the target's chat template and tokenizer; control strings in messages stay text
- ``masking``    which tokens the target itself would generate
- ``rows``       a block of rows -> arrays and counts: the work of one worker process
- ``workers``    that work on every core
- ``preparation`` all of it: files -> corpus folder, with its counts and bucket table
- ``storage``    the corpus folder: ``CorpusWriter``, ``Corpus``, ``CorpusRow``
- ``preview``    look at rows: text with the loss mask, lengths of a sample

``python -m dflash_offline.corpus`` is the stage: it prepares the corpus and plans its capture.
"""

from dflash_offline.corpus.preparation import corpus_files, none_heldout, prepare
from dflash_offline.corpus.preview import Peek, Shown, peek, render, show
from dflash_offline.corpus.schema import Conversation, RowRejected, parse_row
from dflash_offline.corpus.storage import Corpus, CorpusRow, row_hash

__all__ = [
    "Conversation",
    "Corpus",
    "CorpusRow",
    "Peek",
    "RowRejected",
    "Shown",
    "corpus_files",
    "none_heldout",
    "parse_row",
    "peek",
    "prepare",
    "render",
    "row_hash",
    "show",
]

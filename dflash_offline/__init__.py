"""Train DFlash drafters offline: capture the target's hidden states once, then train from the store.

A library without Luigi; ``pipelines`` orders it. Nothing is imported here. The package in reading order:

What a run is
    ``config``      the run file, every field documented          ``demo``      the embedded target, SmolLM2-135M
    ``keys``        content key of each stage: what is in it      ``identity``  digests that the keys are made of
    ``layout``      every path under the root, named once         ``manifest``  whole-file writes; the mark of completion
    ``errors``      every error a user can mend, as a tree        ``fields``    the run file's fields and faults in words
    ``figures``     counts, bytes and seconds in words
    ``precision``   the precisions it names, in torch             ``graphs``    steps recorded as CUDA graphs
    ``inputs``      files, globs, standard input, data sets       ``reference`` run file and reference page made from the model

Phase 1: conversations -> hidden states
    ``regenerate``  the target writes the answers itself                  stage ``python -m dflash_offline.regenerate``
    ``corpus``      conversations, chat template, loss mask, buckets      stage ``python -m dflash_offline.corpus``
    ``plan``        which rows are still to be captured, in parts and batches
    ``target``      load a target model and tap its layers    ``gguf``  what a GGUF file says of its model
    ``codecs``      bfloat16 kept bit-exact, or coarser: the numeric step
    ``store``       the hidden-state store in Zarr: schema, resumable writer, verified reader
    ``capture``     one replica of the target                             stage ``python -m dflash_offline.capture``
    ``store_url``   of a store in an object store: never with a secret    ``leases``    who works on which part

Phase 2: hidden states -> drafter (the target's layers are not needed)
    ``drafter``     the module                ``attention``   block mask and kernels
    ``objective``   anchors, loss, metrics    ``dataset``     batches out of the store, shuffled by bucket
    ``optimizer``   AdamW on flat weights     ``buckets``     length buckets, batches under budgets, the order of each epoch
    ``checkpoint``  exact resume              ``train``       one rank    stage ``python -m dflash_offline.train``

What comes out
    ``export``      the form that servers load, checked                   stage ``python -m dflash_offline.export``
    ``evaluate``    the real draft-and-verify loop                        stage ``python -m dflash_offline.evaluate``
    ``prompts``     the prompt files it reads
    ``replay``      the same loop on stored answers: tau_replay
    ``report``      one page per run, Markdown and HTML                   stage ``python -m dflash_offline.report``

How it runs
    ``stage``       the common start of a stage's process    ``processes``  start, follow and stop them; none is left over
    ``progress``    progress files and the status line       ``gpus``       which GPU is whose
    ``watch``       bars on a terminal, GPUs, other hosts    ``environment``  what made a result, for its manifest
    ``cli``         the command ``dflash-offline``, and what is behind it:
    ``doctor``      is this machine fit                      ``estimate``   what a run will cost
    ``smoke``       a run file on a few conversations        ``status``     where a run stands
    ``tidy``        forget stages, delete what is not needed ``sharing``    what a run shares with others
    ``nvidia``      asks ``nvidia-smi``
"""

"""Training on the prefix tree of a batch, which computes each prompt once in the forward and the backward pass.

    attach(model)                                  the model's attention also accepts trees; nothing else changes
    packed = batch.tree()                          each common prefix once, followed by its continuations
    logprobs = batch.logprobs_of(model, packed)    [N, T], like batch.logprobs: the loss is defined on the batch's rows

Log-probs and gradients equal those of the padded batch, but each prompt is computed once for all of its samples. This works
with gradient checkpointing, autocast, DDP, FSDP2 and PEFT, in your own loop, with accelerate, and in the HF Trainer's
`compute_loss`. For TRL's GRPOTrainer, use `trainer_hooks.trl.attach(trainer, manager, tree=True)`.
"""

from __future__ import annotations

from torch import nn

from rollout.engine.training.tree_forward import TreeAttachment


def attach(model: nn.Module) -> TreeAttachment:
    """Let `model` attend over prefix trees, passed as `attention_mask` (see `PackedTree.inputs`).

    Requires: a transformers decoder whose layers have full or sliding causal attention, through transformers' attention
    interface. Pass the module itself, before DDP wraps it. Adapters and FSDP2 may be applied before (on all ranks) or after.

    Changes: the attention implementation in the model's configurations. Forward passes without a tree, and the rollout, run
    as before. The model stays attached until `detach()` (or the end of a `with` block). Do not detach between a
    forward pass and its backward pass, which runs the forward pass again under gradient checkpointing.

    Dropout: rows that share a token also share its dropout. With attention dropout, the forward pass raises an error.

    Raises:
        UnsupportedModelError: a layer needs more than causal attention (with or without a sliding window); or `model` is a
            wrapper.
        ValueError: tree attention is already attached.
    """
    return TreeAttachment(model)

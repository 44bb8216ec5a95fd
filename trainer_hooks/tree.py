"""Each prompt trained once: the trainer's forward and backward over the prefix tree of a batch.

    attach(model)                                  the model's attention also takes trees; everything else as before
    packed = batch.tree()                          common prefixes once, every continuation after them
    logprobs = batch.logprobs_of(model, packed)    [N, T], like batch.logprobs: the loss is defined on the batch's rows

Log-probs and gradients equal the padded batch's; the prompt is computed once for all of its samples. Works with
gradient checkpointing, autocast, DDP, FSDP2 and PEFT, in a loop of one's own, with accelerate, and in the `compute_loss` of
HF Trainer; TRL's GRPOTrainer: `trainer_hooks.trl.attach(trainer, manager, tree=True)`.
"""

from __future__ import annotations

from torch import nn

from rollout.engine.training.tree_forward import TreeAttachment


def attach(model: nn.Module) -> TreeAttachment:
    """Let `model` attend over prefix trees, passed as `attention_mask` (see `PackedTree.inputs`).

    Requires: a decoder of transformers whose layers have full or sliding causal attention, through its attention interface;
    the module itself: before DDP wraps it. Adapters and FSDP2 may come first (then on all ranks) or follow.

    Changes: the attention implementation of the model's configurations. A forward without a tree runs as before, as does the
        rollout. Stays attached until `detach()` (or the end of a `with` block); do not detach between a forward and its
    backward, which runs the forward again under gradient checkpointing.

    Dropout: a shared token is dropped once for all of its rows. With attention dropout the forward raises.

    Raises:
        UnsupportedModelError: a layer needs more than causal attention (with or without a sliding window); or `model` is a
            wrapper.
        ValueError: tree attention is attached already.
    """
    return TreeAttachment(model)

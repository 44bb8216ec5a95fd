"""Forward of a Llama-like decoder over the module's own parameters, by the operations of exact mode.

The trainer's computes the real tokens only, packed one sequence after the other; the layers are those of `fused_forward`.
On a GPU the engine's steps run the same layers, with attention over its blocks (`paged_forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from rollout.engine.fused.fused_parts import rotary_tables
from rollout.engine.training.operations import attention, linear, linear_to, rms_norm, rotate, silu_times
from rollout.engine.training.packing import Packing

Tables = tuple[Tensor, Tensor]
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Attention of a module: query [P, H, D], key and value [P, Hkv, D] → [P, H, D]."""


def logits_of(model: Any, windows: Sequence[int | None], ids: Tensor, packing: Packing, keep: int | Tensor) -> Tensor:
    """Logits of `model.lm_head` [..., V] at the positions that `logits_to_keep` names, 0 at padding.

    Args:
        model: a …ForCausalLM that the fused forward serves.
        windows: number of positions that each layer attends to; None: all.
        ids: [B, T] int64.
        keep: as transformers' `logits_to_keep`; 0: all positions, [B, T, V].
    """
    decoder = model.model
    own = dict(zip((layer.self_attn for layer in decoder.layers), windows, strict=True))

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, packing, module.scaling, own[module])

    tables = rotary_tables(decoder.rotary_emb, decoder.embed_tokens.weight.dtype, packing.longest)
    hidden = hidden_of(
        decoder,
        ids.flatten() if packing.tokens is None else ids.flatten()[packing.tokens],
        packing.positions,
        (tables[0].to(ids.device), tables[1].to(ids.device)),
        attend,
    )
    rows = _kept(packing.rows, keep)
    flat = rows.flatten()
    places = (flat >= 0).nonzero().flatten()
    if isinstance(keep, Tensor) or keep:
        hidden = hidden[flat[places]]
    hidden, head = norm(hidden, decoder.norm), model.lm_head.weight
    logits = linear(hidden, head) if len(places) == len(flat) else linear_to(hidden, head, places, len(flat))
    return logits.view(*rows.shape, head.shape[0])


def hidden_of(decoder: Any, ids: Tensor, positions: Tensor, tables: Tables, attend: Attend) -> Tensor:
    """Hidden states [P, W] after the last layer, before the last norm.

    Args:
        decoder: the …Model of a …ForCausalLM that the fused forward serves.
        ids, positions: [P] int64.
        tables: cosines and sines [positions, D], on the device.
    """
    hidden: Tensor = decoder.embed_tokens(ids)
    for layer in decoder.layers:
        run = partial(_layer, layer, positions=positions, tables=tables, attend=attend)
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            hidden = layer._gradient_checkpointing_func(run, hidden)
        else:
            hidden = run(hidden)
    return hidden


def norm(x: Tensor, module: Any) -> Tensor:
    """x [..., W] through one of the model's norms."""
    return rms_norm(x, module.weight, module.variance_epsilon)


def output_of(model: Any, logits: Tensor, labels: Tensor | None, **options: Any) -> CausalLMOutputWithPast:
    """The output that `model.forward` would return for these logits."""
    loss = None
    if labels is not None:
        loss = model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **options)
    return CausalLMOutputWithPast(loss=loss, logits=logits)


def _layer(layer: Any, hidden: Tensor, *, positions: Tensor, tables: Tables, attend: Attend) -> Tensor:
    hidden = hidden + _attention(layer.self_attn, norm(hidden, layer.input_layernorm), positions, tables, attend)
    normed, mlp = norm(hidden, layer.post_attention_layernorm), layer.mlp
    wide = silu_times(_linear(normed, mlp.gate_proj), _linear(normed, mlp.up_proj))
    return hidden + _linear(wide, mlp.down_proj)


def _attention(module: Any, hidden: Tensor, positions: Tensor, tables: Tables, attend: Attend) -> Tensor:
    query, key, value = (
        _linear(hidden, projection).view(len(hidden), projection.out_features // module.head_dim, module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = norm(query, module.q_norm), norm(key, module.k_norm)
    query, key = (rotate(each, *tables, positions) for each in (query, key))
    return _linear(attend(module, query, key, value).flatten(1), module.o_proj)


def _linear(x: Tensor, module: Any) -> Tensor:
    return linear(x, module.weight, module.bias)


def _kept(rows: Tensor, keep: int | Tensor) -> Tensor:
    """The elements of `rows` [B, T] that `logits_to_keep` selects, as transformers' `slice_logits_to_keep` does."""
    if not isinstance(keep, Tensor):
        return rows[:, slice(-keep, None) if keep else slice(None)]
    if keep.ndim < 2:
        return rows[:, keep]
    return rows[keep] if keep.dtype == torch.bool else rows.take_along_dim(keep, 1)

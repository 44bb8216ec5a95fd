"""The forward pass of a Llama-like decoder in exact mode, with the model's own parameters.

Padding is not computed: the sequences are packed one after the other. The arithmetic is the same as in `fused_forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from rollout.engine.fused.fused_parts import rotary_tables
from rollout.engine.training.operations import attention, linear, rms_norm, rotate, silu_times
from rollout.engine.training.packing import Packing

Tables = tuple[Tensor, Tensor]
"""The cosines and sines of a rotary embedding, each [positions, head size]."""


def logits_of(model: Any, windows: Sequence[int | None], ids: Tensor, packing: Packing, keep: int | Tensor) -> Tensor:
    """Return the logits of the columns that `keep` selects, [B, kept columns, vocabulary size]. They are 0 at padding.

    Args:
        model: a causal language model that the fused forward pass supports.
        windows: number of last positions that a token attends to in each layer; None means all.
        ids: token ids, int64 [B, T].
        packing: the places of the real tokens in `ids`.
        keep: number of last columns to keep, 0 to keep all columns, or indices of the columns to keep, int64 [K].
    """
    decoder = model.model
    tables = rotary_tables(decoder.rotary_emb, decoder.embed_tokens.weight.dtype, packing.longest)
    flat = ids.flatten()
    hidden: Tensor = decoder.embed_tokens(flat if packing.tokens is None else flat[packing.tokens])
    for layer, window in zip(decoder.layers, windows, strict=True):
        run = partial(_layer, layer, window=window, packing=packing, tables=tables)
        if getattr(layer, "gradient_checkpointing", False) and layer.training:
            hidden = layer._gradient_checkpointing_func(run, hidden)
        else:
            hidden = run(hidden)
    kept = packing.rows[:, keep if isinstance(keep, Tensor) else slice(-keep, None) if keep else slice(None)]
    rows = kept.flatten()
    places = (rows >= 0).nonzero().flatten()
    if isinstance(keep, Tensor) or keep:
        hidden = hidden[rows[places]]
    head = model.lm_head.weight
    padded = None if len(places) == len(rows) else (places, len(rows))
    return linear(_norm(hidden, decoder.norm), head, padded=padded).view(*kept.shape, head.shape[0])


def _layer(layer: Any, hidden: Tensor, *, window: int | None, packing: Packing, tables: Tables) -> Tensor:
    hidden = hidden + _attention(layer.self_attn, _norm(hidden, layer.input_layernorm), window, packing, tables)
    normed, mlp = _norm(hidden, layer.post_attention_layernorm), layer.mlp
    wide = silu_times(_linear(normed, mlp.gate_proj), _linear(normed, mlp.up_proj))
    return hidden + _linear(wide, mlp.down_proj)


def _attention(module: Any, hidden: Tensor, window: int | None, packing: Packing, tables: Tables) -> Tensor:
    query, key, value = (
        _linear(hidden, projection).view(len(hidden), projection.out_features // module.head_dim, module.head_dim)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = _norm(query, module.q_norm), _norm(key, module.k_norm)
    query, key = (rotate(each, *tables, packing.positions) for each in (query, key))
    return _linear(attention(query, key, value, packing, module.scaling, window).flatten(1), module.o_proj)


def _norm(x: Tensor, module: Any) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _linear(x: Tensor, module: Any) -> Tensor:
    return linear(x, module.weight, module.bias)

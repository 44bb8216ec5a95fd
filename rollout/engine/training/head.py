"""Reads logits, log-sum-exps and entropies during a model's own forward pass, without storing all logits.

During the forward pass our function replaces the `forward` of the *head* (the output embeddings), so it runs when FSDP or
ZeRO has gathered the head's parameters. It computes a tile of logits, reads the requested numbers, and drops the tile. The
backward pass computes the tiles again and overwrites each tile with its gradient. For a linear head, a tile covers all rows
and some vocabulary columns, so each part of the weight's gradient is a single matrix product. Any other head (LoRA,
quantised) runs on a few rows at a time.

The model gets one row of the head's output and scales or caps it as usual. We compare these logits with our own to check
that the model does nothing else to the head's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from rollout.engine.models.attention import is_rollout_forward
from rollout.errors import UnsupportedModelError

TILE_ELEMENTS = {"cpu": 1 << 21}
"""The number of logits per tile, by device type. On a CPU, such a tile nearly fits into the cache."""
OTHER_TILE_ELEMENTS = 1 << 26
"""The number of logits per tile on all other devices."""


class LogitReader:
    """Reads the logits of one forward pass of a model. `read` runs the pass.

    Args:
        model: a causal language model in transformers, or a wrapper around such a model.
        run: function that runs the forward pass, in which the head (the function's argument) must be called exactly once. It
            returns the model's logits, or None if it called only the head.
        entropy: whether to read entropies as well.
        top_k: number of most likely tokens to read per token, or the ids of the tokens to read, int64 [M, k].

    Attributes:
        entropies: entropy of softmax(logits / temperature) for each of the M tokens, in nats, [M]; differentiable.
        top_ids: ids of the most likely tokens, most likely first, or the given ids, int64 [M, k].
        top_logprobs: log-probs of `top_ids`, [M, k]; differentiable.
    """

    entropies: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[nn.Module], Tensor | None],
        *,
        entropy: bool = False,
        top_k: int | Tensor = 0,
    ) -> None:
        self._model = _language_model(model)
        self._run = run
        self._entropy = entropy
        self._top_k = top_k

    def read(
        self, rows: Tensor, temperature: float | Tensor, tokens: Tensor, ids: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute E logits of given token ids, and W log-sum-exps, over the vocabulary, of logits divided by temperature.

        Args:
            rows: row of the head's input that predicts each of M tokens, int64 [M].
            temperature: one number for all tokens, or a number per token, [M].
            tokens: which of the M tokens each logit to read belongs to, int64 [E].
            ids: vocabulary id of each logit to read, int64 [E].
            whole: which of the M tokens each log-sum-exp to compute belongs to, int64 [W].

        Returns:
            The logits [E] and log-sum-exps [W], differentiable, in float32 (in float64 if the hidden states are float64).

        Raises:
            UnsupportedModelError: the head does not run exactly once, or the model does more with the head's output than
                scale and cap it.
        """
        warm = torch.as_tensor(temperature, dtype=torch.float64, device=rows.device).expand(len(rows))
        kinds, kind = torch.unique(warm, return_inverse=True)
        # Compute one softmax for all tokens with the same predictor (hidden state) and temperature.
        keys, state_of = torch.unique(rows * max(1, len(kinds)) + kind, return_inverse=True)
        count, top_k = len(ids), self._top_k
        if isinstance(top_k, Tensor):
            tokens = torch.cat([tokens, torch.arange(len(rows), device=rows.device).repeat_interleave(top_k.shape[1])])
            ids, self.top_ids, top_k = torch.cat([ids, top_k.flatten()]), top_k, 0
        asked = _Asked(
            states=keys // max(1, len(kinds)),
            temperature=None if bool((kinds == 1).all()) else kinds[keys % len(kinds)],
            owners=state_of[tokens],
            ids=ids,
            sums=len(whole) > 0 or self._entropy or top_k > 0 or len(ids) > count,
            entropy=self._entropy,
            top_k=top_k,
        )
        logits, sums, entropies, top_ids, top = self._values(asked)
        self.entropies = entropies[state_of]
        if isinstance(self._top_k, Tensor):
            top = logits[count:].view(self._top_k.shape)
        else:
            self.top_ids, top = top_ids[state_of], top[state_of]
        self.top_logprobs = top / warm[:, None].to(top) - sums[state_of, None]
        return logits[:count], sums[state_of[whole]]

    def _values(self, asked: _Asked) -> list[Tensor]:
        post = _Post.of(self._model.config.get_text_config())
        row, values, logits = self._forward(asked, post)
        if logits is not None and not post.makes(logits, row):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does more to the output of its head than its configuration says of scale and "
                "cap: take model(...).logits and rollout.algorithms.replay_logprobs"
            )
        # Add an empty sum of the model's output, so that the backward pass starts at the model's output, where FSDP
        # gathers the parameters.
        start = (row if logits is None else logits).flatten()[:0].sum()
        return [each + start.to(each) if each.is_floating_point() else each for each in values]

    def _forward(self, asked: _Asked, post: _Post) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Run the forward pass, and read the numbers in `asked` from its logits.

        Returns:
            The single row that the model received as the head's output, the numbers read, and the logits that the model
            returned for this row. The logits are None if only the head ran.
        """
        head = self._model.get_output_embeddings()
        before, original, seen = vars(head).get("forward"), head.forward, []

        def forward(hidden: Tensor) -> Tensor:
            if is_rollout_forward():
                ours: Tensor = original(hidden)
                return ours
            flat = hidden.flatten(0, -2)
            lane = _Lane.of(head, original, flat)
            row, *values = _Read.apply(lane, asked, post, flat[asked.states], *lane.parameters)  # type: ignore[no-untyped-call]
            seen.append((row, values))
            out: Tensor = row
            return out

        head.forward = forward
        try:
            logits = self._run(head)
        finally:
            if before is None:
                del head.forward
            else:
                head.forward = before
        if len(seen) != 1:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} ran its output embeddings {len(seen)} times in one forward, not once: take "
                "model(...).logits and rollout.algorithms.replay_logprobs"
            )
        return *seen[0], logits


def _language_model(model: nn.Module) -> Any:
    """Return the transformers model inside wrappers such as DDP, FSDP and PEFT."""
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings") and module.get_output_embeddings() is not None:  # type: ignore[operator]
            return module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no output embeddings (get_output_embeddings): take model(...).logits and "
        "rollout.algorithms.replay_logprobs"
    )


class _Post(NamedTuple):
    """The function that maps the head's output to the logits: cap * tanh(scale * output / cap)."""

    scale: float
    cap: float | None

    @classmethod
    def of(cls, config: Any) -> _Post:
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= float(getattr(config, name, None) or 1.0)
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)
        # HyperCLOVA X multiplies by `logits_scaling`; Granite and all other models divide by it.
        scale *= scaling if "hyperclovax" in getattr(config, "model_type", "") else 1 / scaling
        return cls(scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None))

    def __call__(self, output: Tensor) -> Tensor:
        """Return the logits for the head's output, which is overwritten."""
        if self.scale != 1.0:
            output.mul_(self.scale)
        return output if self.cap is None else output.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the logits with respect to the head's output."""
        return self.scale if self.cap is None else (logits / self.cap).square_().neg_().add_(1).mul_(self.scale)

    def makes(self, logits: Tensor, row: Tensor) -> bool:
        """Return whether this function maps a row of the head's output to the model's logits, up to rounding."""
        ours, theirs = self(row.detach().float().clone()), logits.detach().float()
        most = float(theirs.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if theirs.numel() else 0.0
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=0.02 * most, equal_nan=True)


class _Asked(NamedTuple):
    """The numbers to read from the logits of the U distinct pairs of a hidden state and a temperature, called states."""

    states: Tensor
    """The row of the head's input that contains each state's hidden state, int64 [U]."""
    temperature: Tensor | None
    """The divisor of each state's logits, float64 [U]; None means 1."""
    owners: Tensor
    """The state (an index below U) from which each of the E requested logits is read, int64 [E]."""
    ids: Tensor
    """The vocabulary id of each of the E requested logits, int64 [E]."""
    sums: bool
    """Whether to compute the log-sum-exp of each state's logits, which are first divided by the temperature."""
    entropy: bool
    """Whether to compute the entropy of each state."""
    top_k: int
    """The number of most likely tokens to read per state."""

    def inside(self, tile: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of the requested logits that are inside a tile, and their rows and columns in the tile."""
        row, column = self.owners - rows.start, self.ids - columns.start
        at = ((row >= 0) & (row < tile.shape[0]) & (column >= 0) & (column < tile.shape[1])).nonzero()[:, 0]
        return at, row[at], column[at]

    def tempered(self, values: Tensor, rows: slice) -> Tensor:
        """Divide the values of some states by their temperatures, in place, and return them.

        Args:
            values: one row or number per state of `rows`.
            rows: the range of states.
        """
        if self.temperature is None:
            return values
        warm = self.temperature[rows].to(values.dtype)
        return values.div_(warm if values.ndim == 1 else warm[:, None])


class _Lane(NamedTuple):
    """A model's head (its output embeddings) in one forward pass, with all that is needed to compute its output in tiles."""

    original: Callable[[Tensor], Tensor]
    """The head's own `forward`."""
    parameters: tuple[Tensor, ...]
    """The parameters whose gradients the tiles compute: weight and bias of a linear head, else all trainable ones."""
    linear: bool
    """Whether the head is a plain `nn.Linear`."""
    autocast: torch.dtype | None
    """The dtype of autocast in the forward pass; None if autocast is off."""
    row: Tensor
    """The head's output for the first hidden state, [1, 1, vocabulary size]."""
    random: tuple[Any, ...]
    """The states of the random generators, so that an adapter's dropout draws the same numbers in the backward pass."""

    @classmethod
    def of(cls, head: nn.Module, original: Callable[[Tensor], Tensor], hidden: Tensor) -> _Lane:
        device = hidden.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        linear = getattr(original, "__func__", None) is nn.Linear.forward and type(head.weight) in (
            Tensor,
            nn.Parameter,
        )
        parameters = (head.weight, head.bias) if linear else (each for each in head.parameters() if each.requires_grad)
        with torch.no_grad():
            row = original(hidden[None, :1])
        kept = tuple(each for each in parameters if isinstance(each, Tensor))
        return cls(original, kept, linear, cast, row, (torch.get_rng_state(), *get_device_states(hidden)))

    def tiles(self, states: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool] = ()) -> _Columns | _Rows:
        """Return the tiles of the head's output for the hidden states `states`. `_Columns` documents the arguments."""
        return (_Columns if self.linear else _Rows)(self, states, parameters, needed)


class _Columns:
    """The tiles (blocks) of a linear head's output. Each tile covers all rows and some columns.

    Iterating yields the rows, the columns and the head's output of each tile.

    Args:
        lane: the head.
        states: the hidden states.
        parameters: weight and bias of the head.
        needed: whether the gradients of the states and of each parameter are needed; empty if no gradients are needed.
    """

    def __init__(self, lane: _Lane, states: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._weight, self._bias = parameters[0], parameters[1] if len(parameters) > 1 else None
        self._states = states.to(lane.autocast or self._weight.dtype)
        # Accumulate only the states' gradient in a wide dtype: every tile adds to all states, but each vocabulary entry's
        # weights and bias are in only one tile.
        self.gradients = [
            torch.zeros_like(each, dtype=each.dtype if index else _wide(each)) if wanted else None
            for index, (each, wanted) in enumerate(zip((states, *parameters), needed, strict=False))
        ]

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        count, vocabulary = len(self._states), len(self._weight)
        width = max(1, _elements(self._states) // max(1, count))
        for start in range(0, vocabulary, width):
            columns = slice(start, min(start + width, vocabulary))
            output = self._states @ self._part(columns).T
            if self._bias is not None:
                output += self._bias[columns].to(output.dtype)
            yield slice(0, count), columns, output.to(_wide(output))

    def pull(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add the contribution of the tile yielded last to `gradients`. `gradient` is the gradient of this tile's output."""
        own = gradient.to(self._states.dtype)
        of_states, of_weight, *of_bias = self.gradients
        if of_states is not None:
            of_states += own @ self._part(columns)
        if of_weight is not None:
            of_weight[columns] = own.T @ self._states
        for each in of_bias:
            if each is not None:
                each[columns] = own.sum(0)

    def _part(self, columns: slice) -> Tensor:
        return self._weight[columns].to(self._states.dtype)


class _Rows:
    """The tiles of a head that is not a plain linear layer: each has some rows, all columns. Arguments: see `_Columns`."""

    def __init__(self, lane: _Lane, states: Tensor, parameters: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._lane, self._states, self._parameters, self._backward = lane, states, parameters, bool(needed)
        self._part = self._output = states
        self.gradients = [
            torch.zeros_like(each) if wanted else None
            for each, wanted in zip((states, *parameters), needed, strict=False)
        ]

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        vocabulary, device, cast = self._lane.row.shape[-1], self._states.device.type, self._lane.autocast
        size = max(1, _elements(self._states) // max(1, vocabulary))
        random, devices, states = self._lane.random
        with torch.random.fork_rng(devices, enabled=self._backward):
            if self._backward:
                torch.set_rng_state(random)
                set_device_states(devices, states)
            for start in range(0, len(self._states), size):
                self._part = self._states[start : start + size].detach().requires_grad_(self._backward)
                with torch.set_grad_enabled(self._backward), torch.autocast(device, cast, enabled=cast is not None):
                    self._output = self._lane.original(self._part[None])[0]
                rows = slice(start, start + len(self._part))
                yield rows, slice(0, vocabulary), self._output.detach().to(_wide(self._output), copy=True)

    def pull(self, rows: slice, columns: slice, gradient: Tensor) -> None:
        """Add the last tile's contribution to the gradients; see `_Columns.pull`."""
        every = (self._part, *self._parameters)
        wanted = [each for each, kept in zip(every, self.gradients, strict=True) if kept is not None]
        found = iter(torch.autograd.grad(self._output, wanted, gradient.to(self._output.dtype)))
        for index, kept in enumerate(self.gradients):
            if kept is not None:
                (kept if index else kept[rows]).add_(next(found))


def _elements(states: Tensor) -> int:
    return TILE_ELEMENTS.get(states.device.type, OTHER_TILE_ELEMENTS)


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


class _Read(torch.autograd.Function):
    """The autograd function that reads the numbers of `_Asked`. It saves a log-sum-exp and an entropy per state."""

    @staticmethod
    def forward(ctx: Any, lane: _Lane, asked: _Asked, post: _Post, states: Tensor, *parameters: Tensor) -> Any:
        kind = _wide(states)
        single = states.new_zeros(len(asked.ids), dtype=kind)
        # Accumulate over many tiles in float64, to limit rounding errors.
        sums = states.new_full((len(states),), -torch.inf, dtype=torch.float64)
        entropies = torch.zeros_like(sums)
        top = states.new_zeros(len(states), min(asked.top_k, lane.row.shape[-1]), dtype=kind)
        top_ids = torch.zeros_like(top, dtype=torch.int64)
        with _no_autocast(states):
            for rows, columns, output in lane.tiles(states, parameters):
                logits = post(output)
                at, row, column = asked.inside(logits, rows, columns)
                single[at] = logits[row, column].to(kind)
                if asked.top_k:
                    _keep_best(top, top_ids, rows, columns, logits)
                if asked.sums:
                    _add_tile(sums, entropies if asked.entropy else None, rows, asked.tempered(logits, rows))
        sums, entropies = sums.to(kind), entropies.to(kind)
        ctx.save_for_backward(states, sums, entropies, top_ids, *parameters)
        ctx.lane, ctx.asked, ctx.post = lane, asked, post
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(top_ids)
        return lane.row.clone(), single, sums, entropies, top_ids, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        _, of_single, of_sums, of_entropies, _, of_top = given
        states, sums, entropies, top_ids, *parameters = ctx.saved_tensors
        asked, post = ctx.asked, ctx.post
        if not len(states):
            return None, None, None, torch.zeros_like(states), *(None for _ in parameters)
        if of_single is None:
            of_single = sums.new_zeros(len(asked.ids))
        if of_top is not None:
            each = torch.arange(len(states), device=states.device).repeat_interleave(top_ids.shape[1])
            asked = asked._replace(
                owners=torch.cat([asked.owners, each]), ids=torch.cat([asked.ids, top_ids.flatten()])
            )
            of_single = torch.cat([of_single, of_top.flatten()])
        # Skip the sums if none were requested: they then have their initial value -inf, which would make the gradient NaN.
        by_sum, by_entropy = (
            asked.tempered(each.clone(), slice(None)) if each is not None and asked.sums else None
            for each in (of_sums, of_entropies)
        )
        with _no_autocast(states):
            tiles = ctx.lane.tiles(states, parameters, ctx.needs_input_grad[3:])
            for rows, columns, output in tiles:
                logits = post(output)
                slope = post.slope(logits)
                at, row, column = asked.inside(logits, rows, columns)
                if by_sum is None and by_entropy is None:
                    gradient = logits.zero_()
                else:
                    gradient = asked.tempered(logits, rows).sub_(sums[rows, None]).exp_()
                    spread = None
                    if by_entropy is not None:
                        spread = torch.special.entr(gradient).sub_(gradient * entropies[rows, None])
                        spread.mul_(by_entropy[rows, None])
                    gradient.mul_(0.0 if by_sum is None else by_sum[rows, None])
                    if spread is not None:
                        gradient.add_(spread)
                gradient.index_put_((row, column), of_single[at].to(gradient.dtype), accumulate=True)
                if isinstance(slope, Tensor) or slope != 1.0:
                    gradient.mul_(slope)
                tiles.pull(rows, columns, gradient)
        of_states, *others = tiles.gradients
        return None, None, None, None if of_states is None else of_states.to(states.dtype), *others


def _no_autocast(states: Tensor) -> Any:
    return torch.autocast(states.device.type, enabled=False)


def _add_tile(sums: Tensor, entropies: Tensor | None, rows: slice, logits: Tensor) -> None:
    """Update the log-sum-exps and entropies of a tile's rows with the tile's logits, which are overwritten."""
    lowest = torch.finfo(logits.dtype).min
    peak = logits.amax(1).clamp_(min=lowest)
    weights = logits.sub_(peak[:, None]).exp_()
    total = weights.sum(1)
    before, own = sums[rows], peak.double() + total.double().log()
    joint = torch.logaddexp(before, own)
    if entropies is not None:
        # Combine the tile's entropy, the entropy of the earlier tiles, and the entropy of the choice between the two.
        inside = torch.special.entr(weights.div_(total.clamp(min=torch.finfo(total.dtype).tiny)[:, None])).sum(1)
        share, rest = ((part - joint.clamp(min=lowest)).exp() for part in (own, before))
        entropies[rows] = share * inside + rest * entropies[rows] + torch.special.entr(share) + torch.special.entr(rest)
    sums[rows] = joint


def _keep_best(top: Tensor, top_ids: Tensor, rows: slice, columns: slice, logits: Tensor) -> None:
    """Merge a tile's most likely tokens into `top` and `top_ids`, the most likely tokens of the earlier columns."""
    k = top.shape[1]
    found = logits.topk(min(k, logits.shape[1]))
    known = min(k, columns.start)
    values = torch.cat([top[rows, :known], found.values.to(top.dtype)], 1)
    ids = torch.cat([top_ids[rows, :known], found.indices + columns.start], 1)
    best = values.topk(min(k, values.shape[1]))
    top[rows, : best.values.shape[1]] = best.values
    top_ids[rows, : best.values.shape[1]] = ids.gather(1, best.indices)

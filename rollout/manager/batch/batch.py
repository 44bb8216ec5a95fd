"""`RolloutBatch`: the samples of a `generate` call as padded tensors, packed tensors, and requests.

Always true: row i is sample i. Samples are in the order of their prompts, samples of the same prompt next to each other. A
failed sample keeps its row, but none of its tokens is in `response_mask`, and `errors` has the reason. Each row is prompt,
completion and padding, in this order. A batch is immutable. Its versions and log-probs come from the requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.errors import unknown_attribute
from rollout.manager.batch.columns import KeptSets
from rollout.manager.batch.fields import fields_of
from rollout.manager.batch.forward import LogitScores, Part, distribution, read_scores
from rollout.manager.batch.images import BatchImages, ImageLayout
from rollout.manager.batch.paths import PathRows, along_paths
from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.request import DynamicInferenceRequest


@dataclass(frozen=True, eq=False, repr=False)
class PackedRollouts:
    """The L tokens of N rows of a batch, concatenated without padding between the rows.

    Other columns of the batch can be packed in the same order: `batch.kv_versions[batch.attention_mask.bool()]`. If L was
    rounded up, pad tokens start at index `cu_seqlens[-1]`. Their positions start at 0, they are not in `response_mask`, and
    their sequence id and version are -1.
    """

    input_ids: Tensor
    """int64 [L]: token ids."""

    position_ids: Tensor
    """int64 [L]: positions, which start at 0 in every sequence."""

    rows: Tensor
    """int64 [N]: the batch row number of each packed row, in order."""

    sequence_ids: Tensor
    """int64 [L]: each token's batch row, so `advantages[sequence_ids]` is a value per token."""

    cu_seqlens: Tensor
    """int32 [N+1]: sequence i is `cu_seqlens[i]:cu_seqlens[i+1]`."""

    max_seqlen: int
    """The length of the longest sequence."""

    response_mask: Tensor
    """bool [L]: the tokens that a loss may use. This field and the fields below are packed from `RolloutBatch`."""

    logprobs: Tensor
    """float32 [L]: log-prob of each sampled token."""

    policy_versions: Tensor
    """int64 [L]: policy version of each token."""

    policy_staleness: Tensor
    """int32 [L]: weight updates since each token was sampled."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of a forward pass that returns logits [1, L, V], for a vocabulary of V tokens."""
        return {"input_ids": self.input_ids[None], "position_ids": self.position_ids[None], "use_cache": False}


@dataclass(frozen=True, eq=False, repr=False)
class RolloutBatch:
    """A batch of N samples, the longest of T tokens, built by `from_requests`."""

    requests: tuple[DynamicInferenceRequest, ...]
    """The N requests, one per sample. The parts of an interrupted request are merged into one."""

    policy_version: int
    """The policy version when the batch was made; staleness is measured against it."""

    pad_token_id: int
    """The token id of padding in `input_ids`."""

    input_ids: Tensor
    """int64 [N, T]: token ids of prompt and completion."""

    attention_mask: Tensor
    """int64 [N, T]: 1 on tokens, 0 on padding."""

    position_ids: Tensor
    """int64 [N, T]: 0, 1, 2 … in every row; 0 on padding."""

    response_mask: Tensor
    """bool [N, T]: the tokens that a loss may use: sampled, not too stale, and of a request that did not fail."""

    logprobs: Tensor
    """float32 [N, T]: log-prob of the token at the same index when it was sampled; 0 outside the completion.

    If a request has no recorded log-probs, they are NaN where `response_mask` is set, so that a loss over them is NaN."""

    policy_versions: Tensor
    """int64 [N, T]: policy version that sampled the token, or that admitted the prompt to the engine; -1 on padding."""

    policy_staleness: Tensor
    """int32 [N, T]: `policy_version` minus `policy_versions`; 0 on padding."""

    kv_versions: Tensor
    """int64 [N, T]: policy version that computed the token's KV; -1 on padding."""

    kv_staleness: Tensor
    """int32 [N, T]: `policy_version` minus `kv_versions`; 0 on padding."""

    group_ids: Tensor
    """int64 [N]: the request id, which all samples of a prompt share."""

    sample_indices: Tensor
    """int64 [N]: index of the row among its prompt's samples."""

    prompt_lengths: Tensor
    """int64 [N]: number of prompt tokens."""

    response_lengths: Tensor
    """int64 [N]: number of completion tokens."""

    routed_experts: Tensor | None
    """int16 [N, T, layers, k]: the k experts chosen at each position, if `InferenceConfig.record_routes` is set; -1 on
    padding and on the last token of a row, which has no route. None if no row has routes. See `rollout.replay`."""

    finish_reasons: list[str]
    """[N]: why each row's sample finished, as the string value of its `FinishReason`."""

    texts: list[str | None]
    """[N]: text of each completion; None if the request has no text."""

    errors: list[str | None]
    """[N]: "Type: message" of each failed sample; None if the sample did not fail."""

    metadata: list[Any]
    """[N]: the metadata given with each row's prompt."""

    images: BatchImages | None = None
    """The images of the prompts; None if no row has images. See `model_inputs`."""

    if not TYPE_CHECKING:
        __getattr__ = unknown_attribute

    kept_tokens: KeptSets | None = None
    """The set of token ids from which each completion token was drawn. None if no request has `return_kept_tokens`."""

    token_values: Tensor | None = None
    """float32 [N, T, k]: the k numbers per token from `RolloutManager(token_values=…)`; 0 outside the completion. None if
    the option is not set.

    The numbers for token t come from the hidden state at position t - 1, from which the token was sampled. For a value head,
    this is the value of the state before the token. The last token's own hidden state is never computed."""

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[DynamicInferenceRequest],
        *,
        policy_version: int,
        pad_token_id: int,
        max_staleness: int | None = None,
        device: torch.device | str | None = None,
        sampled: Sequence[NDArray[np.bool_]] | None = None,
        image_layout: ImageLayout | None = None,
        **fields_of_subclass: Any,
    ) -> Self:
        """Build a batch without a Python loop over tokens.

        Args:
            requests: finished, merged requests, one per sample, the samples of a prompt next to each other. May be empty.
            policy_version: current policy version of the weights.
            pad_token_id: token id that fills `input_ids` on padding.
            max_staleness: completion tokens with a higher staleness are removed from `response_mask`. None removes no token.
            device: device of the tensors. None means the CPU.
            sampled: for each request, bool [G] that marks which of its G completion tokens were sampled. Other tokens are
                not in `response_mask`. None means that all were sampled.
            image_layout: how the model finds images among its tokens; None means no images.
            fields_of_subclass: further fields of a subclass.

        Raises:
            TypeError: an element is not a `DynamicInferenceRequest`.
            ValueError: a request has not finished; its log-probs, or the token ids left by top-p and the like, do not match
                its tokens; it has a version above `policy_version`; or the samples of a prompt are not adjacent.
        """
        made = fields_of(
            tuple(requests), policy_version, pad_token_id, max_staleness=max_staleness, sampled=sampled,
            image_layout=image_layout, device=device,
        )  # fmt: skip
        return cls(policy_version=policy_version, pad_token_id=pad_token_id, **made, **fields_of_subclass)

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, index: int) -> DynamicInferenceRequest:
        return self.requests[index]

    def __iter__(self) -> Iterator[DynamicInferenceRequest]:
        return iter(self.requests)

    def __repr__(self) -> str:
        failed = sum(error is not None for error in self.errors)
        return (
            f"RolloutBatch({len(self)} samples in {self.num_groups} groups, {failed} failed, "
            f"{int(self.response_lengths.sum())} completion tokens, policy version {self.policy_version})"
        )

    @property
    def num_groups(self) -> int:
        """The number of groups, one per prompt."""
        return sum(1 for _ in self.groups())

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Yield (group id, its rows as a slice), in order."""
        start = 0
        for group, members in groupby(self.requests, key=lambda request: request.request_id):
            stop = start + sum(1 for _ in members)
            yield group, slice(start, stop)
            start = stop

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with its tensors on `device`."""
        every = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in every if isinstance(value, Tensor | KeptSets | BatchImages)
        }
        return replace(self, **moved)

    def model_inputs(self, rows: Tensor | slice | None = None) -> dict[str, Tensor]:
        """Return arguments for the trainer's forward pass: `model(**batch.model_inputs()).logits` is [N, T, V].

        The arguments are `input_ids` and `attention_mask`. If rows have images, the arguments include the image tensors
        (`pixel_values`, `image_grid_thw`, …), once per row, and token types if the model needs them.

        Args:
            rows: the batch rows, as int64 indices or a slice. None means all rows.

        Raises:
            ValueError: an image placeholder was sampled in one of the rows.
        """
        chosen = torch.arange(len(self))[
            slice(None) if rows is None else rows if isinstance(rows, slice) else rows.cpu()
        ]
        index = chosen.to(self.input_ids.device)
        inputs = {"input_ids": self.input_ids[index], "attention_mask": self.attention_mask[index]}
        return inputs if self.images is None else inputs | self.images.inputs(chosen.tolist())

    def logprobs_of(
        self,
        model: nn.Module,
        part: PackedTree | PackedRollouts | Tensor | slice | None = None,
        *,
        temperature: float | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return the trainer's log-probs of `part`, aligned with its rows of `batch.logprobs`. See `scores_of`."""
        return self.scores_of(model, part, temperature=temperature, hidden=hidden).logprobs

    def scores_of(
        self,
        model: nn.Module,
        part: PackedTree | PackedRollouts | Tensor | slice | None = None,
        *,
        temperature: float | None = None,
        hidden: Tensor | None = None,
        entropy: bool = False,
        top_k: int | Tensor = 0,
    ) -> LogitScores:
        """Run the trainer's forward pass and return differentiable log-probs of the tokens in `response_mask`.

        Log-probs are over the distributions that tokens were drawn from: with each request's temperature, penalties and
        biases, over the token ids left by top-p and the like. Under the weights that sampled the tokens, they equal
        `logprobs`. To save memory, logits are computed tile by tile, in the forward pass and again in the backward pass.

        Args:
            model: a causal language model in transformers, or a wrapper of it (DDP, FSDP, PEFT).
            part: a tree or packed rows of this batch, from `tree`, `trees`, `packed` or `packs`; or the rows of
                the padded batch, as int64 indices or a slice. None means all rows, padded.
            temperature: divisor of the logits, for log-probs over the whole vocabulary. None means the distributions that
                tokens were drawn from.
            hidden: input of the LM head, [..., hidden size], if the part's forward pass has already run. If None,
                the model runs.
            entropy: whether to return entropies too, over the whole vocabulary.
            top_k: number of most likely tokens whose log-probs, over the whole vocabulary, are returned too; or the ids of
                other tokens to return log-probs of, int64 [N, T, k], such as a teacher model's most likely tokens.

        Returns:
            Scores [N, T] of the part's rows.

        Raises:
            ValueError: a request used top-p or the like without `return_kept_tokens`. Pass `temperature` to avoid this.
            UnsupportedModelError: log-probs cannot be read from the model's head.
        """
        computed, rows = self._part(part)
        shaping, kept = self._distribution(rows, computed.input_ids.shape[1], temperature)
        return read_scores(model, computed, shaping, kept, hidden=hidden, entropy=entropy, top_k=top_k)

    def paths(
        self,
        model: nn.Module,
        max_tokens: int,
        rows: Tensor | slice | None = None,
        *,
        temperature: float | None = None,
        entropy: bool = False,
    ) -> Iterator[PathRows]:
        """Train on rows whose prefix tree is too large for one forward pass, in the memory of one path from root to leaf.

            for rows, scores in batch.paths(model, max_tokens=4096):
                loss_of(scores.logprobs, batch.logprobs[rows], advantages[rows]).backward()

        Each row is yielded once, as soon as its tokens are computed, with all rows that the same forward pass completes.
        Rows without tokens in `response_mask` are skipped. Call backward before the next rows are yielded: a shared prefix
        collects the gradients of all its branches, and its backward pass runs once. Gradients are complete after the loop. A
        loss may use a row as a whole, but not rows of different iterations.

        Args:
            model: a model with `trainer_hooks.tree` attached. Under DDP or FSDP, where each backward pass belongs to one
                forward pass, use `trees`.
            max_tokens: maximum number of tokens in a forward pass.
            rows: the rows to train on, as int64 indices or a slice. None means all rows.
            temperature, entropy: see `scores_of`.

        Raises:
            ValueError: see `scores_of`; or the batch has images or recorded expert routes.
        """
        tree = self.tree(rows)
        part, numbers = self._part(tree)
        columns = part.input_ids.shape[1]
        # Check all requests now, so that one that cannot be replayed raises an error before any gradient is computed.
        self._distribution(numbers, columns, temperature)

        def read(segment: Part, own: Tensor) -> LogitScores:
            shaping, kept = self._distribution(numbers[own], columns, temperature)
            return read_scores(model, segment, shaping, kept, entropy=entropy)

        yield from along_paths(model, tree, part, max_tokens, read)

    def _distribution(
        self, rows: Tensor, columns: int, temperature: float | None
    ) -> tuple[dict[str, Any], KeptSets | None]:
        if temperature is not None:
            return {"temperature": temperature}, None
        kept = None if self.kept_tokens is None else self.kept_tokens.of_rows(rows, columns)
        return distribution([self.requests[row] for row in rows.tolist()], kept, self.input_ids.device)

    def _part(self, part: PackedTree | PackedRollouts | Tensor | slice | None) -> tuple[Part, Tensor]:
        """Return `part` as the input of a forward pass, and the batch row numbers of its rows; None means all rows."""
        if isinstance(part, PackedTree):
            columns = part.nodes.shape[1]
            return part.part(self.input_ids[part.rows, :columns], self.response_mask[part.rows, :columns]), part.rows
        if isinstance(part, PackedRollouts):
            rows, inputs, starts = part.rows, part.inputs, part.cu_seqlens[:-1].long()
        else:
            rows = self._numbers(part)
            inputs = {**self.model_inputs(rows), "use_cache": False}
            if self.images is None:
                longest = int(self.attention_mask[rows].sum(1).max()) if len(rows) else 0
                inputs |= {name: inputs[name][:, :longest] for name in ("input_ids", "attention_mask")}
            starts = torch.arange(len(rows), device=rows.device) * inputs["input_ids"].shape[1]
        before = starts[:, None] + torch.arange(self.input_ids.shape[1], device=rows.device) - 1
        return Part(inputs, self.input_ids[rows], self.response_mask[rows], before), rows

    def _numbers(self, rows: Tensor | slice | None) -> Tensor:
        if not isinstance(rows, Tensor | slice | None):
            raise TypeError(f"rows={rows!r}: must be int64 row numbers, torch.tensor([0, 1]), a slice, or None for all")
        return torch.arange(len(self), device=self.input_ids.device)[slice(None) if rows is None else rows]

    def packed(self, multiple_of: int = 1, rows: Tensor | slice | None = None) -> PackedRollouts:
        """Pack the tokens of rows without padding, for kernels that take `cu_seqlens`.

        Args:
            multiple_of: the number of tokens is rounded up to a multiple of this.
            rows: the rows to pack, as int64 indices or a slice. None means all rows.

        Raises:
            ValueError: `multiple_of` is below 1, or any row of the batch has images, even if it is not in `rows`.
        """
        if multiple_of < 1:
            raise ValueError(f"multiple_of={multiple_of!r}: must be at least 1, which rounds nothing up")
        if self.images is not None:
            raise ValueError(
                "packed(): rows have images: train on batch.tree(), or on padded rows (batch.model_inputs())"
            )
        chosen = self._numbers(rows)
        # Compute the indices once: on a GPU, every boolean index makes the CPU wait for the number of selected tokens.
        real = self.attention_mask[chosen].flatten().nonzero()[:, 0]
        surplus = -len(real) % multiple_of

        def flat(values: Tensor, fill: int) -> Tensor:
            values = values.flatten(0, 1).index_select(0, real)
            return torch.cat([values, values.new_full((surplus, *values.shape[1:]), fill)])

        def column(name: str, fill: int) -> Tensor:
            return flat(getattr(self, name)[chosen], fill)

        position_ids = column("position_ids", 0)
        position_ids[len(real) :] = torch.arange(surplus, device=real.device)
        ends = (self.prompt_lengths + self.response_lengths)[chosen].cumsum(0)
        return PackedRollouts(
            input_ids=column("input_ids", self.pad_token_id),
            position_ids=position_ids,
            rows=chosen,
            sequence_ids=flat(chosen[:, None].expand(-1, self.input_ids.shape[1]), -1),
            cu_seqlens=pad(ends, (1, 0)).to(torch.int32),
            max_seqlen=int(self.attention_mask[chosen].sum(1).max()) if len(chosen) else 0,
            response_mask=column("response_mask", 0),
            logprobs=column("logprobs", 0),
            policy_versions=column("policy_versions", -1),
            policy_staleness=column("policy_staleness", 0),
        )

    def tree(self, rows: Tensor | slice | None = None) -> PackedTree:
        """Pack rows into a tree that has each common prefix only once, for a model with `trainer_hooks.tree` attached.

        For `packed = batch.tree()`, `logprobs_of(model, packed)` is aligned with `logprobs[packed.rows]`. If the batch has
        expert routes (which experts each token was routed to), rows share a prefix only as far as their routes are the same.
        `rollout.replay(packed, model)` replays the routes.

        Args:
            rows: the rows to pack, as int64 indices or a slice. None means all rows.

        Raises:
            ValueError: an image placeholder was sampled in one of the rows.
        """
        chosen = self._numbers(rows)
        real = self.attention_mask[chosen].bool()
        columns = torch.arange(self.input_ids.shape[1], device=real.device)
        wanted = real & (columns >= self.prompt_lengths[chosen, None])
        routes = None if self.routed_experts is None else self.routed_experts[chosen]
        pack = pack_tree if self.images is None else self.images.tree
        packed = pack(self.input_ids[chosen], real, wanted, chosen, routes)
        if routes is None:
            return packed
        missing = (routes < 0).any(3).any(2) & real & (columns < real.sum(1, keepdim=True) - 1)
        trained = self.response_mask[chosen].any(1)
        return replace(packed, unrouted=chosen[missing.any(1) & trained])

    def trees(self, max_tokens: int) -> Iterator[PackedTree]:
        """Split the rows into prefix trees of about equal size, at most `max_tokens` tokens each, for gradient accumulation.

        Groups stay whole: a group with more than `max_tokens` is a tree of its own. The groups in a tree are in batch order.

        Raises:
            ValueError: `max_tokens` is below 1.
        """
        groups = [rows for _, rows in self.groups()]
        shared = self._common_tokens()
        sizes = [len(self.tree(rows)) - shared for rows in groups]
        every = torch.arange(len(self), device=self.input_ids.device)
        for part in equal_parts(sizes, max_tokens - shared if max_tokens > shared else max_tokens):
            yield self.tree(torch.cat([every[groups[index]] for index in part]))

    def _common_tokens(self) -> int:
        """Return the length of the prefix common to all rows; 0 if rows have expert routes or images, which may differ."""
        if not len(self) or self.routed_experts is not None or self.images is not None:
            return 0
        same = (self.input_ids == self.input_ids[:1]).all(0) & self.attention_mask.bool().all(0)
        return int(same.long().cumprod(0).sum())

    def packs(self, max_tokens: int, multiple_of: int = 1) -> Iterator[PackedRollouts]:
        """Split the rows into parts of about equal size, at most `max_tokens` tokens each; yield each part, packed."""
        for part in equal_parts(self.attention_mask.sum(1).tolist(), max_tokens):
            yield self.packed(multiple_of, torch.tensor(part, device=self.input_ids.device))


def equal_parts(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Split items into few parts whose `sizes` have nearly equal sums, at most `limit`. A larger item is its own part.

    Items go to the smallest part, largest item first (Graham 1969, "longest processing time").

    Returns:
        The item numbers of each part, ascending; the parts are in the order of their first items.

    Raises:
        ValueError: `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"max_tokens={limit!r}: must be at least 1, which makes a part of every group or row")
    order = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    alone = [[item] for item in order if sizes[item] > limit]
    order = order[len(alone) :]
    parts: list[list[int]] = []
    for count in range(max(1, -(-sum(sizes[item] for item in order) // limit)), len(order) + 1):
        parts = [[] for _ in range(count)]
        totals = [0] * count
        for item in order:
            smallest = totals.index(min(totals))
            parts[smallest].append(item)
            totals[smallest] += sizes[item]
        if max(totals) <= limit:
            break
    return sorted(sorted(part) for part in [*alone, *parts] if part)

"""Values of sampled tokens: a user's function is applied to the hidden states from which the tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.errors import ConfigError, UnsupportedModelError

ValueFunction = Callable[[Tensor], Tensor]
"""A function from hidden states [rows, hidden], the input of the output embeddings, to numbers [rows, k] or [rows]."""


class TokenValues:
    """Collects the hidden states of a step's forward passes, and computes values from them.

    A step may run several forward passes in any order, so each hidden state has a key. The key is the KV cache slot of the
    state's position, which is unique within the step.

    Args:
        model: the model, whose output embeddings read the hidden states.
        function: the user's function; if None, no values are computed.

    Attributes:
        width: the number k of values per token; 0 before `try_out`, or if there is no function.
        wanted: whether the current step's forward passes must call `put` with their hidden states.
    """

    def __init__(self, model: nn.Module, function: ValueFunction | None) -> None:
        self._model: Any = model
        self._function = function
        self._keys: list[NDArray[np.int64]] = []
        self._hidden: list[Tensor] = []
        self.width = 0
        self.wanted = False

    def try_out(self, forward: Callable[[], object]) -> None:
        """Run the function on the hidden states of one forward pass, and set `width` to the number of values it returns.

        Args:
            forward: function that runs the model's forward pass on two tokens.

        Raises:
            UnsupportedModelError: the model's hidden states cannot be read.
            ConfigError: the function raises, or does not return numbers for each row.
        """
        if self._function is None:
            return
        if self._model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"token_values: {type(self._model).__name__}.get_output_embeddings() is None; return its last linear layer"
            )
        with self.collecting(), self.read_by_head(np.arange(2)):
            forward()
        if not self._hidden:
            raise UnsupportedModelError(
                f"token_values: the forward of {type(self._model).__name__} does not call the module that its "
                "get_output_embeddings() returns, whose input is the hidden state; call it"
            )
        found = self._function_of(self._hidden[0])
        if found.shape[:1] != self._hidden[0].shape[:1] or found.ndim != 2 or not found.size:
            raise ConfigError(
                f"token_values returned shape {list(found.shape)} for hidden states {list(self._hidden[0].shape)}: must be "
                "[rows, k], or [rows]"
            )
        self.width = found.shape[1]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect hidden states from the forward passes of one step, which run inside the `with` block."""
        self._keys, self._hidden, self.wanted = [], [], self._function is not None
        try:
            yield
        finally:
            self.wanted = False

    @contextmanager
    def read_by_head(self, keys: NDArray[np.int64]) -> Iterator[None]:
        """Collect hidden states from the input of the output embeddings, in the one forward pass that runs inside the block.

        Args:
            keys: [B, C] or [C], the keys of the hidden states, in the order in which the output embeddings get them.
        """
        hook = self._model.get_output_embeddings().register_forward_pre_hook(
            lambda _, given: self.put(keys.ravel(), given[0].flatten(0, -2)), prepend=True
        )
        try:
            yield
        finally:
            hook.remove()

    def put(self, keys: NDArray[np.int64], hidden: Tensor) -> None:
        """Store K hidden states, given as `hidden` [K, hidden size], under their keys [K]."""
        self._keys.append(keys)
        self._hidden.append(hidden)

    def take(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the values [len(keys), width] of the hidden states that were stored under these keys.

        Raises:
            ConfigError: the function raises, or returns a different number of values than in `try_out`.
        """
        known = np.concatenate(self._keys)
        order = np.argsort(known)
        at = order[np.searchsorted(known, keys, sorter=order)]
        hidden = torch.cat(self._hidden)
        found = self._function_of(hidden.index_select(0, torch.from_numpy(at).to(hidden.device)))
        if found.shape != (len(keys), self.width):
            raise ConfigError(
                f"token_values returned shape {list(found.shape)} for {len(keys)} rows: must be [rows, {self.width}], as "
                "when the engine was built"
            )
        return found

    def _function_of(self, hidden: Tensor) -> NDArray[np.float32]:
        assert self._function is not None
        try:
            with torch.no_grad():
                found = self._function(hidden.detach())
            values: NDArray[np.float32] = found.float().cpu().numpy()
        except Exception as exc:
            raise ConfigError(
                f"token_values raised {type(exc).__name__}: {exc}; it gets hidden states {list(hidden.shape)} of "
                f"{hidden.dtype} on {hidden.device}, and returns a tensor [rows, k]"
            ) from exc
        return values[:, None] if values.ndim == 1 else values

"""Runs of decode steps on CUDA: replays of one graph, queued behind one another with the draws in between.

Tokens stay on the device from draw to forward, and come to the host while later steps run, which the host queues no more
than `LEAD` ahead: so it sees soon that a row has ended, or that the run is asked to end, and the device never waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import downloading, upload
from rollout.engine.sampling.sampler import sample
from rollout.engine.sampling.sampling_table import DecodeRun

LEAD = 2
"""Steps queued before the tokens of an earlier one are read. With one, a host that is late leaves the device idle."""

Forward = Callable[[NDArray[np.int64], PagedRows, NDArray[np.int64]], Tensor]


class GraphedRuns:
    """`RunForward` of a model whose decode steps are replayed as graphs.

    Args:
        forward: runs one step, as a graph if there can be one; logits [B, V] at the packed positions given last.
        graphs: of its decode steps.
    """

    has_states = False
    """A model with recurrent states is not captured."""

    def __init__(self, forward: Forward, graphs: GraphedDecode, device: torch.device) -> None:
        self._forward = forward
        self._graphs = graphs
        self._device = device

    def ready(self, module_epoch: int) -> bool:
        """Whether steps of the model may be replayed; the first one of a run says whether they are."""
        return not self._graphs.why_not

    def decode(self, run: DecodeRun) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Make decode steps; see `RunForward`. A step that was not replayed is the only one."""
        logits = self._forward(run.ids, run.rows, np.arange(len(run.ids)))
        step = self._graphs.last
        most = 1 if step is None else 1 + step.room(run.steps - 1)
        counts = upload(run.counters, self._device)
        coming, came = deque[Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]](), []
        for made in range(1, most + 1):
            drawn = sample(logits, run.params, counts)
            coming.append(downloading(drawn.token_ids, drawn.logprobs))
            if len(coming) > LEAD:
                came.append(coming.popleft()())
            if step is None or made == most or run.asked.value or (came and _ends(*came[-1], run.stop_ids)):
                break
            counts = counts + 1
            logits = step.follow(drawn.token_ids)
        came += [each() for each in coming]
        tokens, logprobs = zip(*came, strict=True)
        return np.stack(tokens, 1), np.stack(logprobs, 1)


def _ends(tokens: NDArray[np.int64], logprobs: NDArray[np.float32], stop_ids: NDArray[np.int32]) -> bool:
    """Whether one of these rows ends by its token, or has failed."""
    return bool((stop_ids == tokens[:, None]).any() or np.isnan(logprobs).any())

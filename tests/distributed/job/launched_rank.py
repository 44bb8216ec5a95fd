"""One rank of a launched job of two: rank 1 is killed in its first life, in the middle of `generate`.

    LAUNCHER tests/distributed/job/launched_rank.py FOLDER

A rank saves its state before it begins, writes the groups that have ended to its journal, and loads both when it is started
again. It says in `FOLDER/rank-N.LIFE` what came back and how many tokens it computed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rollout import Advanced, InferenceConfig, Journal, RolloutManager, SamplingParams
from tests.configs import coordinator_config
from tests.models import make_model

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16], [17, 18, 19]]
LENGTHS = [4, 8, 200, 12, 4, 200]
"""Of the completions: half of the groups have ended long before the others."""
KILLED, SHORT = 1, 4
"""The rank that is killed, and after how many groups of its own."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folder = Path(sys.argv[1])
    saved = folder / f"rank-{rank}.pt"
    first = not saved.exists()
    config = InferenceConfig(
        kv_cache_blocks=256, max_requests=4, advanced=Advanced(block_size_tokens=4, verify_model=False)
    )
    quickly = coordinator_config(heartbeat_timeout_s=5.0)
    with (
        Journal(folder / f"journal-{rank}") as journal,
        RolloutManager(make_model("qwen3"), None, config, journal=journal, coordinator=quickly) as manager,
    ):
        if first:
            torch.save(manager.state_dict(), saved)
        else:
            manager.load_state_dict(torch.load(saved))
        params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=7 + length) for length in LENGTHS]
        numbers = manager.submit(PROMPTS, params)
        answers: dict[int, list[int]] = {}
        # Both have joined, and hold groups of the other.
        for batch in manager.as_completed():
            answers[numbers.index(int(batch.group_ids[0]))] = batch[0].generated_tokens
            if first and rank == KILLED and len(answers) == SHORT:
                os.kill(os.getpid(), signal.SIGKILL)
        told = {"answers": sorted(answers.items()), "computed": manager.engine.stats()["generated_tokens"]}
    (folder / f"rank-{rank}.{1 if first else 2}").write_text(json.dumps(told))
    print(f"rank {rank} has its groups", flush=True)


if __name__ == "__main__":
    main()

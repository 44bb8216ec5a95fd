"""The data-parallel example under Ray Train: each worker of a `TorchTrainer` is a rank.

    pip install -e '.[examples,ray]'
    python examples/ray_grpo.py --workers 2 --seed 0

On a cluster (`RAY_ADDRESS`, or on its head node) every node needs rollout-engine installed, and the folder of `--out` on a
file system that the driver sees too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import ray
import torch
from data_parallel_grpo import parse_options, train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FROM_DRIVER = ("WANDB_MODE", "WANDB_DATA_DIR")
"""Environment variables that the workers get. A runtime environment is shown to users of the cluster: no secret."""


def main() -> None:
    """Run the workers to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks, a GPU each if there are any, else a CPU")
    options = parse_options(parser)
    # Workers run in a folder of Ray's.
    options.out = options.out.resolve()
    variables = {name: os.environ[name] for name in FROM_DRIVER if name in os.environ}
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent), "env_vars": variables})

    def rank() -> None:
        train(options)

    TorchTrainer(
        rank,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(options.out)),
    ).fit()


if __name__ == "__main__":
    main()

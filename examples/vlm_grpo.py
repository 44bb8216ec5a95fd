"""GRPO on images: a tiny Qwen2.5-VL, made on the spot, learns to count coloured discs and to name their colour.

    python examples/vlm_grpo.py --seed 0

Every prompt is a drawing of one to three discs of one colour, and the answer is two tokens, such as "2 blue". The model is
random when it starts: all it learns, it learns from the rewards of its own answers. The vision tower runs once per drawing
and step, for all samples of it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw
from policy import trapezoid
from report import BLUE, FAINT, STYLE
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollout import InferenceConfig, RolloutManager, SamplingParams
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach

WORDS = ["<pad>", "<eos>", "<image>", "<video>", "<look>", "?", "1", "2", "3", "red", "green", "blue", "yellow"]
COLORS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
IMAGE, VIDEO, LOOK, ASK = (WORDS.index(word) for word in ("<image>", "<video>", "<look>", "?"))
GROUP = 16
SIDE, PATCH, MERGE = 32, 8, 2
EMBEDDINGS = (SIDE // PATCH // MERGE) ** 2


@dataclass(frozen=True)
class Drawing:
    """A picture of discs, and what is right to say about it."""

    picture: Image.Image
    count: int
    color: str


def draw(chance: random.Random) -> Drawing:
    """One to three discs of one colour, in different quarters of a grey square."""
    count, color = chance.randint(1, 3), chance.choice(list(COLORS))
    picture = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    pen, half = ImageDraw.Draw(picture), SIDE // 2
    for quarter in chance.sample(range(4), count):
        left = quarter % 2 * half + chance.randint(1, 3)
        top = quarter // 2 * half + chance.randint(1, 3)
        pen.ellipse((left, top, left + 11, top + 11), fill=COLORS[color])
    return Drawing(picture, count, color)


def processed(drawing: Drawing) -> dict[str, Tensor]:
    """Return the tensors of Qwen's processor: patches of 8 x 8 pixels, twice in time, in merging order."""
    pixels = torch.from_numpy(np.asarray(drawing.picture, np.float32).copy()) / 127.5 - 1
    grid, blocks = SIDE // PATCH, SIDE // PATCH // MERGE
    cut = pixels.permute(2, 0, 1).view(3, blocks, MERGE, PATCH, blocks, MERGE, PATCH)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid * grid, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1)
    return {
        "input_ids": torch.tensor([[LOOK, *[IMAGE] * EMBEDDINGS, ASK]]),
        "pixel_values": patches.reshape(grid * grid, -1),
        "image_grid_thw": torch.tensor([[1, grid, grid]]),
    }


def small_model(seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of 0.3 million random parameters."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(WORDS), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96,
        "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "window_size": SIDE,
        "fullatt_block_indexes": [0, 1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=LOOK
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def reward(answer: list[int], drawing: Drawing) -> float:
    """Half for the right number in the first place, half for the right colour in the second."""
    first, second = (WORDS[token] for token in answer)
    return 0.5 * (first == str(drawing.count)) + 0.5 * (second == drawing.color)


def sampling(n: int, temperature: float = 1.0) -> SamplingParams:
    """Two tokens; a placeholder of an image is never sampled, since the trainer's forward would look for its image."""
    return SamplingParams(
        n=n, max_tokens=2, temperature=temperature, ignore_eos=True, logit_bias={IMAGE: -100.0, VIDEO: -100.0}
    )


def grpo(
    model: Qwen2_5_VLForConditionalGeneration, manager: RolloutManager, options: argparse.Namespace
) -> Iterator[float]:
    """Repeat: draw, sample answers, score them, train on the batch. Yields the mean reward."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    chance = random.Random(options.seed)
    for _ in range(options.steps):
        drawings = [draw(chance) for _ in range(options.prompts)]
        batch = manager.generate([processed(each) for each in drawings], sampling(GROUP), progress=False)
        asked = [drawing for drawing in drawings for _ in range(GROUP)]
        rewards = torch.tensor([reward(r.generated_tokens, d) for r, d in zip(batch, asked, strict=True)])
        advantages = group_advantages(rewards, batch.group_ids)[:, None]
        with manager.suspended():
            logits = model(**batch.model_inputs(), use_cache=False).logits[:, :-1]
            logits[..., [IMAGE, VIDEO]] -= 100.0
            logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
            ratio = (logprobs - batch.logprobs[:, 1:]).exp()
            loss = -(ratio * advantages)[batch.response_mask[:, 1:]].mean()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        yield rewards.mean().item()


def exam(manager: RolloutManager, drawings: list[Drawing]) -> float:
    """Return the mean reward of greedy answers."""
    batch = manager.generate([processed(each) for each in drawings], sampling(1, temperature=0.0), progress=False)
    return sum(reward(r.generated_tokens, d) for r, d in zip(batch, drawings, strict=True)) / len(drawings)


def picture(rewards: list[float], drawings: list[Drawing], path: Path) -> Path:
    """Draw the reward of every step beside four of the drawings."""
    with mpl.rc_context(STYLE | {"axes.titlepad": 8}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        panels = figure.subplot_mosaic([["reward", "reward", 0, 1], ["reward", "reward", 2, 3]])
        axes = panels["reward"]
        axes.plot(range(1, len(rewards) + 1), rewards, color=BLUE)
        axes.axhline(1.0, color=FAINT)
        axes.set(title="Mean reward of the samples", xlabel="step", ylim=(0, 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for place, drawing in enumerate(drawings[:4]):
            panels[place].imshow(drawing.picture)
            panels[place].set(title=f"{drawing.count} {drawing.color}", xticks=[], yticks=[])
        figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the drawings and the sampling")
    parser.add_argument("--steps", type=int, default=80, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--out", type=Path, default=Path("runs/vlm_grpo"), help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    options.out.mkdir(parents=True, exist_ok=True)
    held_out = [draw(random.Random(10_000 + number)) for number in range(16 if options.quick else 200)]
    model = small_model(options.seed)
    config = InferenceConfig(max_requests=GROUP * options.prompts, kv_cache_memory_gb=0.1, seed=options.seed)
    rewards: list[float] = []
    with RolloutManager(model, None, config) as manager:
        before = exam(manager, held_out)
        for number, mean in enumerate(grpo(model, manager, options), 1):
            rewards.append(mean)
            metrics = manager.metrics()
            if number % 10 == 0 or number in (1, options.steps):
                print(
                    f"step {number}: reward {mean:.2f}; {metrics['rollout/images_encoded']:.0f} drawings encoded for "
                    f"{options.prompts * GROUP} samples"
                )
        after = exam(manager, held_out)
    print(f"held-out {before:.2f} → {after:.2f}")
    print(f"picture: {picture(rewards, held_out, options.out / f'seed-{options.seed}.png')}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()

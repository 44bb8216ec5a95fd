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

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import rollout
from rollout.algorithms import group_advantages, masked_mean

WORDS = ["<pad>", "<eos>", "<image>", "<video>", "<look>", "?", "1", "2", "3", "red", "green", "blue", "yellow"]
COLORS = {"red": (220, 40, 40), "green": (40, 180, 70), "blue": (50, 80, 230), "yellow": (240, 210, 40)}
IMAGE, VIDEO, LOOK, ASK = (WORDS.index(word) for word in ("<image>", "<video>", "<look>", "?"))
GROUP, SIDE, PATCH, MERGE = 16, 32, 8, 2
NEVER = {IMAGE: -100.0, VIDEO: -100.0}
"""Logit bias: a placeholder of an image is never sampled, since the trainer's forward would look for its image. `top_k` then
drops it from the tokens that could be drawn, over which the trainer's log-probs are."""

Answer = tuple[int, str]


def draw() -> tuple[Image.Image, Answer]:
    """Draw one to three discs of one colour, in different quarters of a grey square."""
    count, color = random.randint(1, 3), random.choice(list(COLORS))
    picture = Image.new("RGB", (SIDE, SIDE), (128, 128, 128))
    pen, half = ImageDraw.Draw(picture), SIDE // 2
    for quarter in random.sample(range(4), count):
        left, top = quarter % 2 * half + random.randint(1, 3), quarter // 2 * half + random.randint(1, 3)
        pen.ellipse((left, top, left + 11, top + 11), fill=COLORS[color])
    return picture, (count, color)


def processed(picture: Image.Image) -> dict[str, Tensor]:
    """Return the tensors of Qwen's processor: patches of 8 x 8 pixels, twice in time, in merging order."""
    pixels = torch.from_numpy(np.asarray(picture, np.float32).copy()) / 127.5 - 1
    grid, blocks = SIDE // PATCH, SIDE // PATCH // MERGE
    cut = pixels.permute(2, 0, 1).view(3, blocks, MERGE, PATCH, blocks, MERGE, PATCH)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid * grid, 3, 1, PATCH * PATCH).expand(-1, -1, 2, -1)
    return {
        "input_ids": torch.tensor([[LOOK, *[IMAGE] * blocks**2, ASK]]),
        "pixel_values": patches.reshape(grid * grid, -1),
        "image_grid_thw": torch.tensor([[1, grid, grid]]),
    }


def make_model() -> Qwen2_5_VLForConditionalGeneration:
    """Build a Qwen2.5-VL of 0.3 million random parameters."""
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
    return Qwen2_5_VLForConditionalGeneration(config).to("cuda" if torch.cuda.is_available() else "cpu")


def rewards_of(batch: rollout.RolloutBatch) -> Tensor:
    """Return float32 [N]: half for the right number in the first place, half for the right colour in the second."""
    said = [[WORDS[token] for token in each.generated_tokens] for each in batch]
    right = [
        (word == str(count)) + (name == color)
        for (word, name), (count, color) in zip(said, batch.metadata, strict=True)
    ]
    return torch.tensor(right, dtype=torch.float32, device=batch.input_ids.device) / 2


def sample(drawings: list[tuple[Image.Image, Answer]], n: int, temperature: float = 1.0) -> rollout.RolloutBatch:
    """Ask for n answers of two tokens about each drawing."""
    params = rollout.SamplingParams(
        n=n, max_tokens=2, temperature=temperature, ignore_eos=True, logit_bias=NEVER, top_k=len(WORDS) - len(NEVER),
        return_kept_tokens=temperature > 0,
    )  # fmt: skip
    prompts, answers = [processed(picture) for picture, _ in drawings], [answer for _, answer in drawings]
    return rollout.generate(prompts, params, metadata=answers, progress=False)


def grpo(model: Qwen2_5_VLForConditionalGeneration, optimizer: AdamW, batch: rollout.RolloutBatch) -> None:
    """Train on a batch."""
    advantages = group_advantages(rewards_of(batch), batch.group_ids)[:, None]
    with rollout.suspended():
        ratio = (batch.logprobs_of(model) - batch.logprobs).exp()
        masked_mean(-ratio * advantages, batch.response_mask).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train from random weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the drawings and the sampling")
    parser.add_argument("--steps", type=int, default=80, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {GROUP} samples each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = make_model()
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    config = rollout.InferenceConfig(
        max_requests=GROUP * options.prompts, kv_cache_memory_gb=0.1, seed=options.seed, max_sequence_length=64
    )
    manager = rollout.init(model, None, optimizer, config)
    held_out = [draw() for _ in range(16 if options.quick else 200)]
    before = rewards_of(sample(held_out, 1, temperature=0.0)).mean()
    for step in range(1, options.steps + 1):
        optimizer.param_groups[0]["lr"] = 1.5e-3 * min(1.0, step / 5, 1 - (step - 1) / options.steps)
        manager.metrics()
        batch = sample([draw() for _ in range(options.prompts)], GROUP)
        grpo(model, optimizer, batch)
        if step % 10 == 0 or step in (1, options.steps):
            encoded = manager.metrics()["rollout/images_encoded"]
            reward = rewards_of(batch).mean()
            print(f"step {step:3}: reward {reward:.2f}; {encoded:.0f} drawings encoded for {len(batch)} samples")
    after = rewards_of(sample(held_out, 1, temperature=0.0)).mean()
    rollout.close()
    print(f"held-out {before:.2f} → {after:.2f}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()

"""Small random vision-language models of every family that is served images, and prompts with images for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma4Config,
    Idefics3Config,
    MuseGlimmerConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)
from transformers.video_utils import VideoMetadata

from tests.models import SMALL, VOCAB, require_recurrent_cache, spread_logits

IMAGE = 90
"""Id of the placeholder."""
VIDEO = 91
"""Id of the placeholder of videos."""
TEXT_END = 89
"""Ids of text in prompts lie in [3, TEXT_END)."""
MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
NO_MARKS = {IMAGE: -100.0, VIDEO: -100.0}
"""`logit_bias` under which no placeholder is sampled: the trainer's forward would take one for an image."""
PATCHES = {"depth": 2, "hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
HYBRID = SMALL | MROPE | {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
HYBRID_SIGHT: dict[str, Any] = {
    "vision_config": PATCHES | {"num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48,
                                "num_position_embeddings": 16}, **MARKS,
}  # fmt: skip
SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
          "patch_size": 4}  # fmt: skip
GEMMA4 = SMALL | {
    "head_dim": 16, "global_head_dim": 16, "sliding_window": 8, "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0,
    "pad_token_id": 5,
}  # fmt: skip
POOLED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
          "position_embedding_size": 16}  # fmt: skip
GEMMA4_MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": 92, "eoi_token_id": 93,
                "audio_token_id": 94, "boa_token_id": 95, "eoa_token_index": 96}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=SMALL | MROPE, **MARKS,
        vision_config=PATCHES | {"num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48, "window_size": 16,
                                 "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        text_config=SMALL | MROPE, **MARKS,
        vision_config=PATCHES | {"num_heads": 2, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        text_config=SMALL | MROPE | {"head_dim": 12}, **MARKS,
        vision_config=PATCHES | {"num_heads": 2, "intermediate_size": 48, "out_hidden_size": 48,
                                 "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": lambda: Qwen3_5Config(text_config=HYBRID, **HYBRID_SIGHT),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config=HYBRID | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                              "shared_expert_intermediate_size": 48},
        **HYBRID_SIGHT,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=SMALL | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
                             "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        vision_config=SIGLIP, image_token_index=IMAGE, boi_token_index=92, eoi_token_index=93, mm_tokens_per_image=4,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config=GEMMA4 | {"use_bidirectional_attention": "vision"}, vision_config=POOLED, **GEMMA4_MARKS,
    ),
    "gemma4_small": lambda: Gemma4Config(
        text_config=GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}, vision_config=POOLED,
        **GEMMA4_MARKS,
    ),
    "muse_glimmer": lambda: MuseGlimmerConfig(
        text_config=SMALL | {"head_dim": 12, "sliding_window": 8, "num_hidden_layers": 4}, image_token_id=IMAGE,
        video_token_id=VIDEO, out_hidden_size=128, projector_hidden_size=48,
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
    ),
    "idefics3": lambda: Idefics3Config(
        text_config=SMALL | {"model_type": "llama"}, vision_config=SIGLIP, image_token_id=IMAGE, scale_factor=2,
        pad_token_id=0,
    ),
    "smolvlm": lambda: SmolVLMConfig(
        text_config=SMALL | {"model_type": "llama"}, vision_config=SIGLIP, image_token_id=IMAGE, scale_factor=2,
        pad_token_id=0,
    ),
}  # fmt: skip


def make_vision_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose logits are spread out, so that greedy choices are not ties."""
    if name in ("qwen3_5", "qwen3_5_moe"):
        require_recurrent_cache()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name](), dtype=torch.float32)
    spread_logits(model)
    if name == "gemma3":
        # transformers starts it at zero, which would make all images alike.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model.train()


@cache
def shared_vision_model(name: str) -> PreTrainedModel:
    """One model per family, never changed by a test."""
    return make_vision_model(name)


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<boi>{% elif p.type == 'video' %}<boi><video><eoi>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and those that stand for and around images."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {chr(code): code - 29 for code in range(32, 119)}
    vocab |= {"<img>": IMAGE, "<video>": VIDEO, "<boi>": 92, "<eoi>": 93, "<unk>": 94}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens={"image_token": "<img>", "video_token": "<video>", "boi_token": "<boi>",
                              "eoi_token": "<eoi>"},
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_processor() -> Gemma3Processor:
    """Gemma 3's processor for its tiny model: four placeholders per image."""
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(image_processor=images, tokenizer=make_vision_tokenizer(), image_seq_length=4)


class FramesProcessor:
    """A stand-in of Qwen2.5-VL's video processor for frames of 16 x 16, without torchvision, which that needs."""

    merge_size = temporal_patch_size = 2
    do_sample_frames = False

    def __call__(self, videos: list[Any], video_metadata: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        """Patches of videos [F, 16, 16, 3] in Qwen's order, and their grids."""
        patches, grids = [], []
        for video in videos:
            frames = video.permute(0, 3, 1, 2) / 255
            frames = torch.cat([frames, frames[-1:]])[: len(frames) + len(frames) % 2]
            steps = frames.view(-1, 2, 3, 2, 2, 4, 2, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
            patches.append(steps.reshape(-1, 3 * 2 * 4 * 4))
            grids.append([len(frames) // 2, 4, 4])
        found = [VideoMetadata(**metadata) for metadata in video_metadata]
        return {
            "pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids), "video_metadata": found,
        }  # fmt: skip


class _AnyParts(Qwen2_5_VLProcessor):  # type: ignore[misc]
    """With a video processor that is not of transformers, or none."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        """Take what is given."""
        return type(argument)


def make_qwen_processor(videos: FramesProcessor | None = None) -> Qwen2_5_VLProcessor:
    """Qwen2.5-VL's processor for its tiny model: one to four placeholders per image, by its size."""
    size = {"shortest_edge": 64, "longest_edge": 256}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    tokenizer = make_vision_tokenizer()
    template = TEMPLATE.replace("%}<boi>{%", "%}<boi><img><eoi>{%")
    return _AnyParts(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=template)


def picture_prompt(name: str, parts: Sequence[int | str], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a processor's result for one prompt: input_ids [1, P], attention_mask, and the images' tensors.

    Args:
        parts: a number is so many random tokens of text; a text names an image, and equal names are equal images. A name
            that begins with "clip" is that of a video, of three frames; behind "@" may stand its seconds per frame.
    """
    text = np.random.default_rng(seed)
    ids: list[int] = []
    images: list[dict[str, torch.Tensor]] = []
    for part in parts:
        if isinstance(part, int):
            ids += text.integers(3, TEXT_END, part).tolist()
        elif part.startswith("clip"):
            clip, frames, count = video(name, part)
            images.append(clip)
            # One run, or one per frame with its time, in text, before it.
            runs = [[VIDEO] * frames * count] if name.startswith("qwen2") else [[VIDEO] * count] * frames
            for at, run in enumerate(runs):
                ids += [*[40 + at] * (len(runs) > 1), 92, *run, 93]
        else:
            image, count = picture(name, part)
            images.append(image)
            ids += [92, *[IMAGE] * count, 93]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if images:
        dim = 1 if name in ("idefics3", "smolvlm") else 0
        names = dict.fromkeys(key for image in images for key in image)
        inputs |= {key: torch.cat([image[key] for image in images if key in image], dim=dim) for key in names}
    return inputs


def video(name: str, label: str) -> tuple[dict[str, torch.Tensor], int, int]:
    """Tensors of one random video, how many frames it has, and how many placeholders each takes."""
    content, _, speed = label.partition("@")
    random = torch.Generator().manual_seed(sum(content.encode()))
    grid = torch.tensor([[3, 4, 4]])
    tensors = {
        "pixel_values_videos": torch.randn(int(grid.prod()), 3 * 2 * 4 * 4, generator=random),
        "video_grid_thw": grid,
    }
    if name == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = torch.tensor([float(speed or 1.0)])
    return tensors, 3, 4


def picture(name: str, label: str) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors of one random image, and how many placeholders it takes."""
    random = torch.Generator().manual_seed(sum(label.encode()))
    if "qwen" in name or name == "muse_glimmer":
        grid = torch.tensor([[1, 4, 2 * (2 + ord(label[0]) % 2)]])
        rows = int(grid.prod())
        pixels = torch.randn(rows, 3 * 2 * 4 * 4, generator=random)
        return {"pixel_values": pixels, "image_grid_thw": grid}, rows // 4
    if "gemma4" in name:
        # As its processor does: filled up to the most patches that an image may have.
        wide, most = 4 + 2 * (ord(label[0]) % 2), 32
        at = torch.full((1, most, 2), -1)
        at[0, : 4 * wide] = torch.cartesian_prod(torch.arange(4), torch.arange(wide)).flip(-1)
        pixels = torch.rand(1, most, 3 * 4 * 4, generator=random)
        pixels[0, 4 * wide :] = 0
        return {"pixel_values": pixels, "image_position_ids": at}, wide
    pixels = torch.randn(1, 3, 16, 16, generator=random)
    if name == "gemma3":
        return {"pixel_values": pixels}, 4
    mask = torch.ones(1, 16, 16, dtype=torch.bool)
    return {"pixel_values": pixels[None], "pixel_attention_mask": mask[None]}, 4


def trainer_inputs(
    name: str, inputs: dict[str, torch.Tensor], completion: Sequence[int] = ()
) -> dict[str, torch.Tensor]:
    """Arguments of the trainer's forward for a prompt of `picture_prompt` and its completion."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([list(completion)], dtype=torch.long)], dim=1)
    whole = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    marked = "qwen" in name or "gemma4" in name
    kind = {"gemma3": "token_type_ids"}.get(name, "mm_token_type_ids" if marked else None)
    if kind is not None:
        types = torch.zeros_like(ids)
        prompt = inputs["input_ids"]
        types[:, : prompt.shape[1]] = (prompt == IMAGE).long() + 2 * (prompt == VIDEO).long()
        whole[kind] = types
    return whole


def greedy_with_images(
    model: PreTrainedModel, name: str, inputs: dict[str, torch.Tensor], new_tokens: int
) -> list[int]:
    """`model.generate`'s greedy continuation, never stopping early; placeholders are not sampled."""
    model.eval()
    model.generation_config.eos_token_id = None
    out = model.generate(
        **trainer_inputs(name, inputs), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0,
        suppress_tokens=list(NO_MARKS),
    )  # fmt: skip
    model.train()
    if "qwen" in name:
        model.model.rope_deltas = None
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def logprobs_with_images(
    model: PreTrainedModel,
    name: str,
    inputs: dict[str, torch.Tensor],
    completion: Sequence[int],
    *,
    prompt: bool = False,
) -> torch.Tensor:
    """[len(completion)] log-probs by the trainer's own forward, fp32, with `NO_MARKS`; `prompt`: of the prompt, without."""
    model.eval()
    with torch.no_grad():
        logits = model(**trainer_inputs(name, inputs, completion), use_cache=False).logits[0].float()
    model.train()
    if "qwen" in name:
        model.model.rope_deltas = None
    if prompt:
        return logits[:-1].log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
    start = inputs["input_ids"].shape[1]
    logits[:, list(NO_MARKS)] += torch.tensor(list(NO_MARKS.values()))
    predicted = logits[start - 1 : -1].log_softmax(-1)
    return predicted.gather(1, torch.tensor(list(completion))[:, None])[:, 0]


assert VOCAB > 96

"""Tests of images in chat messages: through `RolloutManager`, `LLM` and HTTP, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from rollout import LLM, Advanced, InferenceConfig, RolloutManager, SamplingParams
from rollout.config import ServerConfig
from rollout.engine.multimodal.pictures import open_picture
from rollout.errors import InvalidRequestError
from tests.vision_models import (
    NO_MARKS,
    VIDEO,
    FramesProcessor,
    greedy_with_images,
    make_processor,
    make_qwen_processor,
    make_vision_model,
    shared_vision_model,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias=NO_MARKS)
CONFIG = InferenceConfig(kv_cache_blocks=64, advanced=Advanced(block_size_tokens=4))
RED, BLUE = (Image.new("RGB", (20, 12), color) for color in ((255, 0, 0), (0, 0, 255)))


def png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(png(picture)).decode()


def asked(*parts: Any) -> list[dict[str, Any]]:
    """One user message of texts and images, in OpenAI's form."""
    content = [
        {"type": "text", "text": part}
        if part in ("what", " and ")
        else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(shared_vision_model("gemma3"), make_processor(), CONFIG) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """`generate`'s tokens after "what", red, " and ", blue."""
    inputs = make_processor()(text=["u:what<boi> and <boi>;a:"], images=[RED, BLUE], return_tensors="pt")
    inputs.pop("token_type_ids")
    return greedy_with_images(shared_vision_model("gemma3"), "gemma3", dict(inputs), 6)


def test_every_way_of_naming_an_image_gives_the_same_prompt(llm: LLM, expected: list[int]) -> None:
    assert llm.generate(asked("what", data_url(RED), " and ", data_url(BLUE)), GREEDY)[0].generated_tokens == expected
    own = [{"type": "text", "text": "what"}, {"type": "image", "image": RED}, {"type": "text", "text": " and "}]
    messages = [{"role": "user", "content": [*own, {"type": "image", "image": png(BLUE)}]}]
    assert llm.generate([messages, messages], GREEDY)[1].generated_tokens == expected
    other = llm.generate(asked("what", data_url(BLUE), " and ", data_url(BLUE)), GREEDY)[0]
    assert torch.allclose(other.imgs[0], other.imgs[1])
    assert llm.engine.stats()["images_encoded"] == 2


def test_a_manager_reads_messages_and_what_the_processor_returned_alike(expected: list[int]) -> None:
    processor = make_processor()
    with RolloutManager(shared_vision_model("gemma3"), processor, CONFIG) as manager:
        processed = processor(text=["u:what<boi> and <boi>;a:"], images=[RED, BLUE], return_tensors="pt")
        batch = manager.generate([asked("what", data_url(RED), " and ", data_url(BLUE)), processed], GREEDY)
        assert [request.generated_tokens for request in batch] == [expected, expected]
        assert batch.texts[0] == processor.tokenizer.decode(expected, skip_special_tokens=True)
        assert manager.tokenizer is processor.tokenizer
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: messages\[0\].content\[0\]: 'http:.*is fetched"):
            manager.generate(["a", asked("http://x/y.png")], GREEDY)
        assert not manager.engine.has_unfinished


def url_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(("part", "says"), [
    ({"type": "video_url", "video_url": {"url": "x.mp4"}}, "videos in messages are not decoded; call the model's proc"),
    ({"type": "video", "video": [RED, BLUE]}, "videos in messages are not decoded"),
    ({"type": "image"}, "names 0 images, must name one"),
    ({"type": "image", "image": RED, "max_pixels": 3}, "'max_pixels' is not read here"),
    ({"type": "imgae", "image": RED}, "parts of type image_url, image, can be shown"),
    (url_part("https://x/y.png"), "nothing is fetched"),
    (url_part("/etc/passwd"), "no file is opened"),
    (url_part("data:image/png;base64,bm8gaW1hZ2U="), "8 bytes that are no image"),
    (url_part("data:image/png;base64,!!"), "base64 is damaged"),
    (url_part("data:image/png,abc"), "must be data:image"),
    (url_part(7), "int as image: must be a data: URL"),
])  # fmt: skip
def test_a_part_that_cannot_be_read_is_named_by_its_place(llm: LLM, part: dict[str, Any], says: str) -> None:
    content = [{"type": "text", "text": "what"}, part]
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\].content\[1\].*{says}"):
        llm.generate([{"role": "user", "content": content}], GREEDY)


def test_images_are_decoded_up_to_a_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.parts.controller.MAX_PROMPT_PIXELS", 500)
    with pytest.raises(InvalidRequestError, match=r"content\[3\]: images up to here have 720 pixels; 500 are decoded"):
        llm.generate(asked("what", data_url(RED), data_url(RED), data_url(RED), "none.png"), GREEDY)
    monkeypatch.setattr("rollout.engine.multimodal.pictures.MAX_PIXELS", 200)
    for source in (data_url(RED), RED):
        with pytest.raises(
            InvalidRequestError, match=r"content\[1\]: an image of 20 x 12 pixels; at most 200 are decoded"
        ):
            llm.generate(
                [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": source}]}]
            )


def test_an_image_is_turned_as_its_exif_data_says() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    RED.save(buffer, "JPEG", exif=exif)
    assert open_picture(buffer.getvalue(), "here").size == (12, 20)
    assert open_picture(RED, "here").size == (20, 12)


def test_what_a_processor_made_of_a_video_is_a_prompt() -> None:
    processor = make_qwen_processor(FramesProcessor())
    frames = torch.stack([torch.full((16, 16, 3), shade, dtype=torch.uint8) for shade in (0, 99, 180, 255)])
    inputs = processor(
        text=["u:what<boi><video><eoi>;a:"], videos=[frames], return_tensors="pt",
        video_metadata=[{"total_num_frames": 8, "fps": 4.0, "frames_indices": [0, 2, 5, 7]}],
    )  # fmt: skip
    with RolloutManager(shared_vision_model("qwen2_5_vl"), processor, CONFIG) as manager:
        batch = manager.generate([inputs], GREEDY)
        assert batch[0].prompt_tokens.count(VIDEO) == 8
        assert "pixel_values_videos" in batch.model_inputs()
    inputs["second_per_grid_ts"] = np.asarray(inputs["second_per_grid_ts"])
    given = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    expected = greedy_with_images(shared_vision_model("qwen2_5_vl"), "qwen2_5_vl", given, 6)
    assert batch[0].generated_tokens == expected


def test_an_image_that_the_processor_refuses_is_named_by_its_place() -> None:
    with (
        RolloutManager(shared_vision_model("qwen2_5_vl"), make_qwen_processor(), CONFIG) as manager,
        pytest.raises(
            InvalidRequestError, match=r"^prompts\[0\]: messages\[0\].content\[2\]: .* 400 x 1 pixels: .*ratio"
        ),
    ):
        manager.generate([asked(data_url(RED), "what", data_url(Image.new("RGB", (400, 1))))], GREEDY)


def test_an_image_needs_the_processor_and_a_model_that_sees() -> None:
    with RolloutManager(shared_vision_model("gemma3"), make_processor().tokenizer, CONFIG) as manager:
        with pytest.raises(InvalidRequestError, match="needs the model's processor: pass it as tokenizer="):
            manager.generate([asked("what", data_url(RED))], GREEDY)
        text = manager.generate([[{"role": "user", "content": "what"}]], GREEDY)
        assert len(text[0].generated_tokens) == 6


def test_a_folder_of_a_vision_model_is_loaded_with_its_processor(tmp_path: Path) -> None:
    model = make_vision_model("gemma3")
    model.save_pretrained(tmp_path)
    make_processor().save_pretrained(tmp_path)
    with LLM(tmp_path, inference_config=CONFIG) as llm:
        (sample,) = llm.generate(asked("what", data_url(RED)), GREEDY)
    assert len(sample.generated_tokens) == 6
    assert sample.imgs is not None


def test_http_takes_images_by_data_url(llm: LLM, expected: list[int]) -> None:
    server = llm.serve(ServerConfig(port=0), blocking=False)
    try:
        ask = {"model": "m", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True,
               "logit_bias": {str(token): bias for token, bias in NO_MARKS.items()}}  # fmt: skip
        with httpx.Client(base_url=server.url, timeout=120) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            body = ask | {"model": model, "messages": asked("what", data_url(RED), " and ", data_url(BLUE))}
            reply = client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == expected
            assert reply.json()["prompt_token_ids"].count(90) == 8
            refused = client.post("/v1/chat/completions", json=body | {"messages": asked("what", "http://x/y.png")})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages[0].content[1]"
            assert "nothing is fetched" in refused.json()["error"]["message"]
    finally:
        server.close()

"""Tests of videos in chat messages: through `RolloutManager`, `LLM` and HTTP, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from PIL import Image

from rollout import LLM, InferenceConfig, RolloutManager, SamplingParams
from rollout.config import ServerConfig
from rollout.errors import InvalidRequestError
from rollout.requests.videos import evenly, open_video
from tests.vision_models import (
    NO_MARKS,
    VIDEO,
    FramesProcessor,
    greedy_with_images,
    make_processor,
    make_qwen_processor,
    shared_vision_model,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias=NO_MARKS)
COLORS = [
    (0, 0, 0),
    (255, 255, 255),
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 0),
    (0, 255, 255),
    (255, 0, 255),
]
FRAMES = [Image.new("RGB", (16, 16), color) for color in COLORS]
KEPT = [0, 2, 5, 7]
"""Two frames per second of eight at four per second."""


def gif(frames: int = len(FRAMES)) -> bytes:
    buffer = io.BytesIO()
    FRAMES[0].save(buffer, "GIF", save_all=True, append_images=FRAMES[1:frames], duration=250)
    return buffer.getvalue()


def film() -> bytes:
    """A lossless film of another container and codec."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=4)
        stream.width = stream.height = 16
        stream.pix_fmt = "bgr0"
        for frame in FRAMES:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), "rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "gif") -> str:
    return f"data:video/{kind};base64," + base64.b64encode(data).decode()


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what"}, part]}]


def by_url(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("films")
    (where / "film.mkv").write_bytes(film())
    (where / "text.mp4").write_bytes(b"no video")
    FRAMES[0].save(where / "still.png")
    return where


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = InferenceConfig(kv_cache_blocks=64, block_size_tokens=4, image_folder=str(folder))
    with LLM(shared_vision_model("qwen2_5_vl"), make_qwen_processor(FramesProcessor()), config) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """`generate`'s tokens after "what" and the frames kept."""
    inputs = make_qwen_processor(FramesProcessor())(
        text=["u:what<boi><video><eoi>;a:"], videos=[np.stack([FRAMES[at] for at in KEPT])],
        video_metadata=[{"total_num_frames": 8, "fps": 4.0, "frames_indices": KEPT}], return_tensors="pt",
    )  # fmt: skip
    assert inputs["second_per_grid_ts"] == [1.0] or inputs["second_per_grid_ts"].tolist() == [1.0]
    inputs["second_per_grid_ts"] = np.asarray(inputs["second_per_grid_ts"])
    return greedy_with_images(
        shared_vision_model("qwen2_5_vl"), "qwen2_5_vl",
        {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}, 6,
    )  # fmt: skip


def test_every_way_of_naming_a_video_gives_the_same_prompt(llm: LLM, expected: list[int], folder: Path) -> None:
    kept = [FRAMES[at] for at in KEPT]
    parts = [
        by_url(data_url(gif())),
        by_url("film.mkv"),
        by_url((folder / "film.mkv").as_uri(), fps=2.0),
        {"type": "video", "video": film()},
        {"type": "video", "video": kept, "fps": 2},
        {"type": "video", "video": kept},
    ]
    for part in parts:
        sample = llm.generate(asked(part), GREEDY)[0]
        assert sample.prompt_tokens.count(VIDEO) == 8
        assert sample.generated_tokens == expected
    assert llm.engine.stats()["images_encoded"] == 1
    slower = llm.generate(asked({"type": "video", "video": kept, "fps": 1}), GREEDY)[0]
    assert slower.image_inputs["second_per_grid_ts"].tolist() == [2.0]
    every = llm.generate(asked(by_url("film.mkv", fps=4)), GREEDY)[0]
    assert every.prompt_tokens.count(VIDEO) == 16


def test_a_manager_and_http_take_videos(llm: LLM, expected: list[int]) -> None:
    config = InferenceConfig(kv_cache_blocks=64, block_size_tokens=4)
    processor = make_qwen_processor(FramesProcessor())
    with RolloutManager(shared_vision_model("qwen2_5_vl"), processor, config) as manager:
        batch = manager.generate([asked(by_url(data_url(gif())))], GREEDY)
        assert batch[0].generated_tokens == expected
        assert "pixel_values_videos" in batch.model_inputs()
    server = llm.serve(ServerConfig(port=0), blocking=False)
    try:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            body = {"model": client.get("/v1/models").json()["data"][0]["id"], "temperature": 0, "max_tokens": 6,
                    "ignore_eos": True, "return_token_ids": True,
                    "logit_bias": {str(token): bias for token, bias in NO_MARKS.items()}}  # fmt: skip
            reply = client.post("/v1/chat/completions", json=body | {"messages": asked(by_url(data_url(film())))})
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == expected
            refused = client.post("/v1/chat/completions", json=body | {"messages": asked(by_url("x.mp4", fps=-1))})
            assert refused.status_code == 400
            assert "fps" in refused.json()["error"]["param"]
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (by_url("https://x/y.mp4"), "nothing is fetched; send the video as a data: URL"),
        (by_url("../film.mkv"), "outside of InferenceConfig.image_folder"),
        (by_url("text.mp4"), "8 bytes that are no video"),
        (by_url("still.png"), "a picture that does not move: send it as an image"),
        (by_url("data:video/mp4;base64,!!"), "base64 is damaged"),
        (by_url("film.mkv", fps=0), "fps=0: must be a number of frames per second above 0"),
        (by_url("film.mkv", nframes=3), "'nframes' is not read here"),
        ({"type": "video"}, "names 0 videos, must name one"),
        ({"type": "video", "video": []}, "a video without frames"),
        ({"type": "video", "video": [FRAMES[0], FRAMES[0].resize((8, 8))]}, "frames of different sizes"),
        ({"type": "video", "video": [FRAMES[0], 7]}, "frame 1: int as image"),
        ({"type": "video", "video": 7}, "int as video: must be a data URL, a path, bytes or a list of frames"),
        ({"type": "vidoe", "video": "film.mkv"}, "parts of type image_url, image, video_url, video"),
    ],
)
def test_a_video_that_cannot_be_read_is_named_by_its_place(llm: LLM, part: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\].content\[1\].*{says}"):
        llm.generate(asked(part), GREEDY)


def test_images_and_videos_of_a_prompt_are_decoded_up_to_a_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.controller.MAX_PROMPT_PIXELS", 1500)
    parts = [{"type": "image", "image": FRAMES[0]}, {"type": "video", "video": FRAMES[:4]}, by_url("no such file")]
    (message,) = asked(parts[0])
    with pytest.raises(InvalidRequestError, match=r"content\[2\]: 'no such file': cannot be read"):
        llm.generate([{**message, "content": [*message["content"], parts[2]]}], GREEDY)
    with pytest.raises(
        InvalidRequestError, match=r"content\[3\]: images and videos up to here have 2,304 pixels; 1,500"
    ):
        llm.generate([{**message, "content": [*message["content"], parts[1], parts[1], parts[2]]}], GREEDY)


def test_what_a_processor_raises_while_it_chooses_frames_is_not_taken_for_a_damaged_video() -> None:
    class Choosy(FramesProcessor):
        do_sample_frames = True

        def sample_frames(self, metadata: Any) -> list[int]:
            if metadata.total_num_frames > 4:
                raise KeyError("num_frames")
            return []

    config = InferenceConfig(kv_cache_blocks=64, block_size_tokens=4)
    with RolloutManager(shared_vision_model("qwen2_5_vl"), make_qwen_processor(Choosy()), config) as manager:
        for source, says in (
            (gif(), r"Choosy chooses no frames of 8 at 4 per second \(KeyError: 'num_frames'\); say .* \(fps\)"),
            (gif(3), "none of the 3 frames was chosen"),
        ):
            with pytest.raises(InvalidRequestError, match=rf"messages\[0\].content\[1\]: {says}"):
                manager.generate([asked({"type": "video", "video": source})], GREEDY)


def test_a_video_needs_a_video_processor_and_a_model_that_takes_it() -> None:
    config = InferenceConfig(kv_cache_blocks=64, block_size_tokens=4)
    part = {"type": "video", "video": FRAMES}
    for name, processor, says in (
        ("qwen2_5_vl", make_qwen_processor(), "has none: install torchvision and load it again"),
        ("gemma3", make_processor(), "Gemma3ForConditionalGeneration is not served; send frames as images"),
    ):
        with (
            RolloutManager(shared_vision_model(name), processor, config) as manager,
            pytest.raises(InvalidRequestError, match=says),
        ):
            manager.generate([asked(part)], GREEDY)


def test_frames_are_chosen_by_the_processor_and_a_video_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evenly(8, 4.0, 2.0) == KEPT
    assert evenly(3, 30.0, 1.0) == [0, 1, 2], "no more than there are"
    assert len(evenly(10**5, 1.0, 30.0)) == 768
    assert evenly(8, 4.0, 1e308) == list(range(8))
    clip = open_video(film(), None, "here", None, lambda total, fps: [6, 1, 1, 99] if (total, fps) == (8, 4.0) else [])
    assert clip.indices == [1, 6]
    assert [tuple(frame[0, 0].tolist()) for frame in clip.frames] == [COLORS[1], COLORS[6]]
    monkeypatch.setattr("rollout.requests.videos.MAX_VIDEO_PIXELS", 1000)
    with pytest.raises(InvalidRequestError, match="here: 4 frames of 256 pixels; 1,000 are decoded at most"):
        open_video(film(), None, "here", 2.0, lambda total, fps: [])
    with pytest.raises(
        InvalidRequestError, match="here: an animated picture of at least 4 frames of 256 pixels; 4,096 fr"
    ):
        open_video(gif(), None, "here", 2.0, lambda total, fps: [])
    with pytest.raises(InvalidRequestError, match="here: 4 frames of 256 pixels; 1,000 are decoded at most"):
        # The others are not decoded first: all together they may not fit into memory.
        open_video([FRAMES[0], *[b"no picture"] * 3], None, "here", None, lambda total, fps: [])

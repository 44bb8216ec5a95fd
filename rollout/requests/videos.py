"""Opens the videos of chat messages: lists of frames, animated pictures by Pillow, any other by PyAV. Nothing is fetched."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError, InvalidRequestError
from rollout.requests.pictures import MAX_PIXELS, image_module, open_picture, read_source

FPS = 2.0
"""Frames per second of a list of frames that does not say, and sampled where the processor does not say."""
MIN_FRAMES, MAX_FRAMES = 4, 768
"""Frames sampled of a video, if it has as many."""
MAX_LENGTH = 1 << 16
"""Frames of the longest video that is decoded."""
MAX_ANIMATED_LENGTH = 1 << 12
"""Frames of the longest animated picture, of which every frame is decoded before it is known how long they are shown."""
MAX_VIDEO_PIXELS = 1 << 28
"""Width times height times number of the frames that are kept of a video."""

Choose = Callable[[int, float], Sequence[int]]
"""The frames to keep, ascending, of (number of frames, frames per second)."""


@dataclass(frozen=True, eq=False)
class Clip:
    """The frames kept of a video.

    Attributes:
        frames: uint8 [F, height, width, 3], RGB.
        indices: their numbers in the video.
        total: frames of the video.
        fps: its frames per second.
    """

    frames: NDArray[np.uint8]
    indices: list[int]
    total: int
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """What video processors of transformers take as `video_metadata`."""
        return {
            "total_num_frames": self.total, "fps": self.fps, "duration": self.total / self.fps,
            "frames_indices": list(self.indices), "height": self.frames.shape[1], "width": self.frames.shape[2],
        }  # fmt: skip


def open_video(source: Any, folder: str | None, where: str, fps: float | None, choose: Choose) -> Clip:
    """Decode a video and keep the frames that are sampled.

    Args:
        source: a list of frames, each as `open_picture` takes it; bytes of a video file, a data URL, or a path.
        folder: the folder that files may be read from; None: none may.
        where: begins the message of an error.
        fps: of a list, which is kept whole, the frames per second it was taken at (None: `FPS`); else of the frames kept.
        choose: the frames kept where `fps` is None.

    Raises:
        InvalidRequestError: it is none of these, is not allowed, cannot be decoded, or is too large.
        ConfigError: Pillow or PyAV is needed and not installed.
    """
    if isinstance(source, list | tuple):
        return _of_frames(source, folder, where, FPS if fps is None else fps)
    data = source if isinstance(source, bytes) else read_source(source, folder, where, "video")
    try:
        with _opened(data, where) as video:
            return _sampled(video, where, choose if fps is None else lambda total, rate: evenly(total, rate, fps))
    except (InvalidRequestError, ConfigError):
        raise
    # Decoders raise nearly anything for a damaged file.
    except Exception as exc:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes that are no video ({type(exc).__name__}: {exc})"
        ) from exc


def evenly(total: int, rate: float, fps: float) -> list[int]:
    """Numbers of `fps` frames per second of a video of `total` frames at `rate` frames per second, at even distances."""
    wanted = math.ceil(min(total / rate * fps, MAX_FRAMES))
    count = min(max(wanted, MIN_FRAMES), total)
    chosen: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return chosen


@dataclass(frozen=True, eq=False)
class _Video:
    """An opened video: its number of frames, frames per second, size, and a decoder from the first frame on."""

    total: int
    fps: float
    pixels: int
    decode: Callable[[], Iterator[Callable[[], NDArray[np.uint8]]]]
    """Each frame as a function that converts it, so that frames that are passed over are not converted."""


def _of_frames(source: Sequence[Any], folder: str | None, where: str, fps: float) -> Clip:
    if not source:
        raise InvalidRequestError(f"{where}: a video without frames")
    if len(source) > MAX_FRAMES:
        raise InvalidRequestError(f"{where}: a video of {len(source)} frames; a list may have {MAX_FRAMES}: send fewer")
    first, frames = None, []
    for index, each in enumerate(source):
        picture = open_picture(each, folder, f"{where} frame {index}")
        first = first or picture.size
        if picture.size != first:
            raise InvalidRequestError(
                f"{where}: frames of different sizes {sorted({first, picture.size})}: all must have one size"
            )
        # Before the others are decoded: a file of a few kilobytes may hold a frame of hundreds of megabytes.
        _check_pixels(picture.width * picture.height, len(source), where)
        frames.append(np.asarray(picture, dtype=np.uint8))
    return Clip(np.stack(frames), list(range(len(frames))), len(frames), fps)


def _sampled(video: _Video, where: str, choose: Choose) -> Clip:
    if not 0 < video.total <= MAX_LENGTH or not 0 < video.fps < math.inf:
        raise InvalidRequestError(
            f"{where}: a video of {video.total} frames at {video.fps} per second; 1 to {MAX_LENGTH} frames are decoded"
        )
    chosen = sorted({index for index in choose(video.total, video.fps) if 0 <= index < video.total})
    if not chosen:
        raise InvalidRequestError(
            f"{where}: none of the {video.total} frames was chosen; say how many per second (fps)"
        )
    _check_pixels(video.pixels, len(chosen), where)
    wanted, frames, indices = set(chosen), [], []
    for index, convert in enumerate(islice(video.decode(), chosen[-1] + 1)):
        if index in wanted:
            frame = convert()
            # A stream may not have the size that its header says.
            _check_pixels(frame.shape[0] * frame.shape[1], len(chosen), where)
            frames.append(frame)
            indices.append(index)
    if not frames:
        raise InvalidRequestError(f"{where}: a video none of whose frames can be decoded")
    return Clip(np.stack(frames), indices, video.total, video.fps)


def _check_pixels(pixels: int, count: int, where: str) -> None:
    if pixels > MAX_PIXELS or pixels * count > MAX_VIDEO_PIXELS:
        raise InvalidRequestError(
            f"{where}: {count} frames of {pixels:,} pixels; {MAX_VIDEO_PIXELS:,} are decoded at most: send a smaller video, "
            "or fewer frames per second (fps)"
        )


@contextmanager
def _opened(data: bytes, where: str) -> Iterator[_Video]:
    try:
        picture = image_module().open(io.BytesIO(data))
    except OSError:
        with _opened_by_av(data, where) as video:
            yield video
        return
    with picture:
        pixels = picture.width * picture.height
        _check_pixels(pixels, 1, where)
        total, milliseconds = _shown(picture, pixels, where)
        if total == 1:
            raise InvalidRequestError(f"{where}: a picture that does not move: send it as an image")

        def decode() -> Iterator[Callable[[], NDArray[np.uint8]]]:
            for index in range(total):
                picture.seek(index)
                yield lambda: np.asarray(picture.convert("RGB"), dtype=np.uint8)

        yield _Video(total, 1000 * total / max(milliseconds, 1), pixels, decode)


def _shown(picture: Any, pixels: int, where: str) -> tuple[int, float]:
    """Frames of an animated picture, and the milliseconds they are shown."""
    total, milliseconds = 0, 0.0
    with suppress(EOFError):
        while True:
            picture.seek(total)
            total, milliseconds = total + 1, milliseconds + float(picture.info.get("duration") or 100)
            if total > MAX_ANIMATED_LENGTH or total * pixels > MAX_VIDEO_PIXELS:
                raise InvalidRequestError(
                    f"{where}: an animated picture of at least {total} frames of {pixels:,} pixels; {MAX_ANIMATED_LENGTH:,} "
                    f"frames and {MAX_VIDEO_PIXELS:,} pixels are decoded at most: send a video file, or a list of frames"
                )
    return total, milliseconds


@contextmanager
def _opened_by_av(data: bytes, where: str) -> Iterator[_Video]:
    try:
        import av
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"{where}: a video that is no list of frames and no animated picture needs PyAV: pip install "
            "'rollout-engine[video]'"
        ) from exc
    with av.open(io.BytesIO(data)) as container:
        if not container.streams.video:
            raise InvalidRequestError(f"{where}: a file without a video stream")
        stream = container.streams.video[0]
        # Counted, since headers may not say, or say what is not so.
        total = sum(packet.size > 0 for packet in islice(container.demux(stream), MAX_LENGTH + 2))

        def decode() -> Iterator[Callable[[], NDArray[np.uint8]]]:
            container.seek(0)
            for frame in container.decode(stream):
                yield lambda frame=frame: frame.to_ndarray(format="rgb24")  # type: ignore[misc]

        rate = float(stream.average_rate or stream.guessed_rate or 0)
        yield _Video(total, rate, stream.width * stream.height, decode)

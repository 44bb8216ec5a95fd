"""Opens the images of chat messages: data URLs, bytes, images of Pillow, and files of one folder. Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import io
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rollout.errors import ConfigError, InvalidRequestError

MAX_PIXELS = 1 << 26
"""Width times height of the largest image that is decoded."""
MAX_PROMPT_PIXELS = 1 << 29
"""Of all images and frames of one prompt together: files of a few kilobytes may decode to hundreds of megabytes each."""


def open_picture(source: Any, folder: str | None, where: str) -> Any:
    """A `PIL.Image.Image` in RGB.

    Args:
        source: an image of Pillow, bytes of an image file, a data URL, or a path (also as a `file:` URL).
        folder: the folder that files may be read from; None: none may.
        where: begins the message of an error.

    Raises:
        InvalidRequestError: it is none of these, is not allowed, is no image, or is too large.
        ConfigError: Pillow is not installed.
    """
    pillow = image_module()
    if isinstance(source, pillow.Image):
        return source.convert("RGB")
    data = source if isinstance(source, bytes) else read_source(source, folder, where)
    try:
        with pillow.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise InvalidRequestError(
                    f"{where}: an image of {picture.width} x {picture.height} pixels; at most {MAX_PIXELS:,} are decoded"
                )
            return picture.convert("RGB")
    except InvalidRequestError:
        raise
    # Pillow raises nearly anything for a damaged file.
    except Exception as exc:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes that are no image ({type(exc).__name__}: {exc})"
        ) from exc


def image_module() -> Any:
    """The module `PIL.Image`.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise ConfigError("images in messages need Pillow: pip install 'rollout-engine[vision]'") from exc
    return Image


def read_source(source: Any, folder: str | None, where: str, what: str = "image") -> bytes:
    """Bytes of a data URL, or of a file in `folder`.

    Args:
        what: "image" or "video", for the messages of errors.

    Raises:
        InvalidRequestError: it is neither, or is not allowed.
    """
    if not isinstance(source, str | PathLike):
        own = "bytes or an image of Pillow" if what == "image" else "bytes or a list of frames"
        raise InvalidRequestError(f"{where}: {type(source).__name__} as {what}: must be a data URL, a path, {own}")
    text = fspath(source)
    if isinstance(source, str) and text.startswith("data:"):
        return _decoded(text, where, what)
    parts = urlsplit(text)
    if isinstance(source, str) and parts.scheme not in ("", "file"):
        raise InvalidRequestError(f"{where}: {text!r:.60}: nothing is fetched; send the {what} as a data: URL")
    if folder is None:
        raise InvalidRequestError(
            f"{where}: {text!r:.60}: files are read only from InferenceConfig.image_folder, which is not set; send a data: "
            "URL"
        )
    root = Path(folder).resolve()
    path = (root / (unquote(parts.path) if parts.scheme == "file" else text)).resolve()
    if not path.is_relative_to(root):
        raise InvalidRequestError(f"{where}: {text!r:.60}: outside of InferenceConfig.image_folder")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as exc:
        raise InvalidRequestError(f"{where}: {text!r:.60}: cannot be read ({type(exc).__name__})") from exc


def _decoded(url: str, where: str, what: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequestError(f"{where}: {url!r:.40}: must be data:{what}/…;base64,…")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"{where}: {url!r:.40}: its base64 is damaged ({exc})") from exc

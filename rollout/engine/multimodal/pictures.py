"""Opens the images of chat messages: images of Pillow, bytes, data URLs, and files of one folder. Nothing is fetched."""

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
"""Maximum pixels of all images of one prompt: files of a few kilobytes may decode to hundreds of megabytes each."""


def open_picture(source: Any, folder: str | None, where: str) -> Any:
    """Return a `PIL.Image.Image` in RGB, as `transformers.image_utils.load_image` does.

    Args:
        source: an image of Pillow, bytes of an image file, a data URL, or a path (also as a `file:` URL).
        folder: the folder that files may be read from; None: no files.
        where: start of error messages.

    Raises:
        InvalidRequestError: it is none of these, is not allowed, is not an image, or is too large.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise ConfigError("images in messages need Pillow: pip install 'rollout-engine[vision]'") from exc
    from transformers.image_utils import load_image

    still = isinstance(source, Image.Image)
    data = b"" if still else _bytes_of(source, folder, where)
    try:
        picture = source if still else Image.open(io.BytesIO(data))
        # Checked before anything is decoded.
        if picture.width * picture.height > MAX_PIXELS:
            raise InvalidRequestError(
                f"{where}: an image of {picture.width} x {picture.height} pixels; at most {MAX_PIXELS:,} are decoded: send "
                "a smaller one"
            )
        return load_image(picture)
    except InvalidRequestError:
        raise
    # Pillow raises nearly any exception for a damaged file.
    except Exception as exc:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes that are no image ({type(exc).__name__}: {exc})"
        ) from exc


def _bytes_of(source: Any, folder: str | None, where: str) -> bytes:
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str | PathLike):
        raise InvalidRequestError(
            f"{where}: {type(source).__name__} as image: must be a data URL, a path, bytes or an image of Pillow"
        )
    text = fspath(source)
    url = isinstance(source, str)
    if url and text.startswith("data:"):
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidRequestError(f"{where}: {text!r:.40}: must be data:image/…;base64,…")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise InvalidRequestError(f"{where}: {text!r:.40}: its base64 is damaged ({exc})") from exc
    parts = urlsplit(text)
    if url and parts.scheme not in ("", "file"):
        raise InvalidRequestError(f"{where}: {text!r:.60}: nothing is fetched; send the image as a data: URL")
    if folder is None:
        raise InvalidRequestError(
            f"{where}: {text!r:.60}: files are read only from Advanced.image_folder, which is not set; send a data: URL"
        )
    root = Path(folder).resolve()
    path = (root / (unquote(parts.path) if parts.scheme == "file" else text)).resolve()
    if not path.is_relative_to(root):
        raise InvalidRequestError(f"{where}: {text!r:.60}: outside of Advanced.image_folder")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as exc:
        raise InvalidRequestError(f"{where}: {text!r:.60}: cannot be read ({type(exc).__name__})") from exc

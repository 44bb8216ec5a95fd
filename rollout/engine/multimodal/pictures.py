"""Opens the images in chat messages: Pillow images, bytes and data URLs. Nothing is fetched, and no file is opened."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

from rollout.errors import ConfigError, InvalidRequestError

MAX_PIXELS = 1 << 26
"""The maximum number of pixels of one image."""
MAX_PROMPT_PIXELS = 1 << 29
"""The maximum number of pixels of all images in a prompt. A file of a few kilobytes may decode to hundreds of megabytes."""


def open_picture(source: Any, where: str) -> Any:
    """Return a `PIL.Image.Image` in RGB, as `transformers.image_utils.load_image` does.

    Args:
        source: a Pillow image, the bytes of an image file, or a data URL.
        where: text at the start of error messages, which says where the image was found.

    Raises:
        InvalidRequestError: `source` has another type, contains no image, or contains an image that is too large.
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as exc:
        raise ConfigError("images in messages need Pillow: pip install 'rollout-engine[vision]'") from exc
    from transformers.image_utils import load_image

    still = isinstance(source, Image.Image)
    data = b"" if still else _bytes_of(source, where)
    try:
        picture = source if still else Image.open(io.BytesIO(data))
        # Check the size before decoding: an image of a few bytes may decode to gigabytes.
        if picture.width * picture.height > MAX_PIXELS:
            raise InvalidRequestError(
                f"{where}: an image of {picture.width} x {picture.height} pixels; at most {MAX_PIXELS:,} are decoded: send "
                "a smaller one"
            )
        return load_image(picture)
    except InvalidRequestError:
        raise
    # Catch every exception: Pillow may raise nearly any of them for a damaged file.
    except Exception as exc:
        raise InvalidRequestError(
            f"{where}: {len(data)} bytes that are no image ({type(exc).__name__}: {exc})"
        ) from exc


def _bytes_of(source: Any, where: str) -> bytes:
    if isinstance(source, bytes):
        return source
    head, _, body = source.partition(",") if isinstance(source, str) else ("", "", "")
    if not head.startswith("data:"):
        shown = f"{source!r:.60}" if isinstance(source, str) else type(source).__name__
        raise InvalidRequestError(
            f"{where}: {shown} as image: must be a data: URL, bytes of an image file or an image of Pillow; nothing is "
            "fetched, and no file is opened"
        )
    if not head.endswith(";base64"):
        raise InvalidRequestError(f"{where}: {source!r:.40}: must be data:image/…;base64,…")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(f"{where}: {source!r:.40}: its base64 is damaged ({exc})") from exc

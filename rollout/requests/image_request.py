"""Requests with images beside them: made of requests without, and encoded with the images of a prompt once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from rollout.requests.codec import TENSORS
from rollout.requests.images import PIXELS, ImageInputs
from rollout.requests.request import REQUEST, DynamicInferenceRequest, VLMInferenceRequest


def with_images(request: DynamicInferenceRequest, images: ImageInputs | None) -> DynamicInferenceRequest:
    """The same request with images; itself if there are none."""
    if images is None:
        return request
    tensors = dict(images.tensors)
    values = {each.name: getattr(request, each.name) for each in fields(request) if each.init}
    return VLMInferenceRequest(**values, imgs=tensors.pop(PIXELS, None), image_inputs=tensors)


def told_once(requests: Iterable[DynamicInferenceRequest]) -> dict[str, Any]:
    """Plain values of requests; images that they share are among them once."""
    plain: list[Any] = []
    images: list[Any] = []
    # The requests keep the tensors alive.
    places: dict[tuple[int, ...], int] = {}
    for request in requests:
        if not isinstance(request, VLMInferenceRequest) or (own := request.images) is None:
            plain.append([REQUEST.encode(request), None])
            continue
        place = places.setdefault(tuple(id(each) for each in own.tensors.values()), len(images))
        if place == len(images):
            images.append(TENSORS.encode(dict(own.tensors)))
        bare = copy.copy(request)
        bare.imgs, bare.image_inputs = None, {}
        plain.append([REQUEST.encode(bare), place])
    return {"results": plain, "images": images}


def results_of(told: Mapping[str, Any]) -> list[DynamicInferenceRequest]:
    """The inverse of `told_once`; requests that shared images share them again.

    Raises:
        SerializationError: a request or its images are malformed.
    """
    images = [TENSORS.decode(each) for each in told["images"]]
    results = []
    for plain, place in told["results"]:
        result = REQUEST.decode(plain)
        if place is not None and isinstance(result, VLMInferenceRequest):
            result.image_inputs = dict(images[place])
            result.imgs = result.image_inputs.pop(PIXELS, None)
        results.append(result)
    return results

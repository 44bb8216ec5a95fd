"""Requests with images, made of requests without: what travels between ranks has them beside."""

from __future__ import annotations

from dataclasses import fields

from rollout.requests.images import PIXELS, ImageInputs
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest


def with_images(request: DynamicInferenceRequest, images: ImageInputs | None) -> DynamicInferenceRequest:
    """The same request with images; itself if there are none."""
    if images is None:
        return request
    tensors = dict(images.tensors)
    values = {each.name: getattr(request, each.name) for each in fields(request) if each.init}
    return VLMInferenceRequest(**values, imgs=tensors.pop(PIXELS, None), image_inputs=tensors)

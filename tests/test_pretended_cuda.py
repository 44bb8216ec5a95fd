"""Tests that the pretended CUDA device refuses what a device refuses, and that its graphs do again what they recorded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.pretended_cuda import graphs
from tests.pretended_cuda.interpreted import _narrowed, _widened
from tests.pretended_cuda.mode import CUDA, PretendedCuda


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with PretendedCuda(graphs.capturing, graphs.refuse):
        yield


def test_results_of_its_tensors_are_on_it_and_copies_to_the_host_are_not() -> None:
    number = torch.zeros(3, device="cuda")
    assert {each.device for each in (number, number + 1, number[1:], number.data, torch.nn.Parameter(number))} == {CUDA}
    assert torch.ones(3).to("cuda").is_cuda
    assert number.double().is_cuda
    host = torch.ones(3)
    assert not host.is_cuda
    assert not number.cpu().is_cuda
    number.copy_(host)
    assert not host.is_cuda
    assert number.cpu().tolist() == [1, 1, 1]


def test_what_a_module_computes_and_its_gradients_are_on_it() -> None:
    module = torch.nn.Linear(2, 3).to("cuda")
    module(torch.ones(1, 2, device=CUDA)).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_cuda
    assert module.bias.device == CUDA


def test_operands_on_two_devices_and_arrays_are_refused() -> None:
    number = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="two devices"):
        number + torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.cat([number, torch.ones(3)])
    assert (number + torch.tensor(1.0)).is_cuda, "a number is no operand"
    with pytest.raises(TypeError, match="to numpy"):
        number.numpy()
    with pytest.raises(RuntimeError, match="pin"):
        number.pin_memory()


def test_a_graph_does_again_what_it_recorded_at_the_same_addresses() -> None:
    graph, source = graphs.CUDAGraph(), torch.zeros(3, device="cuda")
    graph.capture_begin()
    first, second = (source * 2).split([1, 2])
    out = torch.cat([first, second + 1])
    graph.capture_end()
    address = out.data_ptr()
    for number in (1.0, 5.0):
        source.fill_(number)
        graph.replay()
        assert out.cpu().tolist() == [2 * number, 2 * number + 1, 2 * number + 1]
    assert out.data_ptr() == address


@pytest.mark.parametrize(
    "work",
    [
        lambda on, host: on.sum().item(),
        lambda on, host: on[on > 0],
        lambda on, host: on.cpu(),
        lambda on, host: on.copy_(host),
        lambda on, host: host.to("cuda"),
    ],
    ids=["item", "mask", "cpu", "copy", "to"],
)
def test_a_capture_is_invalid_once_it_waited_for_the_device_or_copied_memory_that_is_not_pinned(work: object) -> None:
    on, host, graph = torch.zeros(3, device="cuda"), torch.ones(3), graphs.CUDAGraph()
    assert callable(work)
    work(on, host)
    graph.capture_begin()
    try:
        on.copy_(host.pin_memory())
        with pytest.raises(RuntimeError, match="not permitted"):
            work(on, host)
    finally:
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()
    assert not graphs.capturing()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.pool()


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    numbers = torch.cat(
        [torch.randn(1000) * 10.0 ** torch.arange(1000).sub(500).div(15), torch.tensor([0.0, torch.inf])]
    )
    bits = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(_narrowed(numbers.numpy()), bits)
    assert np.array_equal(_widened(bits), numbers.bfloat16().float().numpy())

"""A CUDA device that is pretended on the CPU, for the lines of Python that otherwise only a GPU runs.

    python -m tests.gpu_first_run env kernels --rehearse
    TRITON_INTERPRET=1 pytest -p tests.pretended_cuda.plugin -m gpu tests/engine/graphs/test_cuda_capture.py

Tensors made for the device lie in host memory and say that they are on `cuda:0`; Triton's kernels are interpreted; a graph
records the operations of torch and the launches, and does them again, at the same addresses. What a device refuses is
refused: operands on two devices, host memory in a launch, an array of a device's tensor, and, while a graph is captured,
waiting for the device and copies from memory that is not pinned. Nothing is asynchronous, and memory has no end.
"""

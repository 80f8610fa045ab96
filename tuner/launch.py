"""Running a compiled source on the GPU: loading the cubin into torch's context and launching its kernels on torch's stream.

Only for a worker process: a faulty kernel poisons the process's CUDA context.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from codegen.reference import parameter_shapes, torch_dtype
from codegen.render import Source
from codegen.terms import term_dtype, term_shapes

_GUARD = 2048  # elements between two tensors of an arena: at least 4 KB, and a multiple of every alignment a kernel may ask for
_STATIC_SHARED = 48 * 1024
_FAULTS = {  # sticky errors: the context is lost (CUDA driver API, CUresult)
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_ASSERT",
}  # fmt: skip


class LaunchError(RuntimeError):
    """A driver call failed. `fault`: the context is lost, a kernel did something it must not."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what}: {name}")
        self.fault = name in _FAULTS


class MemoryFault(RuntimeError):
    """A kernel wrote where it must not, within memory the process owns, so that the hardware did not notice."""


class Loaded:
    """A cubin in torch's current context. Call it as a verification runner: x, weights -> y.

    Raises LaunchError when a kernel cannot be loaded or launched, MemoryFault when one writes outside its output.
    """

    def __init__(self, source: Source, cubin: bytes) -> None:
        self.spec, self.kernels, self._buffers = source.spec, source.kernels, source.buffers
        torch.cuda.current_stream()  # torch's context exists and is current in this thread
        torch.empty(1, device="cuda")
        self._module = _check(driver.cuModuleLoadData(cubin), "loading the compiled code")
        self._functions: list[Any] = []
        try:
            for kernel in self.kernels:
                function = _check(driver.cuModuleGetFunction(self._module, kernel.name.encode()), f"finding {kernel.name}")
                if kernel.shared_bytes > _STATIC_SHARED:
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    what = f"asking for {kernel.shared_bytes} bytes of shared memory"
                    _check(driver.cuFuncSetAttribute(function, attribute, kernel.shared_bytes), what)
                self._functions.append(function)
        except BaseException:
            self.unload()
            raise

    def unload(self) -> None:
        """Frees the code. No kernel of it may be running or in a graph that is still used."""
        if self._module is not None:
            driver.cuModuleUnload(self._module)
            self._module = None

    def bind(self, x: Tensor, weights: Mapping[str, Tensor], y: Tensor, scratch: Mapping[str, Tensor] | None = None) -> Callable[..., None]:
        """A forward that reads x and writes y, on whatever stream is torch's current when it is called; forward(i) launches the i-th
        of its kernels alone.

        All of the block's element type, contiguous, on the GPU: x and y (batch, height, width, dim), weights by the block's
        parameter names, scratch buffers by theirs (allocated here if None). With the weights come the terms of the block's logits, if it
        has any: see codegen/terms.py.
        """
        dtype = torch_dtype(self.spec)
        tensors = [(t, dtype) for t in (x, y, *(weights[name] for name in parameter_shapes(self.spec)))]
        tensors += [(weights[name], term_dtype(self.spec, name)) for name in term_shapes(self.spec, x.shape[0])]
        if not all(t.is_cuda and t.is_contiguous() and t.dtype == wanted for t, wanted in tensors):
            raise ValueError(f"x, y and weights must be contiguous {self.spec.dtype} CUDA tensors, and a key mask of bool")
        if scratch is None:
            scratch = {name: torch.empty(n, device=x.device, dtype=dtype) for name, n in self._buffers(x.shape[0]).items()}
        named = {"x": x, "y": y, **weights, **scratch}
        launches = [self._launch(index, named) for index in range(len(self.kernels))] if x.shape[0] else []

        def forward(only: int | None = None) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for config, function, parameters, name, _ in launches if only is None else launches[only : only + 1]:
                config.hStream = stream
                _check(driver.cuLaunchKernelEx(config, function, parameters, 0), f"launching {name}")

        forward.tensors = named  # type: ignore[attr-defined]  # they live as long as the pointers to them
        return forward

    def _launch(self, index: int, named: Mapping[str, Tensor]) -> tuple[Any, Any, int, str, Any]:
        kernel, batch = self.kernels[index], named["x"].shape[0]
        config = driver.CUlaunchConfig()
        config.gridDimX = kernel.blocks(self.spec, batch)
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = kernel.threads
        config.sharedMemBytes = kernel.shared_bytes
        if kernel.dependent_launch:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        pointers = [named[kernel.tensor(self.spec, name)].data_ptr() for name in kernel.arguments]
        values = [*map(ctypes.c_void_p, pointers), ctypes.c_int(kernel.count(self.spec, batch))]
        array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        return config, self._functions[index], ctypes.addressof(array), kernel.name, (array, values)

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """One forward in an arena of NaN: what is not written stays NaN, what is read outside a tensor is NaN, and a write
        outside y is found."""
        terms = term_shapes(self.spec, x.shape[0])
        used = {"x": x, **{name: weights[name] for name in (*parameter_shapes(self.spec), *terms)}}
        shapes = {name: tuple(t.shape) for name, t in used.items()} | {"y": tuple(x.shape)}
        shapes |= {name: (elements,) for name, elements in self._buffers(x.shape[0]).items()}
        sizes = {name: -(-math.prod(shape) // _GUARD) * _GUARD + _GUARD for name, shape in shapes.items()}  # a mask's is larger than needed
        arena = torch.full((_GUARD + sum(sizes.values()),), float("nan"), device="cuda", dtype=torch_dtype(self.spec))
        offset, views = _GUARD, {}
        for name, shape in shapes.items():
            place = arena[offset : offset + sizes[name] - _GUARD]
            if name in terms:
                place = place.view(term_dtype(self.spec, name))
            views[name] = place[: math.prod(shape)].view(shape)
            offset += sizes[name]
        for name, tensor in used.items():
            views[name].copy_(tensor)
        before, y = arena.clone(), views["y"]
        scratch = {name: views[name] for name in self._buffers(x.shape[0])}
        self.bind(views["x"], views, y, scratch)()
        torch.cuda.synchronize()
        result = y.clone()
        for written in (y, *scratch.values()):
            written.fill_(float("nan"))
        if not torch.equal(arena.view(torch.int32), before.view(torch.int32)):  # bits, as NaN is not equal to itself
            raise MemoryFault("a kernel wrote outside its output")
        return result.to(x.device)


def _check(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call's (status, value...); LaunchError when the status is not success."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(what, status.name)
    return values[0] if values else None

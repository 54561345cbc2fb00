"""Known work on one card, through libcuda alone: `python work.py hold|spin|busy|copy BYTES`.

Says "ready" once it is at it, and goes on until its standard input ends; then it says in one JSON line how much it did.
What fails is said instead, with exit 4.  CUDA_VISIBLE_DEVICES chooses the card.

hold: memory and nothing else.  spin: a kernel that only waits, as one that waits for the other ranks of a collective.
busy: a kernel that computes on every multiprocessor.  copy: from pinned memory of the host to the card.
"""

from __future__ import annotations

import ctypes
import json
import select
import sys
import time

PIECE = 256 << 20
KERNEL_SECONDS = 0.25

PTX = """
.version 6.0
.target sm_60
.address_size 64
.visible .entry work(.param .u64 nanoseconds, .param .u64 out)
{{
    .reg .u64 %rd<6>;
    .reg .f32 %f<4>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [nanoseconds];
    ld.param.u64 %rd5, [out];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd3, %rd2, %rd1;
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F7FFFFF;
    mov.f32 %f3, 0f33800000;
AGAIN:
{body}
    mov.u64 %rd4, %globaltimer;
    setp.lt.u64 %p1, %rd4, %rd3;
    @%p1 bra AGAIN;
    st.global.f32 [%rd5], %f1;
    ret;
}}
"""
SHAPES = {"spin": (0, 16, 256), "busy": (512, 2048, 256)}
"""Kind -> multiplications between two looks at the clock, blocks, threads of a block."""


class FailedError(Exception):
    """A call of libcuda said no."""


class Cuda:
    """The primary context of the first card that is visible."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise FailedError("there is no libcuda.so.1") from error
        self.call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise FailedError(f"{name} said {code}")

    def memory(self, size: int) -> ctypes.c_uint64:
        """Of the card, written once so that it is really there."""
        place = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", place, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self.wait()
        return place

    def pinned(self, size: int) -> ctypes.c_void_p:
        """Of the host."""
        place = ctypes.c_void_p()
        self.call("cuMemAllocHost_v2", ctypes.byref(place), ctypes.c_size_t(size))
        ctypes.memset(place, 1, size)
        return place

    def kernel(self, multiplications: int) -> ctypes.c_void_p:
        body = "    fma.rn.f32 %f1, %f1, %f2, %f3;\n" * multiplications
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX.format(body=body).encode()))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"work"))
        return function

    def launch(self, function: ctypes.c_void_p, blocks: int, threads: int, out: ctypes.c_uint64) -> None:
        duration = ctypes.c_uint64(int(KERNEL_SECONDS * 1e9))
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in (duration, out)))
        shape = [ctypes.c_uint(number) for number in (blocks, 1, 1, threads, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *shape, ctypes.c_void_p(), parameters, ctypes.c_void_p())
        self.wait()

    def wait(self) -> None:
        self.call("cuCtxSynchronize")


def is_over(seconds: float = 0.0) -> bool:
    """Whether standard input ended, waited for so long."""
    return bool(select.select([0], [], [], seconds)[0])


def ready() -> float:
    print("ready", flush=True)
    return time.monotonic()


def hold(cuda: Cuda, size: int) -> int:
    cuda.memory(size)
    ready()
    while not is_over(1.0):
        pass
    return 0


def compute(cuda: Cuda, kind: str) -> int:
    multiplications, blocks, threads = SHAPES[kind]
    function, out = cuda.kernel(multiplications), cuda.memory(4096)
    cuda.launch(function, blocks, threads, out)
    ready()
    while not is_over():
        cuda.launch(function, blocks, threads, out)
    return 0


def copy(cuda: Cuda, size: int) -> int:
    """Bytes copied since it was ready."""
    size = min(size, PIECE)
    source, target, moved = cuda.pinned(size), cuda.memory(size), 0
    ready()
    while not is_over():
        cuda.call("cuMemcpyHtoD_v2", target, source, ctypes.c_size_t(size))
        moved += size
    return moved


def main() -> None:
    kind, size = sys.argv[1], int(sys.argv[2])
    began = time.monotonic()
    try:
        cuda = Cuda()
        began = time.monotonic()
        moved = {"hold": hold, "copy": copy}[kind](cuda, size) if kind in ("hold", "copy") else compute(cuda, kind)
    except FailedError as problem:
        print(json.dumps({"failed": str(problem)}), flush=True)
        sys.exit(4)
    print(json.dumps({"moved": moved, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()

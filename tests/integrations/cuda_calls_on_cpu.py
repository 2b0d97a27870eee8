"""Lets a program written for CUDA run on CPU: each CUDA call that nano-vllm makes, and what stands in for it.

A stand-in for a test, not a device: no streams, no graphs (the engine must be told to run eagerly). `install()` changes torch for the
whole process, so it belongs in a process of its own. Triton kernels of the program run in Triton's interpreter (TRITON_INTERPRET=1).
"""

import torch
import torch.distributed as dist

MEMORY = 256 << 20  # bytes that the device is said to have


def install():
    init, tensor, set_device = dist.init_process_group, torch.tensor, torch.set_default_device

    # The caching allocator's numbers: the engine sizes its KV cache by them.
    torch.cuda.mem_get_info = lambda device=None: (MEMORY, MEMORY)
    torch.cuda.memory_stats = lambda device=None: {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    # "cuda" is the CPU: default device, copies to it, pinned memory, and the process group's transport.
    torch.set_default_device = lambda device: set_device("cpu" if device == "cuda" else device)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.tensor = lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)
    dist.init_process_group = lambda backend, *args, **kwargs: init("gloo" if backend == "nccl" else backend, *args, **kwargs)

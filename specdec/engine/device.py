"""The device: which one, what it is, and the ceilings that its memory and arithmetic set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch

from specdec.engine.timing import now
from specdec.errors import InputError, MeasurementError

BANDWIDTH_REPEATS = 5  # the best of so many passes counts: a ceiling is what the device can do undisturbed
PEAK_MATRIX = 2048  # rows and columns; large enough that reading them costs little beside multiplying
LARGE_BUFFER_BYTES = 1_000_000_000  # larger than any cache, so that it shows main memory
DEVICES = "auto, cpu, cuda, cuda:N, mps, spread"
SPREAD = torch.device("meta")  # stands for "over all GPUs", which accelerate decides


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is CUDA where it works, else the CPU. InputError if it can't run."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "spread":
        if torch.cuda.device_count() < 2:
            raise InputError(f"--device spread needs several GPUs, torch sees {torch.cuda.device_count()}")
        return SPREAD
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as error:
        problem = nvidia_problem() if name.startswith("cuda") else None
        reason = problem or (str(error).strip().splitlines() or ["it can't be used"])[0]
        raise InputError(f"device {name!r} can't be used: {reason.rstrip('.')}; known: {DEVICES}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device {name!r} is not supported; known: {DEVICES}")
    return device


def nvidia_problem() -> str | None:
    """Return why torch can't use this machine's NVIDIA device, with the remedy; None if it can or there is none."""
    if torch.cuda.is_available() or not _nvidia_visible():
        return None
    if torch.version.cuda is None:
        return (
            "an NVIDIA device is visible, but this torch is a CPU build; install the CUDA build of torch to use it "
            "(see pytorch.org, Get Started)."
        )
    return (
        f"an NVIDIA device is visible, but torch (built for CUDA {torch.version.cuda}) can't use it; "
        "update the driver, or install a torch built for an older CUDA."
    )


def _nvidia_visible() -> bool:
    if Path("/proc/driver/nvidia/gpus").exists() or Path("/dev/nvidia0").exists():
        return True
    return shutil.which("nvidia-smi") is not None and bool(_nvidia_smi("name"))


def _nvidia_smi(fields: str) -> str | None:
    """Return what nvidia-smi says of the first GPU, or None where it can't."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def free_gpu_memory() -> dict[int, int]:
    """Return the free bytes of each GPU."""
    return {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())}


def describe(device: torch.device) -> dict:
    """Return name, driver and, on a GPU, clocks and throttling of ``device`` now."""
    if device.type == "cuda":
        return {
            "type": "cuda",
            "name": torch.cuda.get_device_name(device),
            "driver": _nvidia_smi("driver_version"),
            "clocks_and_throttling": _nvidia_smi("clocks.sm,clocks.mem,temperature.gpu,clocks_throttle_reasons.active"),
        }
    return {"type": device.type, **_processor(), "threads": torch.get_num_threads()}


def _processor() -> dict[str, str]:
    """Return the processor's name and, where the system tells it, its variant: hosts hide many behind one name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        variant = " ".join(f"{name} {facts[name]}" for name in ("cpu family", "model", "stepping") if name in facts)
        return {"name": facts["model name"]} | ({"variant": variant} if variant else {})
    except (OSError, KeyError):
        import platform

        return {"name": platform.processor() or platform.machine()}


def read_bandwidth(device: torch.device, size: int) -> float:
    """Return the read bandwidth (bytes/s) of ``device`` on a buffer of ``size`` bytes (at least 1 MB).

    The best of a reduction, a matrix-vector product and a copy, which counts its reads and its writes; of several
    passes the fastest. Small buffers may lie in a cache: that is the ceiling of a model that does too.
    """
    columns = 1024
    rows = max(size, 1_000_000) // (4 * columns)
    matrix = torch.ones(rows, columns, device=device)
    vector, other = torch.ones(columns, device=device), torch.empty_like(matrix)
    kernels = {
        "reduction": (lambda: matrix.sum(), 1),
        "matrix-vector product": (lambda: matrix @ vector, 1),
        "copy": (lambda: other.copy_(matrix), 2),
    }
    moved = matrix.numel() * 4
    return max(passes * moved / _fastest(kernel, device) for kernel, passes in kernels.values())


def _fastest(kernel, device: torch.device) -> float:
    kernel()
    times = []
    for _ in range(BANDWIDTH_REPEATS):
        started = now((device,))
        kernel()
        times.append(now((device,)) - started)
    if not min(times):
        raise MeasurementError("this machine's clock is too coarse: a pass over a large buffer took it no time")
    return min(times)


def weights_bandwidth(device: torch.device, bytes_per_token: int) -> float:
    """Return the read bandwidth (bytes/s) on a buffer as large as a model's weights, at most LARGE_BUFFER_BYTES."""
    return read_bandwidth(device, min(bytes_per_token, LARGE_BUFFER_BYTES))


def compute_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations/s (multiply and add are two) that a large matrix product of ``dtype`` reaches here."""
    left = torch.ones(PEAK_MATRIX, PEAK_MATRIX, device=device, dtype=dtype)
    right = torch.ones_like(left)
    return 2 * PEAK_MATRIX**3 / _fastest(lambda: left @ right, device)


def roofline_verify_ratio(tokens: int, bytes_per_token: float, parameters: int, bandwidth: float, peak: float) -> float:
    """Return the v(k) that two ceilings allow: max(bytes / bandwidth, k operations / peak), over the same at k = 1.

    A token takes two operations per parameter that is read for it (Williams et al. 2009; Kaplan et al. 2020).
    """
    read, compute = bytes_per_token / bandwidth, 2 * parameters / peak
    return max(read, tokens * compute) / max(read, compute)

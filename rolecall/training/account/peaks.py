"""The peak of each GPU: dense FLOP/s by the name its driver gives, from its maker's data sheets.

Whole names only: a laptop's, a slice's (MIG) or an export version's name contains another's and its silicon does less,
and a wrong peak makes a wrong MFU that nobody notices. A device that is not listed is unknown, and so are CPUs, whose
peak no name tells. Data sheets print twice these figures where they count on sparsity.
"""

import torch

_TERA = 1e12

_A100 = (312.0, 19.5)
"""nvidia-a100-datasheet-us-nvidia-1758950."""
_H100_SXM = (989.4, 66.9)
"""NVIDIA H100 Tensor Core GPU Architecture, table 2: SXM5."""
_H200 = (989.4, 66.9)
"""hpc-datasheet-sc23-h200: the compute of H100 SXM."""

_PEAK_TFLOPS: dict[str, tuple[float, float]] = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A30": (165.0, 10.3),  # a30-datasheet
    "NVIDIA A40": (149.7, 37.4),  # proviz-print-nvidia-a40-datasheet
    "NVIDIA A10": (125.0, 31.2),  # a10-datasheet
    "NVIDIA RTX A6000": (154.8, 38.7),  # proviz-print-nvidia-rtx-a6000-datasheet; NVIDIA Ampere GA102 GPU Architecture
    "NVIDIA L4": (121.0, 30.3),  # l4-datasheet
    "NVIDIA L40": (181.0, 90.5),  # l40-datasheet
    "NVIDIA L40S": (362.0, 91.6),  # l40s-datasheet
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": (756.5, 51.2),  # NVIDIA H100 Tensor Core GPU Architecture, table 2: PCIe
    "NVIDIA H100 NVL": (835.5, 60.0),  # h100-datasheet
    "NVIDIA GH200 480GB": _H100_SXM,  # grace-hopper-superchip-datasheet
    "NVIDIA H200": _H200,
    "NVIDIA H200 NVL": (835.5, 60.0),  # hpc-datasheet-sc23-h200
    "NVIDIA B200": (2250.0, 75.0),  # blackwell-datasheet: HGX B200
    "NVIDIA GB200": (2500.0, 80.0),  # blackwell-datasheet: GB200 NVL72, one of its GPUs
}
"""(bfloat16 or float16 on tensor cores, float32 without them, as torch multiplies float32 by default), in TFLOP/s."""


def peak_flops(device_name: str | None, dtype: torch.dtype) -> float | None:
    """FLOP/s of matrix multiplications in `dtype` on the device of this name (None: it has none). None when it is not
    known.
    """
    if device_name not in _PEAK_TFLOPS or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    half, single = _PEAK_TFLOPS[device_name]
    return _TERA * (single if dtype == torch.float32 else half)

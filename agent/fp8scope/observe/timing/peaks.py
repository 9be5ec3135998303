"""Peak rates of dense matrix products by device, to compute the utilisation (MFU).

BF16 with FP32 accumulation, without sparsity, in FLOP/s. FP8 runs are held against the same number, so that a
run and its BF16 baseline share one scale (an FP8 run may then exceed 1). Sources: the vendors' data sheets;
where one gives only the rate with 2:4 sparsity, half of it.
"""

import re

_TERA = 1e12

BF16_PEAKS: tuple[tuple[str, float], ...] = (
    # NVIDIA Blackwell data sheets: B200 4.5 PFLOP/s sparse, B300 as B200; GB200 5 PFLOP/s sparse a GPU.
    (r"\bGB[23]00\b", 2500 * _TERA),
    (r"\bB[23]00\b", 2250 * _TERA),
    # NVIDIA H200, H100, H20 and GH200 data sheets: SXM 1979, PCIe 1513, NVL 1671 TFLOP/s sparse.
    (r"\bH100 NVL\b", 835 * _TERA),
    (r"\bH100 PCIe\b", 756 * _TERA),
    (r"\bH20\b", 148 * _TERA),
    (r"\bH200 NVL\b", 835 * _TERA),
    (r"\b(G?H200|H100|H800)\b", 989 * _TERA),
    # NVIDIA A100 data sheet; A800 differs in its links only. A40, A10, A30: their data sheets.
    (r"\bA[18]00\b", 312 * _TERA),
    (r"\bA40\b", 149.7 * _TERA),
    (r"\bA30\b", 165 * _TERA),
    (r"\bA10G?\b", 125 * _TERA),
    # NVIDIA L40S (733 sparse), L40 (362 sparse) and L4 (242 sparse) data sheets.
    (r"\bL40S\b", 366 * _TERA),
    (r"\bL40\b", 181 * _TERA),
    (r"\bL4\b", 121 * _TERA),
    # NVIDIA Ada and Blackwell GPU architecture papers, tables of FP16 tensor rates with FP32 accumulation.
    (r"\bRTX 5090\b", 209.5 * _TERA),
    (r"\bRTX 4090\b", 165.2 * _TERA),
    (r"\bRTX 3090\b", 71 * _TERA),
    # AMD CDNA 3 and CDNA 4 data sheets: MI300X and MI325X 1307.4, MI300A 980.6, MI355X 2516.6, MI350X 2306.9.
    (r"\bMI355X\b", 2516.6 * _TERA),
    (r"\bMI350X\b", 2306.9 * _TERA),
    (r"\bMI3(00|25)X\b", 1307.4 * _TERA),
    (r"\bMI300A\b", 980.6 * _TERA),
    # AMD Instinct MI250X: 383 for its two dies, each of which is a separate device.
    (r"\bMI250X\b", 191.5 * _TERA),
)
"""Patterns of device names and their FLOP/s; the first match is used."""


def bf16_peak(device_name: str) -> float | None:
    """Return the dense BF16 FLOP/s of the device with this name, or None."""
    for pattern, peak in BF16_PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak
    return None

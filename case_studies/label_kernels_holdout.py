"""The holdout set: written after the thresholds were frozen, without sight of how they were chosen.

Numbers in the notes are of one H200: 132 SMs of 64 warps, 32 blocks, 65536 registers and 228 KB of shared memory each,
about 60 MB of L2, 4.2 TB/s of copies, 51 TFLOP/s in float32, 384 in TF32 and 790 in bfloat16 at 1980 MHz. A cycle and
SM that is 16 bytes of device memory, some 24 of L2, 128 instructions of threads, 64 of float64 and 16 of special
functions.
"""

from __future__ import annotations

from case_studies.label_kernels import Case
from case_studies.label_kernels_holdout_memory import CASES as MEMORY
from case_studies.label_kernels_holdout_negatives import CASES as NEGATIVES
from case_studies.label_kernels_holdout_sm import CASES as SM

CASES: tuple[Case, ...] = (*MEMORY, *SM, *NEGATIVES)

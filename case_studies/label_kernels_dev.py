"""The development set: at least three kernels for each axis, and negatives.

Numbers in the notes are of one H200: 132 SMs of 64 warps, 65536 registers and 228 KB of shared memory each, 50 MB of
L2, about 4.2 TB/s of copies, 50 TFLOP/s in float32 and 790 in bfloat16.
"""

from __future__ import annotations

from case_studies.label_kernels import Case
from case_studies.label_kernels_dev_memory import CASES as MEMORY
from case_studies.label_kernels_dev_negatives import CASES as NEGATIVES
from case_studies.label_kernels_dev_sm import CASES as SM

CASES: tuple[Case, ...] = (*MEMORY, *SM, *NEGATIVES)

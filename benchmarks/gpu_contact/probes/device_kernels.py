"""A kernel of the probes' own, in Triton's language, for which its interpreter does on a CPU.

Triton cannot follow postponed annotations of types here in every version, so this file does without.
"""

import triton
import triton.language as tl


@triton.jit
def nothing(value):
    """Reads a number that is not used: what a launch costs."""
    tl.load(value)

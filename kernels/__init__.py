"""Triton kernels, their launchers, their float64 references, and the noise. Knows torch and Triton, nothing else.

Names, the same in kernels, references, tests and README:

    B rows of the batch    V rows of the LM head    D hidden size    G groups of the vocabulary    P splits
    offs_ offsets          mask_ masks              blk_ a loaded block             acc accumulator
    BLOCK_B, BLOCK_V, BLOCK_D tile shape            GROUP_SIZE ids that share one noise value (rng.py)

A split is one of the P programs that share the vocabulary for a block of rows. A launcher validates its
arguments and raises ValueError; kernels assume. ``reference.py`` has the result of each kernel, in float64 and
from the definition; ``README.md`` explains how the kernels work.
"""

if __name__ == "kernels":
    # With the repository root on sys.path, `import kernels` would find this folder, not the PyPI
    # package of that name, which transformers imports when it is there.
    raise ImportError("this folder is sgl_flashsample.kernels: install sgl-flashsample and import it from there")

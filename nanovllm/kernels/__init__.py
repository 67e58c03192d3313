"""The operations a GPU spends its time in, one file an idea, each beside its torch reference.

Kernels are plain functions on tensors: a launcher checks shapes, strides and dtypes once, the
Triton kernel below it masks explicitly, and the `_torch` function of the same name is the reference
that CPU installs run and tests compare with. Nothing here knows about engines, layers or sequences,
and importing a module compiles nothing.
"""

"""Triton kernels: what torch has not, or has slower. In: tensors. Out: what the plain functions give, by
test.

Imported only where there is a GPU and Triton.
"""

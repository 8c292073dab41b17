"""Triton kernels: what torch has not, or has slower. In: tensors on a GPU. Out: the same numbers as the plain functions, by test.

Imported only where there is a GPU and Triton.
"""

"""Triton kernels for what torch lacks or does slower; by test they give what the plain functions give.

Imported only where there is a GPU and Triton.
"""

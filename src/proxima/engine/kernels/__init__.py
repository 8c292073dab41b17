"""Triton kernels: what torch has not, or has slower. Imported only where there is a GPU and Triton."""

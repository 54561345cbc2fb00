"""Machines that are not at hand: trees that look like /proc of other kernels, and looks at them without rights."""

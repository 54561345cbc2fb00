"""What the `gpu` collector says on a machine with a GPU, against nvidia-smi and known work: `make hardware`."""

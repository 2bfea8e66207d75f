"""Ranks over hosts: command lines of torchrun, srun and mpirun, job files, and starting them."""

"""Ranks on several hosts: torchrun, srun and mpirun command lines, job files, running them."""

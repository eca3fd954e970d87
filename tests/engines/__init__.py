"""Real engines on this machine: Slurm, MPI, torchx, Ray, SSH, and simulated pods. See ``__main__``."""

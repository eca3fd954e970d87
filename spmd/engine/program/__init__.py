"""The common part of SPMD mode's driver and workers: programs, layouts, and messages."""

"""A worker of SPMD mode: carries out the driver's programs. Imports nothing of the driver."""

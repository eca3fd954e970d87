from spmd.fsdp import *

from spmd.checkpoint import *

from spmd.tensor_parallel import *

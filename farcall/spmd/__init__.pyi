from spmd import *
from spmd import checkpoint as checkpoint
from spmd import fsdp as fsdp
from spmd import tensor_parallel as tensor_parallel

from dist_optim import *

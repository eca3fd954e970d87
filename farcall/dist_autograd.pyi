from dist_autograd import *

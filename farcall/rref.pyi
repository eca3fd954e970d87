from rref import *

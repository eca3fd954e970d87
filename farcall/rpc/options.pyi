from rpc.options import *

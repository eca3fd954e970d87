from rpc.functions import *

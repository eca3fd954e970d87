from rpc.api import *

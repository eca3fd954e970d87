from rpc.errors import *

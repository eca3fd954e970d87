from rpc.device_maps import *

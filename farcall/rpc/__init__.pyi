from rpc import *
from rpc import api as api
from rpc import device_maps as device_maps
from rpc import errors as errors
from rpc import functions as functions
from rpc import map as map  # noqa: A004  # the public name
from rpc import options as options
from rpc import serve as serve

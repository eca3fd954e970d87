"""Large tensors between workers of one host: copied once, into shared memory.

Copying into memory that is mapped and has been touched is several times faster than any socket, or than fresh
memory. So the memory is kept: a sender has a *pool* of *segments* for each peer, and the peer keeps them
mapped. What the peer receives is in these segments, and is used there.

The files, from the lowest:

- ``memory``: segments, and the page in which their return is noted; ``fd_channel``: the socket on which their
  descriptors are sent; ``packing``: the layout of buffers.
- ``pool``: which segments are free and which are lent. Pure.
- ``outgoing`` and ``incoming``: the two ends of what one worker sends to another.
- ``negotiation``: how two workers begin, as tables of states; ``exchange``: their messages about it.
"""

"""Large tensors between workers of one host: copied once, into memory that both share.

Copying into memory that is mapped and touched already is several times faster than any socket, and than
memory that is new. So the memory is kept: a sender has a *pool* of *segments* for each peer, the peer keeps
them mapped, and what it receives lies in them and is used right there.

The files, from the bottom:

- ``memory``: segments, and the page in which their return is noted; ``fd_channel``: the socket on which their
  descriptors travel; ``packing``: how buffers lie.
- ``pool``: which segment is free, which is lent. Pure.
- ``outgoing`` and ``incoming``: the two ends of what one worker sends to another.
- ``negotiation``: how two workers begin, as tables of states; ``exchange``: what they say about it.
"""

"""Elastic jobs: data-parallel training that goes on when members die, leave and join.

``agreement`` decides, without I/O; ``views`` carries it out; ``job`` and ``attempt`` are what programs use.
``farcall.elastic`` has the public names.
"""

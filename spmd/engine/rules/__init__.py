"""Sharding rules of this package, for operators for which DTensor has none, or one that moves more than
necessary.

A *placement rule* returns which placements an operator can take along one dimension of a mesh, and those of
its results: *rows*. Dimensions are independent: for each the row is chosen that moves the fewest bytes. A
*local rule* returns what a worker runs on its shards, if that is not the operator itself.
"""

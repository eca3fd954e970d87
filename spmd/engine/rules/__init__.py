"""Rules of our own, where DTensor has none, or one that moves more than it must.

A *placement rule* tells which placements an operator can take along one dimension of a mesh, and what it
then gives: *rows*. Dimensions are independent: for each the row is chosen that moves the fewest bytes.
A *local rule* tells what a worker runs on its parts, where that is not the operator itself.
"""

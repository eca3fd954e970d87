"""How tensors are cut over workers: meshes, partition specs, marks, and what lies where."""

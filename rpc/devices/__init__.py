"""Tensors on accelerators: where they go, how they are copied, and which streams wait for which.

Everything here goes through ``torch.accelerator``, ``torch.Stream``, ``torch.Event`` and
``Tensor.record_stream``, so that it holds for any accelerator that PyTorch has. The room is imported when a
worker, or one that it meets, has a device map; until then nothing of it exists.

The order of work on devices follows from one rule: *whatever a thread does for a message, it does on its
current streams.* So there are few waits, and each one is in this room:

- A message is written on the streams that are current when the call is made, or when the function returns.
  ``staging`` copies tensors to pinned memory on a stream that waits for these, and hands the message to the
  transport when the copies are done.
- A message is read on the current streams of the reading thread: those of the user's, where a thread waits
  for an answer; streams from PyTorch's pool (``streams``) for requests, and for the answers of futures.
- What was read or made on such streams is used elsewhere only after ``Ready.join``, which makes the current
  streams wait, and tells the allocator which streams use the memory.
"""

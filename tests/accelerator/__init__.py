"""A simulated accelerator, to test the order of streams without a GPU; and the tests of devices run on it.

``import tests.accelerator.device`` gives a process the device ``sim``: some devices with real asynchronous
streams, events, memory that is poisoned where it is fresh or freed, host access that crashes, memory shared
between processes, and every operator that the CPU has. ``csrc/runtime.*`` is the driver, which knows nothing
of PyTorch; ``csrc/backend.cpp`` is what PyTorch asks of a device; ``build`` compiles both when they are first
needed.

- Memory: each device has one file in memory, mapped twice. The address that tensors have may not be read or
  written (a segmentation fault); tasks of streams use the other one.
- Streams are threads. In the mode ``lazy``, a task runs only once something waits for it, or after 100 ms:
  what nothing waits for has not happened, and a missing wait shows.
- Operators: shapes come from running the operator on meta tensors, and the CPU's kernel runs later, as a task
  of the current stream, on the memory that its arguments have then.

A process has one device of this kind for good, so each test runs in a process of its own.
"""

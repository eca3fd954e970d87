"""Workers that do the same steps in the same order, and the driver that gives them these steps.

SPMD mode (``spmd/engine``) and models that workers serve (``spmd/tensor_parallel``) use it. The driver has a
:class:`~spmd.workers.worker_set.WorkerSet`, each worker a :class:`~spmd.workers.step_queue.StepQueue`.
"""

"""The page: a job in a browser, served on loopback behind a token, from the state files of its workers.

``view``, ``wait_layers`` and ``task_stream`` make what the page shows of the state of a job: plain values,
tested without processes. ``watcher`` reads the job and keeps what the page needs of the past, ``access``
decides which requests are answered, and ``server`` answers them. The page itself is in ``static``: plain
HTML, CSS and JavaScript without a build step, and uPlot with its licence.
"""

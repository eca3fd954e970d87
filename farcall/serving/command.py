"""``farcall serve``: a server in the foreground, which SIGTERM and SIGINT end gracefully."""

from __future__ import annotations

import logging
import math
import os
import signal
from dataclasses import replace

import click

from farcall.serving.admission import Limits
from farcall.serving.endpoint import Batching, Endpoint
from farcall.serving.loading import load
from farcall.serving.server import LOOPBACK, serve
from rpc.options import TlsOptions
from rpc.rendezvous.token import token_in_file
from rpc.runtime.blocking import event_of_signals, wait_for_event

__all__ = ["run"]


def run(
    target: str,
    *,
    host: str,
    port: int,
    token_file: str | None,
    cert: str | None,
    key: str | None,
    ca: str | None,
    insecure: bool,
    batch: int | None,
    delay: float,
    in_flight: int,
    queue: int,
    compressed: bool,
    metrics_port: int | None,
    metrics_host: str,
    grace: float,
    tracebacks: bool,
) -> int:
    """Serve until a signal arrives; options are those of the command. A second signal ends the process at
    once.

    Returns:
        The exit status.

    Raises:
        ValueError: an option is wrong, or there is nothing to serve.
        OSError: a file cannot be read, or the port is taken.
    """
    if (cert is None) != (key is None) or (ca is not None and cert is None):
        raise ValueError("TLS needs --cert and --key, and --ca if callers must have certificates")
    if math.isnan(grace):
        raise ValueError("--grace is a number of seconds, 0 or more")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    endpoints = load(target)
    if batch is not None:
        joined = Batching(batch, delay / 1e3)
        endpoints = {name: _batched(each, joined) for name, each in endpoints.items()}
    server = serve(
        endpoints,
        host=host,
        port=port,
        tokens=None if token_file is None else token_in_file("--token-file", token_file),
        tls=None if cert is None or key is None else TlsOptions(cert=cert, key=key, ca=ca or cert),
        client_certificates=ca is not None,
        insecure=insecure,
        limits=Limits(in_flight=in_flight, queue=queue, compressed=compressed),
        tracebacks=tracebacks,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    asked = event_of_signals(signal.SIGTERM, signal.SIGINT)
    names = ", ".join(endpoints)
    click.echo(
        f"serving {names} at {host}:{server.port}"
        + _metrics(metrics_host, server.metrics_port, encrypted=cert is not None)
    )
    wait_for_event(asked)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)
    click.echo("ending: no more calls are accepted; another signal ends it at once")
    left = server.stop(grace)
    if left:
        click.echo(f"cut off: {left} calls that were still running after {grace:g} s")
        os._exit(1)  # the interpreter would wait for their threads
    return 0


def _batched(endpoint: Endpoint, batching: Batching) -> Endpoint:
    return endpoint if endpoint.batching or endpoint.streams else replace(endpoint, batching=batching)


def _metrics(host: str, port: int | None, *, encrypted: bool) -> str:
    scheme = "https" if encrypted and host not in LOOPBACK else "http"
    return "" if port is None else f", metrics at {scheme}://{host}:{port}/metrics"

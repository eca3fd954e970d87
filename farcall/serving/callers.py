"""Identification of callers: bearer tokens, and certificates that TLS has checked."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc

from farcall.serving.metrics import NOT_SERVED, Metrics
from rpc.options import Token, to_token

__all__ = ["BearerTokens", "Callers"]

_HEADER: Final = "authorization"
_SCHEME: Final = "bearer "

_NAMES: Final = ("x509_common_name", "x509_subject_alternative_name")
"""Keys under which gRPC has the names in a certificate; the first is often empty."""


class Callers:
    """Identifies callers.

    Args:
        tokens: tokens by the owner's name; empty if none are required.
        certificates: whether TLS requires a certificate, whose name is the caller's.

    Raises:
        ValueError: a token is too short, or cannot be sent in a header.
    """

    def __init__(self, tokens: Mapping[str, str | bytes], *, certificates: bool) -> None:
        self._tokens: dict[str, Token] = {name: to_token(name, token) for name, token in tokens.items()}
        for name, token in self._tokens.items():
            if not (token.isascii() and token.decode().isprintable()):
                raise ValueError(f"the token of {name} comes in a header: it must be printable ASCII")
        self._certificates = certificates

    @property
    def have_tokens(self) -> bool:
        """Whether callers must have a token."""
        return bool(self._tokens)

    def has_token(self, authorization: str) -> bool:
        """Whether the value of the header ``authorization`` has one of the tokens."""
        return self.known([(_HEADER, authorization)])

    def known(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether the metadata of a call has one of the tokens."""
        return self._owner(metadata) is not None

    def name(self, context: Any) -> str:
        """Return the caller's name: the token's owner, the certificate's name, or the address."""
        if self._tokens and (owner := self._owner(context.invocation_metadata() or ())) is not None:
            return owner
        if self._certificates:
            shown = context.auth_context()
            names: Iterable[bytes] = (each for kind in _NAMES for each in shown.get(kind, ()) if each)
            for each in names:
                name = each.decode(errors="replace")
                return name if name.isprintable() else repr(name)  # it is written to a log line
        peer: str = context.peer()
        return peer.rpartition(":")[0]

    def _owner(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        for key, value in metadata:
            if key == _HEADER and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
                given = value[len(_SCHEME) :].encode()
                owners = [name for name, token in self._tokens.items() if hmac.compare_digest(token, given)]
                if owners:
                    return owners[0]
        return None


class BearerTokens(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses calls without a token before their message is read, and logs them.

    Args:
        callers: identifies callers.
        metrics: counts what is refused.
        probes: handlers of methods that need no token, by their full names. They read no request of a caller
            without one: gRPC takes as large a message for one method as for all others.
    """

    def __init__(self, callers: Callers, metrics: Metrics, probes: Mapping[str, Any]) -> None:
        self._callers = callers
        self._metrics = metrics
        self._probes = probes

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Continue the call, or answer that it is refused."""
        if self._callers.known(handler_call_details.invocation_metadata or ()):
            return await continuation(handler_call_details)
        probe = self._probes.get(handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(self._refuse) if probe is None else probe

    async def _refuse(self, _: Any, context: Any) -> None:
        came = any(key == _HEADER for key, _ in context.invocation_metadata() or ())
        what = "the token that came is none of this server's" if came else "this server wants a token"
        self._metrics.ended(NOT_SERVED, self._callers.name(context), grpc.StatusCode.UNAUTHENTICATED, 0.0)
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what}: authorization: Bearer TOKEN")

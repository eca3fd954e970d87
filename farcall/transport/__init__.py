"""gRPC between workers: connections that are streams over HTTP/2, for networks that let nothing else pass."""

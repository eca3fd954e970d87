"""gRPC: servers, values in protocol buffers, and connections between workers that are streams over HTTP/2."""

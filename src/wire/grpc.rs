//! gRPC over HTTP/2 over TLS 1.3: the connection (used by join as well), and the session's link.

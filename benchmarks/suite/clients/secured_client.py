"""SlateMQ with TLS, tokens and a policy."""

from benchmarks.suite.clients.tls_client import Client as Client

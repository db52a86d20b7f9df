"""The generated protobuf messages and gRPC stubs of slatemq.v1."""
